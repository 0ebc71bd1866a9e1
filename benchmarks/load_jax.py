"""How fast do several JAX processes load a checkpoint, beside Orbax, and what do they read?

Processes of a `jax.distributed` job on one machine, each with two devices that XLA makes of the processor. Two places:
files on a local disk that are in the page cache, which all share; and mounts that share none and one bandwidth of
100 MB/s, that of a slow file server, with caches emptied before each call. Shardings: rows or columns cut over all
devices, and everything replicated, with odd sizes that no number of processes divides.

Ways, which take turns: `auto` of shardferry; `always` (each byte read once and exchanged); `orbax`, its safetensors
layout; `divided`, Orbax's reader under shardings that also cut replicated tensors wherever a dim divides, followed by
a jitted identity to the target's, which is what its read-once proposal does; and `everyone`, safetensors' own reader
loading whole files in every process.

    python -m benchmarks.load_jax [--processes 2 4] [--rows rows columns all slow] [--rounds 4] [--add]

`--rows` chooses what to measure, whose earlier records go; with `--add` they stay, and more rounds join them. Needs
root and /dev/fuse for the mounts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from benchmarks.machine import machine
from benchmarks.measure import Meter, wake_memory
from safetensors.numpy import load_file, save_file
from tests.tools.mounts import slow_mounts

from shardferry.execute.costs import mount_below, remember
from shardferry.execute.probing import probe_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.synchronize import Barrier

    import jax
    from tests.tools.mounts import SlowMounts

    # From a path and what is wanted to what was loaded.
    Way = Callable[[Path, dict[str, jax.ShapeDtypeStruct]], dict[str, jax.Array]]

RESULTS = Path(__file__).parent / "results" / "load_jax.jsonl"
FILE = "model.safetensors"
DEVICES = 2
RATE_MB = 100
EVEN, ODD = (6144, 4096), (6143, 4093)
NAMES = ("embed", "up", "down", "head")
SPECS: dict[str, tuple[Any, ...]] = {"rows": (("data", "model"),), "columns": (None, ("data", "model")), "all": ()}
# What most ways take at a time: it is to be there already.
AWAKE_BYTES = 640 << 20


class Row(NamedTuple):
    """What is measured under one sharding.

    Attributes:
        place: `"cached"` or `"slow"`.
        sharding: A key of `SPECS`.
        ways: Who loads.
    """

    place: str
    sharding: str
    ways: tuple[str, ...]


ROWS = {
    "rows": Row("cached", "rows", ("auto", "orbax", "everyone")),
    "columns": Row("cached", "columns", ("auto", "orbax", "everyone")),
    "all": Row("cached", "all", ("auto", "orbax", "everyone")),
    "slow": Row("slow", "all", ("auto", "always", "orbax", "divided", "everyone")),
}


class Run(NamedTuple):
    """One call: a row's place and sharding, who loads, and which turn it is; tables leave turn 0 out."""

    place: str
    sharding: str
    way: str
    round: int


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--add", action="store_true")
    arguments = parser.parse_args()
    rows = [ROWS[name] for name in arguments.rows]
    records = [json.loads(line) for line in RESULTS.read_text().splitlines()[1:]] if RESULTS.exists() else []
    for processes in arguments.processes:
        again = [one for one in records if one["processes"] == processes and _row_of(one) in rows]
        if not arguments.add:
            records = [one for one in records if one not in again]
        last = max((one["round"] for one in again), default=0) if arguments.add else 0
        records += _measure_job(processes, _runs(rows, range(last + 1, last + 1 + arguments.rounds)))
    RESULTS.write_text("".join(json.dumps(record) + "\n" for record in [machine(), *records]))
    _print(records)


def _row_of(record: dict[str, Any]) -> Row:
    return next(row for row in ROWS.values() if (row.place, row.sharding) == (record["place"], record["sharding"]))


def _measure_job(processes: int, runs: Sequence[Run]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="shardferry-load-jax-", dir="/var/tmp") as made, ExitStack() as stack:
        folder = Path(made)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        for name, shape in (("even", EVEN), ("odd", ODD)):
            (folder / name).mkdir()
            numbers = np.random.default_rng(0)
            save_file({key: numbers.integers(0, 1 << 16, shape, np.uint16) for key in NAMES}, folder / name / FILE)
        mounts = stack.enter_context(slow_mounts(folder / "odd", nodes=processes, latency_ms=0.5, rate_mb=RATE_MB))
        _remember_cost(mounts)
        context = multiprocessing.get_context("spawn")
        barrier, port = context.Barrier(processes), _free_port()
        calls = [(at, processes, port, folder, mounts, runs, barrier) for at in range(processes)]
        workers = [context.Process(target=work, args=call) for call in calls]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise SystemExit("a process failed")
        return [
            json.loads(line) for at in range(processes) for line in (folder / f"told-{at}").read_text().splitlines()
        ]


def _remember_cost(mounts: SlowMounts) -> None:
    """Keep what the mounts cost for `auto`, as `shardferry probe` does."""
    result = probe_storage(mounts.paths[0], streams=2)
    if not result.why_preset:
        for path in mounts.paths:
            remember(mount_below(path), result.model)


