"""Host memory of boxes, as a place that bytes are read into.

JAX on the CPU takes over memory that is 64-byte aligned without a copy, even when asked not to alias. So every box has
memory of its own, is filled once, and is never used for anything else afterwards.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardferry.errors import MismatchError
from shardferry.format.dtypes import BITS
from shardferry.geometry.spans import flat_span
from shardferry.jax.dtypes import carrier_dtype, is_packed, numpy_dtype
from shardferry.storage.placement import bytes_off_band

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from shardferry.geometry.region import Interval
    from shardferry.jax.parts import Box, Part
    from shardferry.plan.load import Copy
    from shardferry.storage.base import Bytes

# What XLA asks of memory it is to use as it is (and what a move off the slow band keeps).
ALIGNMENT = 64


class BoxMemory(NamedTuple):
    """The memory of one box of an array.

    Attributes:
        place: Per dim the half-open range of its elements in the local tensor of its part.
        array: Its elements' bits, as unsigned integers.
    """

    place: tuple[Interval, ...]
    array: NDArray[np.unsignedinteger]


def make_boxes(part: Part, dtype: str, file_offset: int) -> dict[Box, BoxMemory]:
    """Return new memory for the boxes of a part.

    Args:
        part: The boxes.
        dtype: safetensors name of their dtype.
        file_offset: Offset in a file of the first byte that will be read into the part.
    """
    return {
        held: BoxMemory(place, _aligned(tuple(stop - start for start, stop in held), carrier_dtype(dtype), file_offset))
        for held, place in zip(part.boxes, part.places, strict=True)
    }


class PartDestination:
    """The boxes of a part, filled by copies that are planned for the region they make together."""

    def __init__(self, boxes: Sequence[BoxMemory], dtype: str, name: str) -> None:
        """Fill `boxes`, of a dtype given by its safetensors name; errors call the array `name`."""
        self.was_cast = False
        self._num_overflowed: list[int] = []  # threads may append at the same time
        self._boxes = boxes
        self._dtype = dtype
        self._name = name
        self._is_packed = is_packed(dtype)

    @property
    def num_overflowed(self) -> int:
        """Finite values that became infinite when they were cast."""
        return sum(self._num_overflowed)

    def direct(self, copy: Copy) -> Bytes | None:
        """Return the contiguous memory into which `copy` can be read as it is stored, or None."""
        if self._is_packed or copy.dtype != self._dtype or not copy.in_order:
            return None
        for place, array in self._boxes:
            if all(a <= start and stop <= b for (start, stop), (a, b) in zip(copy.target, place, strict=True)):
                here = [(start - a, stop - a) for (start, stop), (a, _) in zip(copy.target, place, strict=True)]
                span = flat_span(here, array.shape, BITS[copy.dtype])
                return None if span is None else array.reshape(-1).view(np.uint8)[slice(*span)]
        return None

    def store(self, copy: Copy, staged: Bytes) -> None:
        """Take what `copy` read, in the order of its region, out of staging memory, casting it if need be.

        Raises:
            MismatchError: If an integer does not fit the dtype it is cast to.
        """
        values = self._cast(unpack(staged, copy.dtype), copy.dtype)
        source = values.reshape(copy.region.shape).transpose(copy.axes)
        for place, array in self._boxes:
            if not copy.fine:
                _store_plain(copy, source, place, array)
            elif len(self._boxes) == 1:
                _stepped(copy, array)[...] = source
            else:
                _store_stepped(copy, source, place, array)

    def _cast(self, elements: NDArray[np.generic], dtype: str) -> NDArray[np.generic]:
        """Return the bits of the elements in the dtype of the boxes."""
        if dtype == self._dtype:
            return elements
        self.was_cast = True
        stored, wanted = elements.view(numpy_dtype(dtype)), numpy_dtype(self._dtype)
        with np.errstate(over="ignore"):  # counted below, and told by the caller
            made = stored.astype(wanted)
        if wanted.kind in "iu":
            self._check_kept(stored, made)
            return made.view(carrier_dtype(self._dtype))
        self._num_overflowed.append(int(np.count_nonzero(np.isinf(made)) - np.count_nonzero(np.isinf(stored))))
        return made.view(carrier_dtype(self._dtype))

    def _check_kept(self, stored: NDArray[np.generic], made: NDArray[np.generic]) -> None:
        changed = np.flatnonzero(stored != made)
        if len(changed):
            raise MismatchError(
                f"{self._name}: the checkpoint holds {stored[changed[0]]}, which does not fit {made.dtype}. Load it "
                f"as {stored.dtype}, with jax_enable_x64"
            )


def unpack(data: Bytes, dtype: str) -> NDArray[np.unsignedinteger]:
    """Return the bits of elements that lie in a file's bytes: the first of two packed ones in the low half."""
    if not is_packed(dtype):
        return data.view(carrier_dtype(dtype))
    return np.stack([data & 0xF, data >> 4], axis=-1).reshape(-1)


