"""New memory for local tensors, placed so that reading into it is fast."""

from __future__ import annotations

import math

import torch

from shardferry.storage.placement import advise_huge_pages, bytes_off_band


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, file_offset: int) -> torch.Tensor:
    """Return uninitialised memory for a tensor that will be read from `file_offset` of a file.

    On the CPU it is moved off the slow band and advised to use huge pages; its storage may then be a few elements
    longer than the tensor.
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    tensor = torch.empty(shape, dtype=dtype)
    move = bytes_off_band(tensor.data_ptr(), file_offset)
    if move:
        count = math.prod(shape)
        tensor = torch.empty(count + move // dtype.itemsize, dtype=dtype)[move // dtype.itemsize :].view(shape)
    advise_tensor(tensor)
    return tensor


def advise_tensor(tensor: torch.Tensor) -> None:
    """Ask for huge pages behind a CPU tensor's memory."""
    if tensor.device.type == "cpu":
        advise_huge_pages(tensor.data_ptr(), tensor.numel() * tensor.element_size())
