"""How much sooner is a load done when only what its node reads is warmed, and not whole files?

A checkpoint of 512 MiB lies behind a slow mount (FUSE; 5 ms a request, 200 MB/s), and this process is the only rank of
one of four nodes: it needs a quarter of every tensor. Four ways, interleaved, each from an empty page cache until the
tensors are filled:

- `load`: no warming.
- `whole files, one stream`: every file read from end to end, as `cat` does, then the load.
- `whole files`: the same by this library's threads.
- `warm`: `shardferry.torch.warm`, then the load.

The mount's server counts the bytes. Needs root and /dev/fuse.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from benchmarks.machine import machine
from benchmarks.measure import Meter, bring_into_page_cache
from safetensors.numpy import save_file
from tests.tools.mounts import slow_mounts

import shardferry.torch as sf
from shardferry.geometry.region import box
from shardferry.geometry.sharding import Sharding
from shardferry.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.tools.mounts import SlowMounts

RESULTS = Path(__file__).parent / "results" / "warm.jsonl"
FILES, TENSORS_PER_FILE = 2, 8
ROWS, ROW_BYTES = 64, MIB // 2
NODES, NODE = 4, 1
LATENCY_MS, RATE_MB = 5, 200

NAMES = [[f"layers.{file * TENSORS_PER_FILE + at}.weight" for at in range(TENSORS_PER_FILE)] for file in range(FILES)]
# The part of the node's rank: NODE of NODES pieces of the rows.
PIECE = box((NODE * ROWS // NODES, 0), (ROWS // NODES, ROW_BYTES))
SHARDINGS = {name: Sharding((ROWS, ROW_BYTES), (PIECE,)) for names in NAMES for name in names}


def empty_part() -> dict[str, torch.Tensor]:
    """Return what the rank has to fill."""
    return {name: torch.empty(ROWS // NODES, ROW_BYTES, dtype=torch.uint8) for name in SHARDINGS}


def write_checkpoint(folder: Path) -> None:
    """Write the files and their index."""
    numbers = np.random.default_rng(0)
    for at, names in enumerate(NAMES):
        tensors = {name: numbers.integers(0, 256, (ROWS, ROW_BYTES), np.uint8) for name in names}
        save_file(tensors, folder / f"model-{at + 1:05}-of-{FILES:05}.safetensors", {"format": "pt"})
    where = {name: f"model-{at + 1:05}-of-{FILES:05}.safetensors" for at, names in enumerate(NAMES) for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def warm_nothing(path: Path) -> None:
    """Leave the page cache empty."""


def warm_one_stream(path: Path) -> None:
    """Read every file from end to end."""
    bring_into_page_cache(sorted(path.glob("*.safetensors")))


def warm_whole(path: Path) -> None:
    """Warm as if this node needed everything."""
    whole = {name: torch.empty(ROWS, ROW_BYTES, dtype=torch.uint8, device="meta") for name in SHARDINGS}
    assert {file.strategy for file in sf.warm(whole, path).files} == {"whole"}


def warm_part(path: Path) -> None:
    """Warm what this node needs."""
    report = sf.warm(empty_part(), path, shardings=SHARDINGS)
    assert {file.strategy for file in report.files} == {"spans"}
    assert report.bytes_absent == 0


WAYS: dict[str, Callable[[Path], None]] = {
    "load": warm_nothing,
    "whole files, one stream": warm_one_stream,
    "whole files": warm_whole,
    "warm": warm_part,
}


def measure(mounts: SlowMounts, way: str) -> dict[str, float]:
    """Return what one way took, from an empty page cache to filled tensors."""
    path = mounts.paths[0]
    for file in path.glob("*.safetensors"):
        mounts.drop(file.name)
    part = empty_part()
    for tensor in part.values():
        tensor.zero_()  # memory that is there: the same for all
    mounts.reset()
    with Meter() as warming:
        WAYS[way](path)
    warmed = mounts.counts()["read_bytes"]
    start = time.perf_counter()
    sf.load_state_dict(part, path, shardings=SHARDINGS)
    load_seconds = time.perf_counter() - start
    return {
        "seconds": warming.seconds + load_seconds,
        "warm_seconds": warming.seconds,
        "load_seconds": load_seconds,
        "server_bytes": mounts.counts()["read_bytes"],
        "server_bytes_of_warming": warmed,
        "peak_private_bytes_of_warming": warming.peak_bytes,
        "bytes_held": sum(tensor.nbytes for tensor in part.values()),
    }


def print_table(records: Mapping[str, Sequence[dict[str, float]]]) -> None:
    """Print the medians of every way, and how many times as long as `warm` it takes."""
    print(f"{'way':25} {'seconds':>8} {'x warm':>7} {'server':>9} {'private':>9}")
    for way, calls in records.items():
        seconds = statistics.median(call["seconds"] for call in calls)
        ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in zip(calls, records["warm"], strict=True))
        server = format_bytes(int(statistics.median(call["server_bytes"] for call in calls)))
        private = format_bytes(int(max(call["peak_private_bytes_of_warming"] for call in calls)))
        print(f"{way:25} {seconds:8.2f} {ratio:7.2f} {server:>9} {private:>9}")


def main() -> None:
    """Measure all ways in turn and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        with slow_mounts(Path(folder), latency_ms=LATENCY_MS, rate_mb=RATE_MB) as mounts:
            measure(mounts, "warm")  # pays for imports
            records: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for at in range(rounds):
                ways = list(WAYS)
                for way in ways[at % len(ways) :] + ways[: at % len(ways)]:
                    records[way].append(measure(mounts, way))
    setting = {"latency_ms": LATENCY_MS, "rate_mb": RATE_MB, "nodes": NODES}
    lines = [{"way": way, **call} for way, calls in records.items() for call in calls]
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in ({**machine(), **setting}, *lines)))
    print_table(records)


if __name__ == "__main__":
    main()
