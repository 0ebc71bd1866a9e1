"""Pieces of regions: what two have in common, what several cover, and runs of elements as regions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardferry.geometry.region import Interval, Intervals, Region, make_region, select, whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


def intersect(region: Region, other: Region) -> Region | None:
    """Return the elements that both regions hold, None if there is none.

    Examples:
        >>> intersect(Region((((0, 4),), ((0, 2), (5, 7)))), Region((((3, 9),), ((1, 6),))))
        Region(dims=(((3, 4),), ((1, 2), (5, 6))))
    """
    dims = []
    for mine, theirs in zip(region.dims, other.dims, strict=True):
        common = mine if mine == theirs else _common(mine, theirs)
        if not common:
            return None
        dims.append(common)
    return Region(tuple(dims))


def united(regions: Iterable[Region]) -> tuple[Region, ...]:
    """Return fewer regions that cover the same elements; those given must be disjoint and not empty.

    Regions that differ in one dim only become one. Without dims, all are the same element.

    Examples:
        >>> united([Region((((0, 4),), ((0, 2),))), Region((((0, 4),), ((2, 6),)))])
        (Region(dims=(((0, 4),), ((0, 6),))),)
    """
    joined = list(dict.fromkeys(region.dims for region in regions))
    for dim in reversed(range(len(joined[0]) if joined else 0)):
        rest: dict[tuple[Intervals, ...], list[Interval]] = {}
        for dims in joined:
            rest.setdefault((*dims[:dim], *dims[dim + 1 :]), []).extend(dims[dim])
        joined = [
            (*others[:dim], make_region([sorted(intervals)]).dims[0], *others[dim:])
            for others, intervals in rest.items()
        ]
    return tuple(Region(dims) for dims in sorted(joined))


def run_regions(region: Region, start: int, stop: int) -> Iterator[Region]:
    """Yield the regions that are the elements [start, stop) of a region's row-major array, in that order.

    Examples:
        >>> [piece.dims for piece in run_regions(whole((4, 5)), 3, 16)]
        [(((0, 1),), ((3, 5),)), (((1, 3),), ((0, 5),)), (((3, 4),), ((0, 1),))]
    """
    if start == 0 and stop == region.num_elements:
        yield region
        return
    for box in _run_boxes(region.shape, start, stop):
        yield part_at(region, box)


def part_at(region: Region, box: Sequence[Interval]) -> Region:
    """Return the elements of a region at a box of positions in its array: per dim a half-open range."""
    return Region(tuple(select(held, *run) for held, run in zip(region.dims, box, strict=True)))


def byte_boxes(shape: Sequence[int], bits: int, max_bytes: int) -> Iterator[tuple[Interval, ...]]:
    """Yield boxes that are a row-major array of `shape` once, in order, each of at most `max_bytes`.

    The innermost dim is cut at multiples of 4 elements only, where sub-byte dtypes begin on a byte: less than their
    bytes is not kept to.

    Examples:
        >>> list(byte_boxes((3, 8), 8, 16))
        [((0, 2), (0, 8)), ((2, 3), (0, 8))]
    """
    num_bits = math.prod(shape) * bits
    if num_bits <= 8 * max_bytes or not shape:
        yield tuple((0, size) for size in shape)
        return
    step = max(1, 8 * shape[0] * max_bytes // num_bits)
    if len(shape) == 1:
        step = max(1, step // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS
    for start in range(0, shape[0], step):
        stop = min(shape[0], start + step)
        for box in byte_boxes(shape[1:], bits * (stop - start), max_bytes):
            yield ((start, stop), *box)


# Sub-byte dtypes start and end on a byte only at multiples of 2 (F4) and 4 (F6) elements.
ALIGNED_ELEMENTS = 4


def _common(mine: Intervals, theirs: Intervals) -> Intervals:
    return tuple(
        (max(low, start), min(high, stop))
        for start, stop in theirs
        for low, high in mine
        if low < stop and high > start
    )


def _run_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Interval, ...]]:
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        for box in _run_boxes(shape[1:], start - last * row, stop - last * row):
            yield ((last, first), *box)
        return
    if start < first * row:
        for box in _run_boxes(shape[1:], start - (first - 1) * row, row):
            yield ((first - 1, first), *box)
    if first < last:
        yield ((first, last), *(dim[0] for dim in whole(shape[1:]).dims))
    for box in _run_boxes(shape[1:], 0, stop - last * row):
        yield ((last, last + 1), *box)
