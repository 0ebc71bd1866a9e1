"""One process of the load benchmark, under torchrun: one loader, called when it is told, one record per call and rank.

Started by `load_torch.py`, which tells it, for every call, the state of the page cache and the round. The clock of a
rank runs from a barrier to its own return; a call takes as long as its slowest rank. Making the model or state dict
that is to be filled, reading or dropping the page cache before, and checking the bytes after, are off the clock. A warm
page cache is always one that an ordinary read from front to back has filled: what a mapped read costs depends on how
large the kernel made its folios.
"""

from __future__ import annotations

import argparse
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from benchmarks.checkpoints import stored_tensors
from benchmarks.load_job import held_bytes, make_job, wrong_tensor
from benchmarks.load_peers import LOADERS
from benchmarks.measure import Meter, bring_into_page_cache, drop_from_page_cache, give_back_memory
from benchmarks.turns import Calls
from torch.distributed.device_mesh import init_device_mesh

if TYPE_CHECKING:
    from benchmarks.load_job import Job
    from benchmarks.load_peers import Loader


def main() -> None:
    """Answer calls until there are no more; collective."""
    parser = argparse.ArgumentParser()
    parser.add_argument("loader", choices=LOADERS)
    for name in ("folder", "records", "orders", "answers"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    stored = stored_tensors(arguments.folder)
    job = make_job(arguments.folder, stored, mesh)
    calls = Calls(arguments.orders, arguments.answers)
    for cache, round_ in calls:
        record = {"loader": arguments.loader, "cache": cache, "rank": dist.get_rank(), "round": int(round_)}
        record |= _call(job, LOADERS[arguments.loader], calls, is_cold=cache == "cold")
        with arguments.records.open("a") as out:
            out.write(json.dumps(record) + "\n")  # one write of one line: ranks append to the same file
    # Some loaders leave threads or communicators that do not end in time; everything is on disk.
    os._exit(0)


def _call(job: Job, loader: Loader, calls: Calls, *, is_cold: bool) -> dict[str, object]:
    """Call a loader once and return what came of it; collective."""
    files = sorted({part.stored.file for part in job.parts.values()})
    if dist.get_rank() == 0:
        drop_from_page_cache(files)
        if not is_cold:
            bring_into_page_cache(files)
    given = loader.prepare(job)
    meter = Meter()
    calls.go()
    with meter:
        loaded = loader.load(job, given)
    tensors = loader.tensors(loaded)
    record: dict[str, object] = {
        "seconds": round(meter.seconds, 4),
        "wanted_bytes": sum(part.num_bytes for part in job.parts.values()),
        "held_bytes": held_bytes(tensors),
        "peak_bytes": meter.peak_bytes,
        "disk_bytes": meter.disk_bytes,
        "wrong": wrong_tensor(job.parts, tensors),
    }
    del loaded, tensors, given
    give_back_memory()
    return record


if __name__ == "__main__":
    main()
