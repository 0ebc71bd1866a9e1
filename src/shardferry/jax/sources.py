"""The memory of a process's boxes as a place that bytes are written from.

On the CPU JAX hands out its memory as it is. From an accelerator only what is written next is fetched, cut out on the
device.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise, product
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax import lax

from shardferry.format.dtypes import BITS
from shardferry.geometry.region import Region, whole
from shardferry.geometry.spans import collapse
from shardferry.jax.dtypes import carrier_dtype, is_packed, numpy_dtype
from shardferry.jax.memory import pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardferry.geometry.region import Interval
    from shardferry.plan.save import Write
    from shardferry.storage.base import Bytes


class Held(NamedTuple):
    """A box of an array in memory.

    Attributes:
        place: Per dim the half-open range of its elements in the local tensor of its part.
        values: Its elements, on one device or on the host.
    """

    place: tuple[Interval, ...]
    values: jax.Array | NDArray[np.generic]

    def host_bits(self, bits: np.dtype) -> NDArray[np.generic] | None:
        """Return the bits of the elements where they lie, None if that is not host memory."""
        if not isinstance(self.values, np.ndarray) and next(iter(self.values.devices())).platform != "cpu":
            return None
        return np.asarray(self.values).view(bits)

    def cut(self, starts: tuple[int, ...], sizes: tuple[int, ...], bits: np.dtype) -> NDArray[np.generic]:
        """Return the bits of a box of the elements; from an accelerator nothing else is fetched."""
        here = self.host_bits(bits)
        if here is not None:
            return here[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))]
        assert isinstance(self.values, jax.Array)
        return np.asarray(_cut_on_device(self.values, starts, sizes=sizes)).view(bits)


class ArraySource:
    """The boxes of a part; what lies in host memory as it will lie in the file is written from there."""

    def __init__(self, boxes: Sequence[Held], dtype: str, shape: tuple[int, ...]) -> None:
        """Write from `boxes`, of a dtype given by its safetensors name, that make a local tensor of `shape`."""
        self._boxes = boxes
        self._dtype = dtype
        self._shape = shape

    def direct(self, write: Write) -> Bytes | None:
        """Return the contiguous memory that holds exactly what is to be written, or None."""
        if write.dtype != self._dtype or is_packed(self._dtype) or write.local_order != _in_order(write):
            return None
        for held in self._boxes:
            inside = zip(write.local.dims, held.place, strict=True)
            if all(a <= dim[0][0] and dim[-1][1] <= b for dim, (a, b) in inside):
                return self._direct(write, held)
        return None

    def fetch(self, write: Write, out: Bytes) -> None:
        """Gather what is to be written, in logical order and in the dtype it is written in."""
        elements = self._gather(write.local)
        if write.local_order != _in_order(write):
            elements = np.ascontiguousarray(elements.transpose(write.local_order))
        if write.dtype != self._dtype:
            with np.errstate(over="ignore"):  # as torch's save, which says nothing of it either
                cast = elements.view(numpy_dtype(self._dtype)).astype(numpy_dtype(write.dtype))
            elements = cast.view(carrier_dtype(write.dtype))
        np.copyto(out, pack(elements, write.dtype))

    def content(self) -> Bytes:
        """Return the bytes of the local tensor in logical order."""
        return pack(self._gather(whole(self._shape)), self._dtype)

    def _direct(self, write: Write, held: Held) -> Bytes | None:
        bits = held.host_bits(carrier_dtype(self._dtype))
        if bits is None or not bits.flags.c_contiguous:
            return None
        dims = (tuple((x - a, y - a) for x, y in dim) for dim, (a, _) in zip(write.local.dims, held.place, strict=True))
        collapsed = collapse(Region(tuple(dims)), bits.shape, BITS[self._dtype])
        if len(collapsed.sizes) > 1 or len(collapsed.dims[0]) != 1:
            return None
        return bits.reshape(-1).view(np.uint8)[slice(*collapsed.dims[0][0])]

    def _gather(self, local: Region) -> NDArray[np.unsignedinteger]:
        """Return the bits of a region of the local tensor, contiguous."""
        out = np.empty(local.shape, carrier_dtype(self._dtype))
        for pieces in product(*(_with_places(intervals) for intervals in local.dims)):
            for held in self._boxes:
                ranges = [
                    (max(start, a), min(stop, b)) for ((start, stop), _), (a, b) in zip(pieces, held.place, strict=True)
                ]
                if any(start >= stop for start, stop in ranges):
                    continue
                into = (
                    slice(at + start - first, at + stop - first)
                    for (start, stop), ((first, _), (at, _)) in zip(ranges, pieces, strict=True)
                )
                out[tuple(into)] = held.cut(
                    tuple(start - a for (start, _), (a, _) in zip(ranges, held.place, strict=True)),
                    tuple(stop - start for start, stop in ranges),
                    out.dtype,
                )
        return out


def _in_order(write: Write) -> tuple[int, ...]:
    return tuple(range(len(write.local.dims)))


@partial(jax.jit, static_argnames="sizes")
def _cut_on_device(values: jax.Array, starts: tuple[int, ...], sizes: tuple[int, ...]) -> jax.Array:
    return lax.dynamic_slice(values, starts, sizes)


def _with_places(intervals: tuple[Interval, ...]) -> list[tuple[Interval, Interval]]:
    """Return each interval with the half-open range it takes when all are joined."""
    ends = [0]
    for start, stop in intervals:
        ends.append(ends[-1] + stop - start)
    return list(zip(intervals, pairwise(ends), strict=True))
