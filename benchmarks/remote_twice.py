"""One rank of `benchmarks.remote twice`: loads a replicated model as one of four ranks on two "nodes"."""

from __future__ import annotations

import json
import sys
import time
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import shardferry.torch as sf
from shardferry.execute.open import open_checkpoint


def main(url: str, read_once: Literal["auto", "never"]) -> None:
    """Load and tell, on rank 0, the seconds of the slowest rank."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (4,))
    state: dict[str, torch.Tensor] = {
        name: DTensor.from_local(torch.zeros(info.shape, dtype=torch.uint8), mesh, [Replicate()], run_check=False)
        for name, info in open_checkpoint(url).tensors.items()
    }
    dist.barrier()
    began = time.perf_counter()
    report = sf.load_state_dict(state, url, node_of_rank=[0, 0, 1, 1], read_once=read_once)
    seconds = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": float(seconds), "bytes": report.total.bytes_wanted, "strategy": report.strategy}))
    dist.destroy_process_group()


main(sys.argv[1], "never" if sys.argv[2] == "never" else "auto")
