"""Regions: which elements of a tensor somebody holds.

A region is a product over the tensor's dims of an ascending list of disjoint half-open intervals. The local
tensor is the whole tensor gathered on that product, in ascending order; so its row-major order is the order in
which its bytes lie in a row-major file. Every DTensor placement, packed or expert-parallel layout and JAX
`NamedSharding` is one region per participant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from shardferry.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Interval = tuple[int, int]
Intervals = tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A product of interval lists, one list per dim.

    Attributes:
        dims: Per dim the ascending, disjoint, non-empty, non-touching half-open intervals held; an empty tuple
            for a dim of which nothing is held. Build with `make_region` unless the lists are known to be so.
    """

    dims: tuple[Intervals, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        # Nearly always a dim has one interval; this is asked for often enough to matter.
        return tuple(
            dim[0][1] - dim[0][0] if len(dim) == 1 else sum(stop - start for start, stop in dim) for dim in self.dims
        )

    @property
    def num_elements(self) -> int:
        """Elements held; 1 for a scalar."""
        return math.prod(self.shape)


def make_region(dims: Iterable[Iterable[Interval]]) -> Region:
    """Return a region with empty intervals dropped and touching ones merged.

    Raises:
        InvalidInputError: If intervals of a dim are negative, reversed, overlapping or not ascending.
    """
    return Region(tuple(_normalise(dim, list(intervals)) for dim, intervals in enumerate(dims)))


def whole(shape: Sequence[int]) -> Region:
    """Return the region that holds every element of a tensor of `shape`.

    Examples:
        >>> whole((4, 0)).dims
        (((0, 4),), ())
    """
    return Region(tuple(((0, size),) if size else () for size in shape))


def box(offsets: Sequence[int], sizes: Sequence[int]) -> Region:
    """Return the region of one interval per dim that starts at `offsets` with `sizes` elements per dim."""
    return Region(tuple(((o, o + n),) if n else () for o, n in zip(offsets, sizes, strict=True)))


def boxes(region: Region) -> Iterator[tuple[Interval, ...]]:
    """Yield the region's boxes, one interval per dim, in ascending order."""
    return product(*region.dims)


def check_within(region: Region, shape: Sequence[int]) -> None:
    """Raise `InvalidInputError` unless `region` lies within a tensor of `shape`."""
    if len(region.dims) != len(shape):
        message = f"a region of {len(region.dims)} dims does not fit a tensor of shape {tuple(shape)}"
        raise InvalidInputError(message)
    for dim, (intervals, size) in enumerate(zip(region.dims, shape, strict=True)):
        if intervals and intervals[-1][1] > size:
            message = f"dim {dim}: elements {intervals[-1][0]} to {intervals[-1][1]} do not lie within its size {size}"
            raise InvalidInputError(message)


def select(intervals: Intervals, start: int, stop: int) -> Intervals:
    """Return the intervals at local positions [start, stop) of an interval list.

    Examples:
        >>> select(((0, 3), (10, 13)), 2, 5)
        ((2, 3), (10, 12))
    """
    picked: list[Interval] = []
    position = 0
    for low, high in intervals:
        first = max(low, low + start - position)
        last = min(high, low + stop - position)
        if first < last:
            picked.append((first, last))
        position += high - low
    return tuple(picked)


def overlap(intervals: Intervals, start: int, stop: int) -> tuple[Intervals, Interval]:
    """Return what an interval list holds of [start, stop), and at which local positions it lies.

    The positions are one half-open range, because the list is ascending.

    Examples:
        >>> overlap(((0, 3), (10, 13)), 2, 12)
        (((2, 3), (10, 12)), (2, 5))
    """
    inside = tuple((max(a, start), min(b, stop)) for a, b in intervals if a < stop and b > start)
    before = sum(min(b, start) - a for a, b in intervals if a < start)
    return inside, (before, before + sum(b - a for a, b in inside))


def positions(inner: Intervals, outer: Intervals) -> Intervals:
    """Return the local positions of `inner` in an interval list that contains it.

    Examples:
        >>> positions(((1, 2), (11, 13)), ((0, 3), (10, 13)))
        ((1, 2), (4, 6))
    """
    found: list[Interval] = []
    for start, stop in inner:
        _, (first, last) = overlap(outer, start, stop)
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return tuple(found)


def shift(intervals: Intervals, by: int) -> Intervals:
    """Return the intervals moved by `by` elements."""
    return tuple((a + by, b + by) for a, b in intervals)


def _normalise(dim: int, intervals: Sequence[Interval]) -> Intervals:
    merged: list[Interval] = []
    for start, stop in intervals:
        if start < 0 or stop < start or (merged and start < merged[-1][1]):
            message = f"dim {dim}: intervals must be ascending, disjoint and not negative, got {tuple(intervals)}"
            raise InvalidInputError(message)
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)
