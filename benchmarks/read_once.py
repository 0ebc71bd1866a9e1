"""Is `read_once="auto"` as fast as the better of reading once and reading alone, and how fast is that?

Two "nodes" of two ranks each see one checkpoint through mounts that share no page cache (FUSE), and one bandwidth: that
of a file server. For each bandwidth, and for files in memory that all share: a model that all ranks hold whole, and one
of which tensor parallelism gives the ranks of a node a half each, rows of one weight and columns of another, beside
some that both hold. `never`, `always` and `auto` take turns, page caches are emptied before each, and memory is there
beforehand. `auto` goes by what `shardferry probe` has measured on both mounts at the same time.

    python -m benchmarks.read_once [--rounds 3]

Also measured: how fast gloo brings bytes to one rank while all others receive too, which is `rank_bandwidth` of a cost
model. Needs root and /dev/fuse.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.machine import machine
from safetensors.numpy import save_file
from tests.tools.mounts import slow_mounts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import shardferry.torch as sf
from shardferry.execute.costs import mount_below, remember
from shardferry.execute.probing import probe_storage
from shardferry.torch.group import open_group
from shardferry.torch.mover import open_mover

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.tools.mounts import SlowMounts

    from shardferry.torch.shardings import GivenSharding

RESULTS = Path(__file__).parent / "results" / "read_once.jsonl"
FILE = "model.safetensors"
NODES = (0, 0, 1, 1)
# Four tensors of 48 MiB: enough for a probe, and for a page cache to read ahead without its showing.
ROWS, WIDTH, NAMES = 6144, 4096, ("embed", "up", "down", "head")
MODES: tuple[Mode, ...] = ("never", "always", "auto")
PLACES = {"100 MB/s": 100, "250 MB/s": 250, "500 MB/s": 500, "1 GB/s": 1000, "memory": 0}
STREAMS = 4  # read threads of a node: two ranks of two
PROBE_AFTER_S = 0.5  # until both processes are there
EXCHANGED_BYTES, EXCHANGES = 32 << 20, 10

Mode = Literal["never", "always", "auto"]
Model = Literal["replicated", "tp"]


class Place(NamedTuple):
    """Where the checkpoint is: its name, the path of each node, and the mounts, if it is not in memory."""

    name: str
    paths: tuple[Path, ...]
    mounts: SlowMounts | None


def main() -> None:
    """Measure every place, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardferry-read-once-", dir="/dev/shm") as made:
        folder = Path(made)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        write_checkpoint(folder / "checkpoint")
        with ExitStack() as stack:
            places = [stack.enter_context(_place(name, folder / "checkpoint")) for name in arguments.places]
            models = [_probe(place) for place in places]
            _run([(rank, places, arguments.rounds, folder) for rank in range(len(NODES))])
        told = [json.loads(line) for line in (folder / "told").read_text().splitlines()]
    RESULTS.write_text("".join(json.dumps(record) + "\n" for record in (machine(), *models, *told)))


def _run(calls: list[tuple[int, list[Place], int, Path]]) -> None:
    """Measure in a process for each rank."""
    with multiprocessing.get_context("spawn").Pool(len(calls)) as pool:
        pool.starmap(measure, calls, chunksize=1)


def write_checkpoint(folder: Path) -> None:
    """Write one file of four matrices."""
    folder.mkdir()
    numbers = np.random.default_rng(0)
    save_file({name: numbers.integers(0, 1 << 15, (ROWS, WIDTH), np.int16) for name in NAMES}, folder / FILE)


@contextmanager
def _place(name: str, folder: Path) -> Iterator[Place]:
    if not PLACES[name]:
        yield Place(name, (folder, folder), None)
        return
    with slow_mounts(folder, nodes=2, latency_ms=0.5, rate_mb=PLACES[name]) as mounts:
        yield Place(name, mounts.paths, mounts)


def _probe(place: Place) -> dict[str, object]:
    """Keep what both nodes measure when they read at the same time, for loads; return it."""
    if place.mounts is None:
        return {"place": place.name, "cost": "preset"}
    start = time.time() + PROBE_AFTER_S
    with multiprocessing.get_context("fork").Pool(len(place.paths)) as pool:
        results = pool.starmap(_probe_mount, [(path, start) for path in place.paths], chunksize=1)
    _drop(place)
    return {"place": place.name, "node_bandwidth": results[0][0], "seek_bytes": results[0][1], "why": results[0][2]}


