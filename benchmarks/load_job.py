"""The job that every loader of the load benchmark does: which part of which tensor each rank wants.

Answers no question itself. The plan is Megatron's: attention and MLP by columns then rows, the embedding and the
head by rows. Per-expert tensors belong to one rank each; packed experts are cut inside every expert.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from benchmarks.checkpoints import StoredTensor
    from torch.distributed.device_mesh import DeviceMesh

# Checked after every load, spread over the checkpoint.
NUM_VERIFIED = 16

ROWS = re.compile(r"(embed_tokens|lm_head|[qkv]_proj|gate_proj|up_proj)\.weight$")
COLUMNS = re.compile(r"(o_proj|down_proj)\.weight$")
EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank wants of one tensor: `size` entries from `start` of `dim`; all of it if `dim` is None."""

    stored: StoredTensor
    dim: int | None
    start: int
    size: int
    is_only_here: bool  # no other rank has this name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        shape = list(self.stored.shape)
        if self.dim is not None:
            shape[self.dim] = self.size
        return tuple(shape)

    @property
    def index(self) -> tuple[slice, ...]:
        """The part as an index into the whole tensor."""
        index = [slice(None)] * len(self.stored.shape)
        if self.dim is not None:
            index[self.dim] = slice(self.start, self.start + self.size)
        return tuple(index)

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return 2 * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's job."""

    folder: Path
    mesh: DeviceMesh
    parts: Mapping[str, Part]


def make_job(
    folder: Path,
    stored: Mapping[str, StoredTensor],
    mesh: DeviceMesh,
    dim_of: Callable[[str], int | None] | None = None,
) -> Job:
    """Return this rank's job on a one-axis mesh; `dim_of` says which dim of a tensor is cut, the plan if not given."""
    rank, size = mesh.get_local_rank(), mesh.size()
    num_experts = 1 + max((int(match[1]) for match in map(EXPERT.search, stored) if match), default=0)
    parts = {}
    for name, tensor in stored.items():
        expert = EXPERT.search(name)
        if expert:
            if int(expert[1]) * size // num_experts == rank:
                parts[name] = Part(tensor, None, 0, 0, is_only_here=True)
            continue
        dim = (dim_of or sharded_dim)(name)
        if dim is None:
            parts[name] = Part(tensor, None, 0, 0, is_only_here=False)
        else:
            chunk = -(-tensor.shape[dim] // size)
            start = min(tensor.shape[dim], chunk * rank)
            stop = min(tensor.shape[dim], start + chunk)
            parts[name] = Part(tensor, dim, start, stop - start, is_only_here=False)
    return Job(folder, mesh, parts)


def sharded_dim(name: str) -> int | None:
    """Return the dim that the plan cuts; None for a replicated tensor."""
    if name.endswith("experts.gate_up_proj"):
        return 1
    if name.endswith("experts.down_proj"):
        return 2
    if ROWS.search(name):
        return 0
    return 1 if COLUMNS.search(name) else None


def empty_tensors(job: Job, device: str) -> dict[str, torch.Tensor]:
    """Return a tensor without values for each part: a DTensor, or a plain one for a name that is only here."""
    tensors: dict[str, torch.Tensor] = {}
    for name, part in job.parts.items():
        local = torch.empty(part.shape, dtype=torch.bfloat16, device=device)
        if part.is_only_here:
            tensors[name] = local
        else:
            placement = Replicate() if part.dim is None else Shard(part.dim)
            tensors[name] = DTensor.from_local(
                local,
                job.mesh,
                [placement],
                run_check=False,
                shape=torch.Size(part.stored.shape),
                stride=_strides(part),
            )
    return tensors


def filled_tensors(job: Job) -> dict[str, DTensor]:
    """Return the parts as DTensors with the values of the checkpoint, in memory of their own."""
    tensors = {}
    for name, tensor in empty_tensors(job, "cpu").items():
        part = job.parts[name]
        assert isinstance(tensor, DTensor)
        whole = np.memmap(part.stored.file, np.int16, "r", part.stored.start, part.stored.shape)
        tensor.to_local().view(torch.int16).copy_(torch.from_numpy(np.array(whole[part.index])))
        tensors[name] = tensor
    return tensors


def wrong_tensor(parts: Mapping[str, Part], loaded: Mapping[str, torch.Tensor]) -> str | None:
    """Compare about `NUM_VERIFIED` tensors with the file's bytes; returns what is wrong first, or None.

    A loader may hold more than the plan asks: whole tensors, or experts merged under other names.
    """
    missing = sorted(parts.keys() - loaded.keys())
    if missing and held_bytes(loaded) < sum(part.num_bytes for part in parts.values()):
        return f"{missing[0]} is missing"
    names = sorted(parts.keys() & loaded.keys())
    for name in names[:: max(1, len(names) // NUM_VERIFIED)]:
        stored = parts[name].stored
        bits = loaded[name].contiguous().view(torch.int16)
        whole = np.memmap(stored.file, np.int16, "r", stored.start, stored.shape)
        expected = whole if bits.shape == stored.shape else whole[parts[name].index]
        if bits.shape != expected.shape or not torch.equal(bits, torch.from_numpy(np.array(expected))):
            return f"{name} has other bytes than the file"
    return None


def held_bytes(loaded: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in loaded.values())


def _strides(part: Part) -> tuple[int, ...]:
    shape = part.stored.shape
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
