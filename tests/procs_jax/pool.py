"""Pools of processes that share a JAX job, one per topology, started once per session.

    def shape_on_each(path: str) -> tuple[int, ...]:     # a top-level function of the test module
        ...                                              # jax.distributed is up
        return value                                     # anything that pickles

    def test_it(jax_job: JaxJobs, tmp_path: Path) -> None:
        values = jax_job(2, 4).run(shape_on_each, str(tmp_path))     # 2 processes of 4 devices; one value each

`run` raises `JaxError`, with the failing processes' tracebacks, unless all returned; `outcomes` returns what each did.
A job of which a process has died or hangs is started anew when it is next asked for. The processes come from a fork
server that has imported jax. `process_allgather` and `broadcast_one_to_all` raise in them: values never travel so.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Literal

import jax
from jax.experimental import multihost_utils

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

PRELOADED = ("pytest", "jax", "flax.nnx", "shardferry.jax")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one process did.

    Attributes:
        status: `"returned"`, `"raised"`, `"died"` or `"hung"`.
        value: What the function returned.
        error_type: Name of the type of the error raised, else empty.
        error: Its message.
        error_traceback: Its traceback as text.
        ended_at: `time.monotonic()`, one clock for all processes, at the end.
    """

    status: Literal["returned", "raised", "died", "hung"]
    value: Any = None
    error_type: str = ""
    error: str = ""
    error_traceback: str = ""
    ended_at: float = 0.0


class JaxError(AssertionError):
    """At least one process did not return."""


class JaxJobs:
    """The jobs of a session, by number of processes and of devices in each."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[int, int], JaxJob] = {}

    def __call__(self, num_processes: int, num_devices: int) -> JaxJob:
        """Return a job whose processes are all alive."""
        job = self._jobs.get((num_processes, num_devices))
        if job is None or not job.is_alive():
            if job is not None:
                job.close()
            job = self._jobs[num_processes, num_devices] = JaxJob(num_processes, num_devices)
        return job

    def close(self) -> None:
        """End all processes."""
        for job in self._jobs.values():
            job.close()


class JaxJob:
    """Processes that have joined one JAX job."""

    def __init__(self, num_processes: int, num_devices: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._processes: list[ForkServerProcess] = []
        self._connections: list[Connection] = []
        for at in range(num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, address, num_processes, num_devices, at), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def run(self, function: Callable[..., Any], *args: object, limit_s: float = 60.0) -> list[Any]:
        """Return what `function(*args)` returned in each process.

        Raises:
            JaxError: If a process raised, died or overran `limit_s`.
        """
        outcomes = self.outcomes(function, *args, limit_s=limit_s)
        failures = [
            f"process {at} {outcome.status}:\n{outcome.error_traceback}"
            for at, outcome in enumerate(outcomes)
            if outcome.status != "returned"
        ]
        if failures:
            raise JaxError("\n".join(failures))
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function: Callable[..., Any], *args: object, limit_s: float = 60.0) -> list[Outcome]:
        """Return what `function(*args)` did in each process, however it ended."""
        call = pickle.dumps((function, args))
        for connection in self._connections:
            connection.send(call)
        deadline = time.monotonic() + limit_s
        found: dict[int, Outcome] = {}
        while len(found) < len(self._connections):
            pending = {id(c): at for at, c in enumerate(self._connections) if at not in found}
            ready = wait([self._connections[at] for at in pending.values()], timeout=0.5)
            for at in [pending[id(connection)] for connection in ready]:
                found[at] = _receive(self._connections[at])
            if time.monotonic() > deadline:
                for at in set(pending.values()) - set(found):
                    self._processes[at].kill()
                    found[at] = Outcome("hung", ended_at=time.monotonic())
        if any(outcome.status in {"died", "hung"} for outcome in found.values()):
            self.close()
        return [found[at] for at in range(len(self._connections))]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()  # leaving in order would wait for the others at the coordination service
            process.join(10)


def _receive(connection: Connection) -> Outcome:
    try:
        outcome: Outcome = connection.recv()
    except (EOFError, ConnectionResetError):
        return Outcome("died", ended_at=time.monotonic())
    return outcome


def _work(connection: Connection, address: str, num_processes: int, num_devices: int, at: int) -> None:
    """Run jobs until the pool ends the process."""
    # Read when JAX first looks for devices, which no process has done by now.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={num_devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    multihost_utils.process_allgather = _refuse
    multihost_utils.broadcast_one_to_all = _refuse
    if num_processes > 1:
        jax.distributed.initialize(address, num_processes=num_processes, process_id=at)
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        try:
            function, args = pickle.loads(call)  # noqa: S301 - written by the pool itself
            outcome = Outcome("returned", value=function(*args), ended_at=time.monotonic())
        except BaseException as error:  # noqa: BLE001 - whatever a test raises is its outcome
            text = "".join(traceback.format_exception(error))
            outcome = Outcome("raised", None, type(error).__name__, str(error), text, time.monotonic())
        connection.send(outcome)


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("values must not travel through multihost_utils")