def work(  # noqa: PLR0917 - what a process is told
    at: int, processes: int, port: int, folder: Path, mounts: SlowMounts, runs: Sequence[Run], barrier: Barrier
) -> None:
    """Be one process of the job; write what was measured."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=processes, process_id=at)
    ways = _ways(processes)
    with (folder / f"told-{at}").open("w") as told:
        for run in runs:
            path = mounts.paths[at] if run.place == "slow" else folder / ("odd" if run.sharding == "all" else "even")
            wanted = _wanted(run.sharding, processes)
            if run.place == "slow":
                mounts.drop(FILE, at)
            wake_memory(AWAKE_BYTES)
            meter = Meter()
            barrier.wait()
            if at == 0:
                mounts.reset()
            barrier.wait()
            with meter:
                begin = time.perf_counter()
                made = ways[run.way](path, wanted)
                for array in made.values():
                    array.block_until_ready()
                seconds = time.perf_counter() - begin
            barrier.wait()
            shards = [shard.data for array in made.values() for shard in array.addressable_shards]
            held = sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}.values())
            record = {
                **run._asdict(),
                "processes": processes,
                "process": at,
                "seconds": seconds,
                "bytes_from_server": mounts.counts(at)["read_bytes"],
                "checkpoint_bytes": (path / FILE).stat().st_size,
                "held_bytes": held,
                "peak_bytes": meter.peak_bytes,
                "exact": _is_exact(made, folder / ("odd" if run.sharding == "all" else "even")),
            }
            told.write(json.dumps(record) + "\n")
            told.flush()


def _runs(rows: Sequence[Row], rounds: Sequence[int]) -> list[Run]:
    """Return the calls in order: per row one turn to begin with, then rounds in which every way has a turn."""
    return [
        Run(place, sharding, way, number)
        for place, sharding, ways in rows
        for number in (0, *rounds)
        for way in (*ways[number % len(ways) :], *ways[: number % len(ways)])
    ]


def _wanted(sharding: str, processes: int) -> dict[str, jax.ShapeDtypeStruct]:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(processes, DEVICES), ("data", "model"))
    cut = NamedSharding(mesh, PartitionSpec(*SPECS[sharding]))
    return {name: jax.ShapeDtypeStruct(ODD if sharding == "all" else EVEN, np.uint16, sharding=cut) for name in NAMES}


def _ways(processes: int) -> dict[str, Way]:
    import jax
    import orbax.checkpoint.experimental.v1 as ocp
    from jax.sharding import NamedSharding, PartitionSpec

    import shardferry.jax as sf

    def auto(path: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        nodes = range(processes) if path.is_mount() else [0] * processes
        made: dict[str, jax.Array] = sf.load(path, wanted, node_of_rank=list(nodes))
        return made

    def always(path: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        made: dict[str, jax.Array] = sf.load(path, wanted, node_of_rank=[0] * processes, read_once="always")
        return made

    def orbax(path: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        with ocp.Context(checkpoint_layout=ocp.options.CheckpointLayout.SAFETENSORS):
            made: dict[str, jax.Array] = ocp.load(path, wanted)
        return made

    def divided(path: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        read = {}
        for name, target in wanted.items():
            assert isinstance(target.sharding, NamedSharding)
            dim = next((dim for dim, size in enumerate(target.shape) if size % (processes * DEVICES) == 0), None)
            spec = PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, ("data", "model"))
            cut = NamedSharding(target.sharding.mesh, spec)
            read[name] = jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=cut)
        made = orbax(path, read)
        whole = {name: target.sharding for name, target in wanted.items()}
        same: dict[str, jax.Array] = jax.jit(lambda tree: tree, out_shardings=whole)(made)
        return same

    def everyone(path: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        stored = load_file(path / FILE)
        return {
            name: jax.make_array_from_callback(target.shape, target.sharding, stored[name].__getitem__)
            for name, target in wanted.items()
        }

    return {"auto": auto, "always": always, "orbax": orbax, "divided": divided, "everyone": everyone}


def _is_exact(made: dict[str, jax.Array], path: Path) -> bool:
    stored = load_file(path / FILE)
    return all(
        np.array_equal(np.asarray(shard.data), stored[name][shard.index])
        for name, array in made.items()
        for shard in array.addressable_shards
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _print(records: Sequence[dict[str, Any]]) -> None:
    """Print, per case and way, the seconds of the slowest process, and how much faster than Orbax."""
    cases: dict[tuple[int, str, str], dict[str, dict[int, list[dict[str, Any]]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for record in records:
        if record["round"]:
            case = (record["processes"], record["place"], record["sharding"])
            cases[case][record["way"]][record["round"]].append(record)
    print(f"{'':28} {'way':10} {'seconds':>8} {'x orbax':>8} {'read/file':>10} {'peak - held':>12} exact")
    for (processes, place, sharding), ways in cases.items():
        for way, rounds in ways.items():
            slowest = {number: max(one["seconds"] for one in those) for number, those in rounds.items()}
            ratios = [max(one["seconds"] for one in ways["orbax"][n]) / slowest[n] for n in slowest]
            every = [one for those in rounds.values() for one in those]
            read = sum(one["bytes_from_server"] for one in every) / len(rounds) / every[0]["checkpoint_bytes"]
            extra = max(one["peak_bytes"] - one["held_bytes"] for one in every) >> 20
            print(
                f"{f'{processes} processes, {place}, {sharding}':28} {way:10} "
                f"{statistics.median(slowest.values()):8.2f} {statistics.median(ratios):8.2f} {read:10.2f} "
                f"{extra:8} MiB {all(one['exact'] for one in every)}"
            )


if __name__ == "__main__":
    main()
