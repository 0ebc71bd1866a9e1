"""Which elements of a converted tensor lie in which tensors it is made of, in the same order dim by dim.

`pull` answers what a region needs; this answers, for saving, where every element of a source goes. Both sides are
regions of the tensors' own dims, and stay regions when one of them is cut: so what a rank holds of the source is found
in the converted tensor by cutting both alike. Factors of a dim that change places, as in a rotary embedding, are taken
apart value by value: the fewest that leave the others in order.
"""

from __future__ import annotations

from itertools import combinations, pairwise, product
from typing import TYPE_CHECKING, NamedTuple

from shardferry.convert.ops import Reshaped, Stored, Zeros, replace_leaves
from shardferry.convert.pull import Digit, Frame, frames_of
from shardferry.errors import InvalidInputError
from shardferry.geometry.region import Interval, Intervals, Region, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardferry.convert.ops import Expression


class Aligned(NamedTuple):
    """Elements that a converted tensor takes from one source.

    Attributes:
        key: The source; None for zeros.
        region: Where they are in the converted tensor.
        origin: Where they are in the source.
        axes: Per dim of `region` the dim of `origin` that holds the same indices in the same order; -1 where both
            have one index only. Dims of `origin` that are not named have one index.
    """

    key: str | None
    region: Region
    origin: Region
    axes: tuple[int, ...]


class _Factor(NamedTuple):
    """A digit of a dim of the source, and how many of the source's indices one of its values counts."""

    dim: int
    unit: int
    digit: Digit


def aligned_parts(expression: Expression, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Aligned]:
    """Yield all elements of an expression's tensor once, by the source they lie in.

    Args:
        expression: How the converted tensor is made of sources.
        shapes: The sources' own shapes, by key.

    Raises:
        InvalidInputError: If values are computed and not only moved.
    """
    own = replace_leaves(expression, lambda leaf: Reshaped(Stored(leaf.key, shapes[leaf.key]), leaf.shape))
    for leaf, frame in frames_of(own, whole(own.shape)):
        if not isinstance(leaf, Stored | Zeros):
            raise InvalidInputError(f"values computed by {leaf.function.name} cannot be written back")
        yield from _parts(leaf.key if isinstance(leaf, Stored) else None, frame)


def _parts(key: str | None, frame: Frame) -> Iterator[Aligned]:
    factors = [factor for dim, digits in enumerate(frame.dims) for factor in _factors(dim, digits)]
    kept = _kept(factors, len(frame.starts))
    loose = [factor for factor in factors if not any(factor in row for row in kept.values())]
    values = [[value for start, stop in one.digit.held for value in range(start, stop)] for one in loose]
    axes = tuple(kept[dim][0].dim if dim in kept else -1 for dim in range(len(frame.starts)))
    for chosen in product(*(enumerate(held) for held in values)):
        bases, starts = [0] * len(frame.dims), list(frame.starts)
        for (at, value), factor in zip(chosen, loose, strict=True):
            bases[factor.dim] += value * factor.unit
            if factor.digit.dim >= 0:
                starts[factor.digit.dim] += at * factor.digit.step
        origin: list[Intervals] = [((base, base + 1),) for base in bases]
        region: list[Intervals] = [((start, start + 1),) for start in starts]
        for dim, row in kept.items():
            source = row[0].dim
            origin[source] = _indices([(one.digit.held, one.unit) for one in row], bases[source])
            region[dim] = _indices([(((0, one.digit.width),), one.digit.step) for one in row], starts[dim])
        yield Aligned(key, Region(tuple(region)), Region(tuple(origin)), axes)


def _factors(dim: int, digits: Sequence[Digit]) -> Iterator[_Factor]:
    unit = 1
    found = []
    for digit in reversed(digits):
        found.append(_Factor(dim, unit, digit))
        unit *= digit.size
    yield from reversed(found)


def _kept(factors: Sequence[_Factor], num_dims: int) -> dict[int, list[_Factor]]:
    """Return per dim of the target factors of one dim of the source in the same order, as many values as can be."""
    rows: list[tuple[int, int, list[_Factor]]] = []
    for dim in range(num_dims):
        for source in {one.dim for one in factors}:
            mine = [one for one in factors if (one.dim, one.digit.dim) == (source, dim) and one.digit.width > 1]
            if mine:
                row = _longest(mine)
                rows.append((_count(row), dim, row))
    kept: dict[int, list[_Factor]] = {}
    taken: set[int] = set()
    for _, dim, row in sorted(rows, key=lambda entry: -entry[0]):
        if dim not in kept and row[0].dim not in taken:
            kept[dim] = row
            taken.add(row[0].dim)
    return kept


def _longest(factors: Sequence[_Factor]) -> list[_Factor]:
    """Return the factors, of those in the order of the source, with the most values that are in order in the target."""
    rows = (list(row) for size in range(len(factors), 0, -1) for row in combinations(factors, size))
    ordered = (row for row in rows if all(a.digit.step > b.digit.step for a, b in pairwise(row)))
    return max(ordered, key=_count)


def _count(row: Sequence[_Factor]) -> int:
    count = 1
    for factor in row:
        count *= factor.digit.width
    return count


def _indices(digits: Sequence[tuple[Intervals, int]], base: int) -> Intervals:
    """Return the ascending indices that values times units make, counted from `base`."""
    (held, unit), *lower = digits
    if not lower and unit == 1:
        return tuple((base + start, base + stop) for start, stop in held)
    found: list[Interval] = []
    for value in (value for start, stop in held for value in range(start, stop)):
        at = base + value * unit
        for start, stop in _indices(lower, at) if lower else ((at, at + 1),):
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
    return tuple(found)
