"""A pool of processes that gives each test a fresh gloo group in about 0.1 s.

    def load_on_each_rank(path: str) -> float:       # a top-level function of the test module
        rank = torch.distributed.get_rank()          # the gloo group is up
        ...
        return value                                 # anything that pickles; send tensors as NumPy or lists

    def test_every_rank_loads(ranks: RankPool, tmp_path: Path) -> None:
        values = ranks(4).run(load_on_each_rank, str(tmp_path))      # one value per rank, in rank order

- `run` raises `RankError`, with the failing ranks' tracebacks, unless every rank returned.
- `outcomes` returns one `Outcome` per rank instead, for tests that expect failures. A killed rank is `died`, a rank
  that stopped itself (SIGSTOP) is `stopped` once all others are done, one that overruns `limit_s` is `hung` and its
  stacks are in `error`. Such ranks are replaced before the next run. Importing and making the group do not count: on a
  loaded machine a rank that was just replaced takes a minute for it.
- `store="file" | "tcp"` chooses the default store of the group, `gloo_timeout_s` its timeout.

The processes come from a fork server that has torch and transformers loaded: starting one costs 0.15 s, where a fresh
interpreter takes seconds. They live for the whole session, so a test must not leave state behind in its module.
Functions and arguments travel by pickle: a worker imports the test module under the name it has here, from the
directory it was found in.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

Store = Literal["file", "tcp"]

# A guess: importing torch took a minute while ten other jobs ran.
SET_UP_WITHIN_S = 300
# What every worker has imported when it is forked: what takes seconds and is wanted by many tests. Pytest because a
# worker imports its parent's main module.
PRELOADED = (
    "pytest",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "diffusers.models.transformers",
    "shardferry.torch",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank's function did.

    Attributes:
        rank: The rank.
        status: `"returned"`, `"raised"`, `"died"`, `"stopped"` or `"hung"`; `"ready"` is between pool and worker.
        value: What the function returned.
        error_type: Name of the type of the error that the function raised, else empty.
        error: Its message; the stacks of a rank that hung.
        error_traceback: Its traceback as text.
        exit_code: Of a rank that died: negative means killed by that signal.
        ended_at: `time.monotonic()`, one clock for all processes, when the function ended or the death was seen.
    """

    rank: int
    status: Literal["ready", "returned", "raised", "died", "stopped", "hung"]
    value: Any = None
    error_type: str = ""
    error: str = ""
    error_traceback: str = ""
    exit_code: int | None = None
    ended_at: float = 0.0


class RankError(AssertionError):
    """At least one rank did not return; the message has every such rank's traceback."""


@dataclass(frozen=True, slots=True)
class _Job:
    """What a worker is sent; `call` is the pickled (function, arguments)."""

    module: str
    import_root: str
    call: bytes
    rank: int
    world_size: int
    run_dir: str
    store: Store
    gloo_timeout_s: float


