"""Spans: the contiguous bytes of a region inside a row-major tensor.

A region is first collapsed: neighbouring dims are merged wherever the inner one is held whole, or only one index of
the outermost, so that a cut of the first dim is one span and a cut of the last dim is a table of rows. Readers use the
collapsed form, spans are its product, computed with NumPy. Everything is relative to the tensor's first byte and
half-open.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardferry.errors import InvalidInputError
from shardferry.geometry.region import Interval, Intervals, Region, check_within, shift

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

BITS_PER_BYTE = 8


class Collapsed(NamedTuple):
    """A region as a product in bytes over as few dims as possible.

    Attributes:
        sizes: Size of each collapsed dim, outermost first; the last one in bytes, the others in rows.
        dims: Intervals held of each collapsed dim, in the same units.
    """

    sizes: tuple[int, ...]
    dims: tuple[Intervals, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        total = 1
        for intervals in self.dims:  # plain loops: asked several times of every tensor of a model
            held = 0
            for start, stop in intervals:
                held += stop - start
            total *= held
        return total


@lru_cache(maxsize=4096)
def collapse(region: Region, shape: tuple[int, ...], bits: int) -> Collapsed:
    """Merge the dims of `region` that need not be told apart, and measure the innermost one in bytes.

    Args:
        region: Within `shape`.
        shape: Shape of the whole tensor, in elements.
        bits: Bits per element; 4 and 6 for the packed sub-byte dtypes.

    Raises:
        InvalidInputError: If `region` does not lie within `shape`, or cuts a byte in two.

    Examples:
        >>> from shardferry.geometry.region import box
        >>> collapse(box((1, 0), (2, 4)), (8, 4), 16)
        Collapsed(sizes=(64,), dims=(((8, 24),),))
        >>> collapse(box((0, 0, 2), (2, 3, 2)), (2, 3, 4), 16)
        Collapsed(sizes=(6, 8), dims=(((0, 6),), ((4, 8),)))
        >>> collapse(box((1, 0, 0), (1, 2, 4)), (2, 3, 4), 16)
        Collapsed(sizes=(48,), dims=(((24, 40),),))
    """
    check_within(region, shape)
    if not all(region.dims):
        return Collapsed((0,), ((),))
    sizes: list[int] = [bits]
    dims: list[Intervals] = [((0, bits),)]
    for size, intervals in zip(reversed(shape), reversed(region.dims), strict=True):
        if dims[0] == ((0, sizes[0]),):
            dims[0] = tuple((a * sizes[0], b * sizes[0]) for a, b in intervals)
            sizes[0] *= size
        else:
            dims.insert(0, intervals)
            sizes.insert(0, size)
    while len(dims) > 1 and len(dims[0]) == 1 and dims[0][0][1] - dims[0][0][0] == 1:
        ((index, _),) = dims.pop(0)
        dims[0] = shift(dims[0], index * sizes[1])
        sizes[0:2] = [sizes[0] * sizes[1]]
    return _bits_to_bytes(sizes, dims)


def flat_span(place: Sequence[Interval], shape: Sequence[int], bits: int) -> Interval | None:
    """Return which bytes of a row-major tensor a box takes, half-open; None if they do not lie together.

    Args:
        place: Per dim the half-open range of the box, within `shape` and not empty.
        shape: Shape of the tensor, in elements.
        bits: Bits per element.

    Raises:
        InvalidInputError: If the box cuts a byte in two.

    Examples:
        >>> flat_span(((1, 2), (2, 4), (0, 8)), (3, 6, 8), bits=16), flat_span(((0, 2), (2, 4)), (3, 6), bits=16)
        ((128, 160), None)
    """
    first, count = 0, 1
    for (start, stop), size in zip(place, shape, strict=True):
        if count > 1 and (start or stop != size):
            return None
        first, count = first * size + start, count * (stop - start)
    _check_bytes((first * bits, count * bits))
    return first * bits // BITS_PER_BYTE, (first + count) * bits // BITS_PER_BYTE


def region_to_spans(region: Region, shape: tuple[int, ...], bits: int) -> NDArray[np.int64]:
    """Return the byte spans of `region` inside a row-major tensor, in file order.

    Args:
        region: Within `shape`.
        shape: Shape of the whole tensor, in elements.
        bits: Bits per element.

    Returns:
        Array of shape (num_spans, 2): disjoint, non-touching [start, stop) in bytes, ascending; no row for a
        region without elements.

    Raises:
        InvalidInputError: If `region` does not lie within `shape`, or cuts a byte in two.

    Examples:
        >>> from shardferry.geometry.region import box
        >>> region_to_spans(box((0, 2), (2, 2)), (2, 4), bits=16).tolist()
        [[4, 8], [12, 16]]
    """
    return union_spans([collapse(region, shape, bits)])


def union_spans(parts: Iterable[Collapsed]) -> NDArray[np.int64]:
    """Return the byte spans that any of several collapsed regions of one tensor holds, in file order.

    Args:
        parts: Regions of the same tensor, collapsed with its shape; overlaps allowed.

    Returns:
        As `region_to_spans`.

    Examples:
        >>> left, right = (Collapsed((4, 8), (((0, 4),), (columns,))) for columns in ((0, 4), (4, 8)))
        >>> union_spans([left]).tolist(), union_spans([left, right]).tolist()
        ([[0, 4], [8, 12], [16, 20], [24, 28]], [[0, 32]])
    """
    # Columns of the same rows are joined first: ranks that share all rows of a tensor need not list a span for each.
    columns: dict[tuple[tuple[int, ...], tuple[Intervals, ...]], set[Interval]] = {}
    for sizes, dims in parts:
        columns.setdefault((sizes, dims[:-1]), set()).update(dims[-1])
    found = [np.empty((0, 2), np.int64)]
    for (sizes, outer), held in columns.items():
        found.append(_product_spans(sizes, outer, merge_spans(np.array(sorted(held), np.int64).reshape(-1, 2))))
    return merge_spans(np.concatenate(found))


def merge_spans(spans: NDArray[np.int64], max_gap: int = 0) -> NDArray[np.int64]:
    """Return sorted spans joined wherever the hole between two is at most `max_gap` bytes.

    Args:
        spans: Shape (num_spans, 2), in any order, overlaps allowed.
        max_gap: Holes up to this many bytes are bridged; 0 joins only touching and overlapping spans.

    Examples:
        >>> merge_spans(np.array([[8, 12], [0, 4], [4, 6]])).tolist()
        [[0, 6], [8, 12]]
    """
    if not len(spans):
        return np.empty((0, 2), np.int64)
    ordered = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ordered[:, 1])
    first = np.flatnonzero(np.concatenate([[True], ordered[1:, 0] > reach[:-1] + max_gap]))
    last = np.concatenate([first[1:] - 1, [len(ordered) - 1]])
    return np.stack([ordered[first, 0], reach[last]], axis=1)


def _product_spans(sizes: tuple[int, ...], outer: tuple[Intervals, ...], inner: NDArray[np.int64]) -> NDArray[np.int64]:
    while outer and inner.tolist() == [[0, sizes[-1]]]:  # whole rows
        inner = np.array(outer[-1], np.int64).reshape(-1, 2) * sizes[-1]
        sizes, outer = (*sizes[:-2], sizes[-2] * sizes[-1]), outer[:-1]
    starts = np.zeros(1, np.int64)
    stride = sizes[-1]
    for size, intervals in zip(reversed(sizes[:-1]), reversed(outer), strict=True):
        rows = np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in intervals])
        starts = (rows[:, None] * stride + starts[None, :]).reshape(-1)
        stride *= size
    # A piece at the end of a row may touch one at the beginning of the next: the caller merges them.
    return (starts[:, None, None] + inner[None, :, :]).reshape(-1, 2)


def _bits_to_bytes(sizes: Sequence[int], dims: Sequence[Intervals]) -> Collapsed:
    bounds = [bound for interval in dims[-1] for bound in interval]
    if len(sizes) > 1:
        bounds.append(sizes[-1])
    _check_bytes(bounds)
    inner = tuple((a // BITS_PER_BYTE, b // BITS_PER_BYTE) for a, b in dims[-1])
    return Collapsed((*sizes[:-1], sizes[-1] // BITS_PER_BYTE), (*dims[:-1], inner))


def _check_bytes(bounds: Iterable[int]) -> None:
    if any(bound % BITS_PER_BYTE for bound in bounds):
        message = "the region does not start and end on a byte boundary: cut a packed dtype at whole bytes"
        raise InvalidInputError(message)
