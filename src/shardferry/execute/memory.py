"""Plain host memory as the destination of a load."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from shardferry.format.dtypes import BITS
from shardferry.geometry.region import box
from shardferry.geometry.spans import BITS_PER_BYTE, collapse, flat_span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardferry.plan.load import Copy
    from shardferry.storage.base import Bytes


# How wide an array element is that stands for the bits of a dtype.
_WORDS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def as_words(data: Bytes, shape: tuple[int, ...], dtype: str) -> NDArray[np.generic]:
    """Return a row-major array's bytes as numbers as wide as its dtype, which is one of whole bytes."""
    return data.view(_WORDS[BITS[dtype]]).reshape(shape)


class HostMemory:
    """The bytes of a row-major array as the destination of a load."""

    def __init__(self, out: Bytes, shape: tuple[int, ...], bits: int) -> None:
        self._out = out
        self._shape = shape
        self._bits = bits

    def direct(self, copy: Copy) -> Bytes | None:
        """Return where the copy goes, None if that is not one run of bytes."""
        if not copy.in_order:
            return None
        span = flat_span(copy.target, self._shape, self._bits)
        return None if span is None else self._out[slice(*span)]

    def store(self, copy: Copy, staged: Bytes) -> None:
        """Copy what was read to where it belongs."""
        if copy.in_order:
            offsets, sizes = [start for start, _ in copy.target], [stop - start for start, stop in copy.target]
            place = collapse(box(offsets, sizes), self._shape, self._bits)
            target = self._out.reshape(place.sizes)[tuple(slice(*dim[0]) for dim in place.dims)]
            target[...] = staged.reshape(target.shape)
            return
        item = BITS[copy.dtype] // BITS_PER_BYTE
        source = staged.reshape(*copy.region.shape, item).transpose(*copy.axes, len(copy.axes))
        place_of(self._out.reshape(*self._shape, item), copy)[...] = source


def place_of(local: NDArray[np.uint8], copy: Copy) -> NDArray[np.uint8]:
    """Return the view of a local tensor that a copy fills, its dims in the order that `axes` gives.

    Args:
        local: The tensor with one more dim, the bytes of an element.
        copy: What fills it.
    """
    if not copy.fine:
        return local[tuple(slice(start, stop) for start, stop in copy.target)]
    sizes = [stop - start for start, stop in copy.target]
    strides = [step * local.strides[dim] if step else 0 for dim, step in copy.fine]
    offset = sum(start * stride for (start, _), stride in zip(copy.target, strides, strict=True))
    return np.ndarray((*sizes, local.shape[-1]), np.uint8, local, offset, (*strides, 1))


class Scratch:
    """One reused buffer, emptied at once."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def memory(self, num_bytes: int) -> Bytes:
        """Return `num_bytes` to read into."""
        if len(self._buffer) < num_bytes:
            self._buffer = np.empty(num_bytes, np.uint8)
        return self._buffer[:num_bytes]

    def hold(self, data: Bytes) -> Bytes:
        """Return `data`: it is copied out of at once."""
        return data

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Do nothing: bytes are copied out by the time they are stored."""
        yield

    def wait(self) -> None:
        """Do nothing, as above."""