class RankPool:
    """Worker processes, started when first needed. `pool(world_size)` picks the first `world_size` of them."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="rank-pool-"))
        self._workers: list[_Worker] = []
        self._num_runs = 0

    def __call__(self, world_size: int, *, store: Store = "file", gloo_timeout_s: float = 30.0) -> Ranks:
        """Return `world_size` ranks whose next runs use this store and timeout; starts nothing yet."""
        return Ranks(self, world_size, store, gloo_timeout_s)

    def acquire(self, world_size: int) -> tuple[list[_Worker], Path]:
        """Return `world_size` live workers and a new directory for their run."""
        for place, worker in enumerate(self._workers):
            if not worker.process.is_alive():
                worker.close()
                self._workers[place] = _Worker(self._directory)
        while len(self._workers) < world_size:
            self._workers.append(_Worker(self._directory))
        self._num_runs += 1
        run_dir = self._directory / f"run-{self._num_runs}"
        run_dir.mkdir()
        return self._workers[:world_size], run_dir

    def close(self) -> None:
        """End the workers and remove the pool's files."""
        for worker in self._workers:
            worker.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class Ranks:
    """Some ranks of a pool, and the kind of group they get."""

    def __init__(self, pool: RankPool, world_size: int, store: Store, gloo_timeout_s: float) -> None:
        self._pool = pool
        self._world_size = world_size
        self._store: Store = store
        self._gloo_timeout_s = gloo_timeout_s

    def run(self, function: Callable[..., Any], *args: object, limit_s: float = 60.0) -> list[Any]:
        """Return what `function(*args)` returned on each rank.

        Raises:
            RankError: If a rank raised, died or overran `limit_s`.
        """
        outcomes = self.outcomes(function, *args, limit_s=limit_s)
        failures = [_describe(outcome) for outcome in outcomes if outcome.status != "returned"]
        if failures:
            raise RankError("\n".join(failures))
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function: Callable[..., Any], *args: object, limit_s: float = 60.0) -> list[Outcome]:
        """Return what `function(*args)` did on each rank, however it ended."""
        workers, run_dir = self._pool.acquire(self._world_size)
        call = pickle.dumps((function, args))
        root = _import_root(function.__module__, sys.modules[function.__module__].__file__ or "")
        for rank, worker in enumerate(workers):
            job = _Job(
                module=function.__module__,
                import_root=root,
                call=call,
                rank=rank,
                world_size=self._world_size,
                run_dir=str(run_dir),
                store=self._store,
                gloo_timeout_s=self._gloo_timeout_s,
            )
            # A worker that died between two runs is found by the wait below.
            with contextlib.suppress(BrokenPipeError):
                worker.connection.send(job)
        # No rank begins before all have their group: one that dies early would fail the others in gloo's set-up.
        outcomes = _collect(workers, deadline=time.monotonic() + SET_UP_WITHIN_S)
        if any(outcome.status != "ready" for outcome in outcomes):
            for worker in workers:
                worker.kill()  # what gloo leaves behind in a process after a failed set-up breaks later ones
            return outcomes
        for worker in workers:
            worker.connection.send("go")
        return _collect(workers, deadline=time.monotonic() + limit_s)


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, directory: Path) -> None:
        root = _import_root(__name__, __file__)
        if root not in sys.path:
            sys.path.insert(0, root)  # a worker takes over this path, and looks its main function up by name
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self.connection, theirs = context.Pipe()
        self.process: ForkServerProcess = context.Process(target=_work, args=(theirs, str(directory)), daemon=True)
        self.process.start()
        theirs.close()
        self._directory = directory

    def state(self) -> str:
        """Return the kernel's letter for the state of the process, "T" for stopped; empty once it has ended."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return ""
        return stat.rpartition(")")[2].split()[0]

    def stacks(self) -> str:
        """Ask the process for the stacks of its threads and return them."""
        path = self._directory / f"{self.process.pid}.stacks"
        os.kill(self.process.pid or 0, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while not path.stat().st_size and time.monotonic() < deadline:
            wait([self.process.sentinel], timeout=0.05)
        return path.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)

    def close(self) -> None:
        self.connection.close()  # a worker that waits for its next job ends at this
        self.process.join(0.5)
        if self.process.is_alive():
            self.kill()
        self.process.close()


def _import_root(module: str, file: str) -> str:
    """Return the directory from which `module` can be imported by this name."""
    return str(Path(file).resolve().parents[module.count(".")])


def _describe(outcome: Outcome) -> str:
    detail = outcome.error_traceback or outcome.error or f"exit code {outcome.exit_code}"
    return f"rank {outcome.rank} {outcome.status}:\n{detail}"


def _collect(workers: list[_Worker], *, deadline: float) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(workers):
        pending = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in outcomes}
        # A stopped process tells nobody, nor does a dead one whose child holds its pipe: look for them now and then.
        ready = wait(list(pending), timeout=0.1)
        for connection in ready:
            rank = next(rank for known, rank in pending.items() if known is connection)
            outcomes[rank] = _receive(rank, workers[rank])
        overrun = time.monotonic() > deadline
        if not ready and (overrun or all(workers[rank].state() in {"", "T"} for rank in pending.values())):
            for rank in pending.values():
                outcomes[rank] = _end(rank, workers[rank])
    return [outcomes[rank] for rank in range(len(workers))]


def _receive(rank: int, worker: _Worker) -> Outcome:
    try:
        outcome: Outcome = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        ended_at = time.monotonic()
        worker.process.join(10)
        return Outcome(rank, "died", exit_code=worker.process.exitcode, ended_at=ended_at)
    return outcome


def _end(rank: int, worker: _Worker) -> Outcome:
    """End a rank that is not going to send its outcome."""
    ended_at = time.monotonic()
    state = worker.state()
    stacks = worker.stacks() if state not in {"", "T"} else ""
    worker.kill()
    if not state:
        return Outcome(rank, "died", exit_code=worker.process.exitcode, ended_at=ended_at)
    return Outcome(rank, "stopped" if state == "T" else "hung", error=stacks, ended_at=ended_at)


def _work(connection: Connection, directory: str) -> None:
    """Run jobs until the pool closes the pipe. Runs in the worker process."""
    import torch  # only the workers need it

    gc.freeze()  # what is imported stays: collections need not look at it
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    with (Path(directory) / f"{os.getpid()}.stacks").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        while True:
            try:
                job: _Job = connection.recv()
            except EOFError:
                return
            outcome = _run_job(job, connection)
            try:
                connection.send(outcome)
            except Exception as error:  # noqa: BLE001 - whatever pickling a test's value raises is the test's outcome
                connection.send(_raised(job.rank, error))


def _run_job(job: _Job, connection: Connection) -> Outcome:
    import torch.distributed as dist

    try:
        if job.import_root not in sys.path:
            sys.path.insert(0, job.import_root)
        importlib.import_module(job.module)
        function, args = pickle.loads(job.call)  # noqa: S301 - written by the pool itself
        store = _make_store(job)
        store.set(f"rank-{job.rank}-is-here", "")  # so that the group's time-out is not spent on waiting for imports
        store.wait([f"rank-{rank}-is-here" for rank in range(job.world_size)], timedelta(seconds=SET_UP_WITHIN_S))
        dist.init_process_group(
            "gloo",
            store=store,
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.gloo_timeout_s),
        )
        try:
            connection.send(Outcome(job.rank, "ready"))
            connection.recv()
            value = function(*args)
            ended_at = time.monotonic()
        finally:
            dist.destroy_process_group()
            _forget_meshes()
    except BaseException as error:  # noqa: BLE001 - tests raise KeyboardInterrupt and SystemExit on purpose
        return _raised(job.rank, error)
    return Outcome(job.rank, "returned", value=value, ended_at=ended_at)


def _forget_meshes() -> None:
    """Drop what DTensor has planned, and the groups with it.

    It takes the next run's meshes for the same, whose groups have other names. And each group that a plan or a model in
    a cycle refers to keeps a thread that looks for work a hundred times a second: they become hundreds.
    """
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _redistribute._gen_transform_infos.cache_clear()  # noqa: SLF001 - torch has no public way
    _redistribute.clear_redistribute_planner_cache()
    _clear_sharding_prop_cache()
    gc.collect()


def _raised(rank: int, error: BaseException) -> Outcome:
    ended_at = time.monotonic()
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - tests raise errors whose text cannot be made
        message = "<__str__ raised>"
    return Outcome(
        rank,
        "raised",
        error_type=type(error).__name__,
        error=message,
        error_traceback="".join(traceback.format_exception(error)),
        ended_at=ended_at,
    )


def _make_store(job: _Job) -> Any:  # noqa: ANN401 - torch's Store, which this file does not import
    from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # no __all__ there

    file_store = FileStore(f"{job.run_dir}/store", job.world_size)
    if job.store == "file":
        return PrefixStore("run", file_store)
    if job.rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        file_store.set("port", str(store.port))
        return store
    return TCPStore("127.0.0.1", int(file_store.get("port")), is_master=False)
