"""The memory of local tensors as a place that bytes are written from."""

from __future__ import annotations

from itertools import pairwise, product
from typing import TYPE_CHECKING

import torch

from shardferry.format.dtypes import BITS
from shardferry.geometry.region import whole
from shardferry.geometry.spans import collapse
from shardferry.torch.destinations import memory_of
from shardferry.torch.dtypes import dtype_name, elements_per_item, torch_dtype

if TYPE_CHECKING:
    from shardferry.geometry.region import Interval
    from shardferry.plan.save import Write
    from shardferry.storage.base import Bytes


class TensorSource:
    """One local tensor; a dense CPU tensor is written from directly, any other is gathered first."""

    def __init__(self, local: torch.Tensor, name: str) -> None:
        """Write from `local`; `name` is for errors."""
        self._local = local
        self._dtype = dtype_name(local.dtype, name)
        per_item = elements_per_item(local.dtype)
        self._shape = tuple(local.shape) if per_item == 1 else (*local.shape[:-1], local.shape[-1] * per_item)
        dense = local.device.type == "cpu" and local.is_contiguous() and not local.is_conj() and not local.is_neg()
        self._memory = memory_of(local) if dense and local.numel() else None

    def direct(self, write: Write) -> Bytes | None:
        """Return the contiguous memory that holds exactly what is to be written, or None."""
        if self._memory is None or write.dtype != self._dtype or write.local_order != tuple(range(len(self._shape))):
            return None
        if write.local == whole(self._shape):
            return self._memory
        collapsed = collapse(write.local, self._shape, BITS[self._dtype])
        if len(collapsed.sizes) > 1 or len(collapsed.dims[0]) != 1:
            return None
        start, stop = collapsed.dims[0][0]
        return self._memory[start:stop]

    def fetch(self, write: Write, out: Bytes) -> None:
        """Gather what is to be written, in logical order and in the dtype it is written in."""
        dtype = torch_dtype(write.dtype)
        per_item = elements_per_item(self._local.dtype)
        dims = list(write.local.dims)
        if per_item > 1:
            dims[-1] = tuple((start // per_item, stop // per_item) for start, stop in dims[-1])
        sizes = [sum(stop - start for start, stop in intervals) for intervals in dims]
        order = write.local_order
        inverse = [order.index(dim) for dim in range(len(order))]
        target = torch.from_numpy(out).view(dtype).reshape([sizes[dim] for dim in order]).permute(inverse)
        for pieces in product(*(_with_places(intervals) for intervals in dims)):
            place = tuple(slice(*place) for _, place in pieces)
            target[place].copy_(self._local[tuple(slice(*held) for held, _ in pieces)])


def digest_view(local: torch.Tensor) -> Bytes:
    """Return a tensor's bytes in logical order, without a copy where they lie so in host memory.

    The array holds on to the tensor whose memory it is: a copy would be gone before it is read.
    """
    dense = local.detach().resolve_conj().resolve_neg().contiguous().cpu()
    array: Bytes = dense.reshape(-1).view(torch.uint8).numpy()
    return array


def _with_places(intervals: tuple[Interval, ...]) -> list[tuple[Interval, Interval]]:
    """Return each interval with the half-open range it takes when all are joined."""
    ends = [0]
    for start, stop in intervals:
        ends.append(ends[-1] + stop - start)
    return list(zip(intervals, pairwise(ends), strict=True))