def _probe_mount(path: Path, start: float) -> tuple[float, int, str]:
    time.sleep(max(0.0, start - time.time()))
    result = probe_storage(path, streams=STREAMS)
    if not result.why_preset:
        remember(mount_below(path), result.model)
    return result.model.node_bandwidth, result.model.seek_bytes, result.why_preset


def measure(rank: int, places: list[Place], rounds: int, folder: Path) -> None:
    """Be one rank; rank 0 prints and writes what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=len(NODES))
    records = [_measure_exchange()]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    models: dict[Model, Mapping[str, GivenSharding]] = {
        "replicated": {},
        "tp": {"up": (mesh, (Replicate(), Shard(0))), "down": (mesh, (Replicate(), Shard(1)))},
    }
    for model, shardings in models.items():
        state = _empty(shardings)
        for mode in MODES:
            _load(places[-1], state, shardings, mode)  # pays for imports and pages
        for place in places:
            calls: dict[Mode, list[tuple[float, str]]] = {mode: [] for mode in MODES}
            for turn in range(rounds):
                for mode in (*MODES[turn % 3 :], *MODES[: turn % 3]):
                    calls[mode].append(_load(place, state, shardings, mode))
            records.append(_record(model, place, calls))
            if rank == 0:
                print(json.dumps(records[-1]), flush=True)
    if rank == 0:
        (folder / "told").write_text("".join(json.dumps(record) + "\n" for record in records))
    dist.destroy_process_group()


def _empty(shardings: Mapping[str, GivenSharding]) -> dict[str, torch.Tensor]:
    """Return what this rank fills, in memory that is there."""
    shapes = dict.fromkeys(NAMES, (ROWS, WIDTH))
    if shardings:
        shapes |= {"up": (ROWS // 2, WIDTH), "down": (ROWS, WIDTH // 2)}
    return {name: torch.ones(shape, dtype=torch.int16) for name, shape in shapes.items()}


def _load(
    place: Place, state: dict[str, torch.Tensor], shardings: Mapping[str, GivenSharding], mode: Mode
) -> tuple[float, str]:
    """Return the seconds until the last rank was done, and the strategy."""
    if dist.get_rank() == 0:
        _drop(place)
    dist.barrier()
    begin = time.perf_counter()
    path = place.paths[NODES[dist.get_rank()]]
    report = sf.load_state_dict(state, path, node_of_rank=NODES, read_once=mode, shardings=shardings)
    dist.barrier()
    return time.perf_counter() - begin, report.strategy


def _drop(place: Place) -> None:
    for node in range(2) if place.mounts else ():
        assert place.mounts is not None
        place.mounts.drop(FILE, node)


def _record(model: Model, place: Place, calls: Mapping[Mode, list[tuple[float, str]]]) -> dict[str, object]:
    medians = {mode: statistics.median(seconds for seconds, _ in told) for mode, told in calls.items()}
    return {
        "model": model,
        "place": place.name,
        "seconds": {mode: [round(seconds, 3) for seconds, _ in told] for mode, told in calls.items()},
        "never_over_always": round(medians["never"] / medians["always"], 2),
        "auto_over_better": round(medians["auto"] / min(medians["never"], medians["always"]), 2),
        "auto": calls["auto"][0][1],
        "always": calls["always"][0][1],
    }


def _measure_exchange() -> dict[str, object]:
    """Return the bytes per second that each rank receives while all send to all."""
    ranks = tuple(range(dist.get_world_size()))
    mine = np.ones(EXCHANGED_BYTES, np.uint8)
    sizes = [0 if rank == dist.get_rank() else EXCHANGED_BYTES for rank in ranks]
    received = np.ones(sum(sizes), np.uint8)
    rates = []
    with open_group(60) as group, open_mover(group.check) as mover:
        for _ in range(EXCHANGES):
            dist.barrier()
            begin = time.perf_counter()
            mover.all_gather(ranks, mine, received, sizes)
            dist.barrier()
            rates.append(len(received) / (time.perf_counter() - begin))
    if dist.get_rank() == 0:
        print(f"each of {len(ranks)} ranks receives {statistics.median(rates) / 1e6:.0f} MB/s", flush=True)
    return {"ranks": len(ranks), "rank_bandwidth": [round(rate) for rate in rates]}


if __name__ == "__main__":
    main()
