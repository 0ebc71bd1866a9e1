"""New memory for tensors that are on the meta device, placed so that reading into it is fast.

FSDP2 keeps a parameter's local part in storage padded to the size of the first rank's, and copies whatever else it is
given into such storage at the first forward. So its parameters get padded storage from the start.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardferry.storage.placement import advise_huge_pages, bytes_off_band
from shardferry.torch.shardings import local_part

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardferry.torch.entries import Entry


def make_storage(entry: Entry, file_offset: int) -> torch.Tensor:
    """Return new memory for an entry's local part, padded if FSDP2 keeps it padded.

    Args:
        entry: Whose tensor is on the meta device.
        file_offset: Offset in a file of the first byte that will be read into it.
    """
    device = _device_of(entry)
    dtype = entry.tensor.dtype
    if entry.cut is None:
        return _new_tensor(tuple(local_part(entry.tensor).shape), dtype, device, file_offset)
    state = entry.cut.param
    shape = tuple(state.padded_sharded_param_size)
    storage = _new_tensor(shape, dtype, device, file_offset)
    storage.narrow(
        entry.cut.dim, _held(state, entry.cut.dim), shape[entry.cut.dim] - _held(state, entry.cut.dim)
    ).zero_()
    return storage.pin_memory() if state.pin_memory else storage


def local_of(entry: Entry, storage: torch.Tensor) -> torch.Tensor:
    """Return the part of new memory that is the entry's local tensor."""
    if entry.cut is None:
        return storage
    return storage.narrow(entry.cut.dim, 0, _held(entry.cut.param, entry.cut.dim))


def advise_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Ask for huge pages behind the memory of those tensors that are on the CPU."""
    dense = (tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.is_contiguous())
    advise_huge_pages((tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in dense)


def _held(state: Any, dim: int) -> int:  # noqa: ANN401 - FSDP2's own class is private
    size: int = state.sharded_size[dim] if math.prod(state.sharded_size) else 0
    return size


def _device_of(entry: Entry) -> torch.device:
    if entry.cut is not None:
        state = entry.cut.param
        return torch.device("cpu") if state.offload_to_cpu else torch.device(state.device)
    if isinstance(entry.tensor, DTensor):
        kind = entry.tensor.device_mesh.device_type
        return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default


def _new_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, file_offset: int) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    tensor = torch.empty(shape, dtype=dtype, device=device)
    move = bytes_off_band(tensor.data_ptr(), file_offset) // dtype.itemsize
    if move:
        tensor = torch.empty(math.prod(shape) + move, dtype=dtype, device=device)[move:].view(shape)
    return tensor