def pack(elements: NDArray[np.unsignedinteger], dtype: str) -> Bytes:
    """Return the bytes in which a file holds contiguous elements: the inverse of `unpack`."""
    if not is_packed(dtype):
        return elements.reshape(-1).view(np.uint8)
    pairs = elements.reshape(-1, 2)
    return ((pairs[:, 0] & 0xF) | (pairs[:, 1] << 4)).astype(np.uint8, copy=False)


def memories(arrays: Iterable[NDArray[np.generic]]) -> list[tuple[int, int]]:
    """Return address and size of each array."""
    return [(array.ctypes.data, array.nbytes) for array in arrays]


def _aligned(shape: tuple[int, ...], dtype: np.dtype, file_offset: int) -> NDArray[np.unsignedinteger]:
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + 2 * ALIGNMENT, np.uint8)
    skip = -memory.ctypes.data % ALIGNMENT
    skip += bytes_off_band(memory.ctypes.data + skip, file_offset)
    return memory[skip : skip + num_bytes].view(dtype).reshape(shape)


def _store_plain(
    copy: Copy, source: NDArray[np.generic], place: tuple[Interval, ...], array: NDArray[np.generic]
) -> None:
    """Store what of a copy lies in a box."""
    ranges = [(max(start, a), min(stop, b)) for (start, stop), (a, b) in zip(copy.target, place, strict=True)]
    if any(start >= stop for start, stop in ranges):
        return
    into = tuple(slice(start - a, stop - a) for (start, stop), (a, _) in zip(ranges, place, strict=True))
    out_of = tuple(slice(start - a, stop - a) for (start, stop), (a, _) in zip(ranges, copy.target, strict=True))
    array[into] = source[out_of]


def _stepped(copy: Copy, array: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return the view of a local tensor that a copy with steps fills, its dims in the order that `axes` gives."""
    strides = [step * array.strides[dim] if step else 0 for dim, step in copy.fine]
    offset = sum(start * stride for (start, _), stride in zip(copy.target, strides, strict=True))
    flat = array.reshape(-1)[offset // array.itemsize :]
    sizes = [stop - start for start, stop in copy.target]
    return np.lib.stride_tricks.as_strided(flat, sizes, strides)


def _store_stepped(
    copy: Copy, source: NDArray[np.generic], place: tuple[Interval, ...], array: NDArray[np.generic]
) -> None:
    """Store what of a copy with steps lies in a box, element by element."""
    positions: list[NDArray[np.int64]] = [np.zeros((1,) * source.ndim, np.int64) for _ in place]
    for axis, ((start, stop), (dim, step)) in enumerate(zip(copy.target, copy.fine, strict=True)):
        if step:
            shape = [-1 if at == axis else 1 for at in range(source.ndim)]
            positions[dim] = positions[dim] + step * np.arange(start, stop).reshape(shape)
    inside = np.ones((1,) * source.ndim, np.bool_)
    for found, (a, b) in zip(positions, place, strict=True):
        inside = inside & (found >= a) & (found < b)
    inside = np.broadcast_to(inside, source.shape)
    local = tuple(
        np.broadcast_to(found, source.shape)[inside] - a for found, (a, _) in zip(positions, place, strict=True)
    )
    array[local] = source[inside]
