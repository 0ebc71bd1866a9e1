"""One process of the load benchmark, under torchrun: one loader, called when it is told, one record per call and rank.

Started by `load_torch.py`, which writes a line with a state of the page cache and a round to a named pipe for every
call, and is answered through another. The clock of a rank runs from a barrier to its own return; a call takes as long
as its slowest rank. Making the model or state dict that is to be filled, reading or dropping the page cache before, and
checking the bytes after, are off the clock. A warm page cache is always one that an ordinary read from front to back
has filled: what a mapped read costs depends on how large the kernel made its folios.
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
from benchmarks.measure import Meter, bring_into_page_cache, drop_from_page_cache, give_back_memory, wake_memory
from torch.distributed.device_mesh import init_device_mesh

if TYPE_CHECKING:
    from benchmarks.load_job import Job
    from benchmarks.load_table import Cache


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
    orders = arguments.orders.open() if dist.get_rank() == 0 else None
    while True:
        order = [orders.readline().split() if orders else None]
        dist.broadcast_object_list(order)
        if not order[0]:
            break
        cache, round_ = order[0]
        record = _call(job, arguments.loader, cache) | {"round": int(round_)}
        with arguments.records.open("a") as out:
            out.write(json.dumps(record) + "\n")  # one write of one line: ranks append to the same file
        dist.barrier()
        if orders:
            arguments.answers.write_text("done\n")
    # Some loaders leave threads or communicators that do not end in time; everything is on disk.
    os._exit(0)


def _call(job: Job, name: str, cache: Cache) -> dict[str, object]:
    """Call a loader once and return what came of it; collective."""
    loader = LOADERS[name]
    files = sorted({part.stored.file for part in job.parts.values()})
    wanted_bytes = sum(part.num_bytes for part in job.parts.values())
    if dist.get_rank() == 0:
        drop_from_page_cache(files)
        if cache != "cold":
            bring_into_page_cache(files)
    given = loader.prepare(job)
    wake_memory(wanted_bytes)
    dist.barrier()
    with Meter() as meter:
        loaded = loader.load(job, given)
    record = {
        "loader": name,
        "cache": cache,
        "rank": dist.get_rank(),
        "seconds": round(meter.seconds, 4),
        "wanted_bytes": wanted_bytes,
        "held_bytes": held_bytes(loaded),
        "peak_bytes": meter.peak_bytes,
        "disk_bytes": meter.disk_bytes,
        "wrong": wrong_tensor(job.parts, loaded),
    }
    del loaded, given
    give_back_memory()
    dist.barrier()
    return record


if __name__ == "__main__":
    main()
