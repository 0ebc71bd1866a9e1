"""One process of the save benchmark, under torchrun: one saver, called twice, one record per call and rank.

Started by `save_torch.py`. The clock of a rank runs from a barrier to its own return; then rank 0 syncs every file,
on a clock of its own. A call takes as long as its slowest rank and that sync together.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.checkpoints import stored_tensors
from benchmarks.load_job import NUM_VERIFIED, make_job, sharded_dim
from benchmarks.measure import Meter, wake_memory, written_bytes
from benchmarks.save_peers import SAVERS
from torch.distributed.device_mesh import init_device_mesh

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.checkpoints import StoredTensor
    from benchmarks.save_table import Record

# How tensors are cut: by the TP plan, or every one along one dim.
CUTS: dict[str, Callable[[str], int | None]] = {"tp": sharded_dim, "dim0": lambda _: 0, "dim1": lambda _: 1}
# The first call pays for imports and a cold allocator: it is recorded, and left out of the ratios.
SCHEDULE: tuple[Literal["first", "again"], ...] = ("first", "again")


def main() -> None:
    """Run the schedule; collective."""
    parser = argparse.ArgumentParser()
    parser.add_argument("saver", choices=SAVERS)
    parser.add_argument("cut", choices=CUTS)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("records", type=Path)
    parser.add_argument("round", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    stored = stored_tensors(arguments.source)
    job = make_job(arguments.source, stored, mesh, CUTS[arguments.cut])
    save = SAVERS[arguments.saver](job)
    rank = dist.get_rank()
    for call in SCHEDULE:
        if rank == 0:
            os.sync()
        wake_memory(sum(part.num_bytes for part in job.parts.values()))
        meter = Meter()
        dist.barrier()
        already = written_bytes()
        with meter:
            save(arguments.target)
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            _sync(arguments.target)
        record: Record = {
            "saver": arguments.saver,
            "cut": arguments.cut,
            "round": arguments.round,
            "call": call,
            "rank": rank,
            "seconds": round(meter.seconds, 4),
            "sync_seconds": round(time.perf_counter() - start, 4),
            "checkpoint_bytes": sum(tensor.num_bytes for tensor in stored.values()),
            "written_bytes": written_bytes() - already,
            "peak_bytes": meter.peak_bytes,
            "wrong": _wrong_tensor(stored, arguments.target) if rank == 0 else None,
        }
        # One write of one line: ranks append to the same file.
        with arguments.records.open("a") as out:
            out.write(json.dumps(record) + "\n")
        dist.barrier()
        if rank == 0:
            shutil.rmtree(arguments.target)
        dist.barrier()
    # Some savers leave threads or communicators that do not end in time; everything is on disk.
    os._exit(0)


def _sync(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def _wrong_tensor(stored: dict[str, StoredTensor], folder: Path) -> str | None:
    """Compare about `NUM_VERIFIED` tensors with the source's bytes; returns what is wrong first, or None."""
    saved = stored_tensors(folder)
    if saved.keys() != stored.keys():
        return f"{len(saved)} tensors instead of {len(stored)}"
    names = sorted(stored)
    for name in names[:: max(1, len(names) // NUM_VERIFIED)]:
        one, other = (
            np.memmap(place.file, np.uint8, "r", place.start, place.num_bytes) for place in (stored[name], saved[name])
        )
        if not np.array_equal(one, other):
            return f"{name} has other bytes than the source"
    return None


if __name__ == "__main__":
    main()
