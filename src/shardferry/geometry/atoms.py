"""Atoms: the common refinement of all ranks' regions, each with one set of holders.

A region is a product, so the question "who holds this element" splits by dim: along one dim, elements that the
same ranks hold form a class, and an atom is a product of classes whose holders are the ranks in all of them.
That keeps atoms few and each one a region, however many intervals a layout has.
"""

from __future__ import annotations

from itertools import pairwise, product
from typing import TYPE_CHECKING, NamedTuple

from shardferry.geometry.region import Interval, Intervals, Region, make_region

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardferry.geometry.sharding import Sharding


class Atom(NamedTuple):
    """Elements that exactly the same ranks hold.

    Attributes:
        region: The elements, never empty.
        holders: Ranks that hold them, ascending; empty for elements nobody holds.
    """

    region: Region
    holders: tuple[int, ...]


def atoms_of(sharding: Sharding) -> tuple[Atom, ...]:
    """Return the atoms of a tensor, covering every element once, ordered by their first element.

    Examples:
        >>> from shardferry.geometry.region import box
        >>> from shardferry.geometry.sharding import Sharding
        >>> split = Sharding((4,), (box((0,), (3,)), box((2,), (2,))))
        >>> [(atom.region.dims[0], atom.holders) for atom in atoms_of(split)]
        [(((0, 2),), (0,)), (((2, 3),), (0, 1)), (((3, 4),), (1,))]
    """
    everyone = (1 << len(sharding.regions)) - 1
    classes = [_classes(dim, size, sharding) for dim, size in enumerate(sharding.shape)]
    if not classes:
        holding = sum(1 << rank for rank, region in enumerate(sharding.regions) if region is not None)
        return (Atom(Region(()), _ranks(holding)),)
    found: dict[int, list[tuple[Intervals, ...]]] = {}
    for combination in product(*classes):
        holders = everyone
        for _, mask in combination:
            holders &= mask
        found.setdefault(holders, []).append(tuple(intervals for intervals, _ in combination))
    atoms = [Atom(Region(dims), _ranks(mask)) for mask, parts in found.items() for dims in _joined(parts)]
    return tuple(sorted(atoms, key=lambda atom: tuple(intervals[0] for intervals in atom.region.dims)))


def uncovered(sharding: Sharding) -> tuple[Region, ...]:
    """Return the regions that no rank holds; nothing if the tensor is complete."""
    return tuple(atom.region for atom in atoms_of(sharding) if not atom.holders)


def _classes(dim: int, size: int, sharding: Sharding) -> list[tuple[Intervals, int]]:
    """Group the elements of one dim by the set of ranks (as a bit mask) whose region holds them along it."""
    ranks_of: dict[Intervals, int] = {}
    for rank, region in enumerate(sharding.regions):
        if region is not None:
            ranks_of[region.dims[dim]] = ranks_of.get(region.dims[dim], 0) | 1 << rank
    changes: dict[int, int] = {0: 0, size: 0}
    for held, ranks in ranks_of.items():
        for bound in (bound for interval in held for bound in interval):
            changes[bound] = changes.get(bound, 0) ^ ranks
    classes: dict[int, list[Interval]] = {}
    mask = 0
    for start, stop in pairwise(sorted(changes)):
        mask ^= changes[start]
        classes.setdefault(mask, []).append((start, stop))
    return [(make_region([intervals]).dims[0], mask) for mask, intervals in classes.items()]


def _joined(parts: list[tuple[Intervals, ...]]) -> Iterable[tuple[Intervals, ...]]:
    """Join products of equal holders where they differ in one dim only, so that nobody's elements stay one atom."""
    joined = list(dict.fromkeys(parts))
    for dim in range(len(parts[0])):
        rest: dict[tuple[Intervals, ...], list[Interval]] = {}
        for dims in joined:
            rest.setdefault((*dims[:dim], *dims[dim + 1 :]), []).extend(dims[dim])
        joined = [
            (*others[:dim], make_region([sorted(intervals)]).dims[0], *others[dim:])
            for others, intervals in rest.items()
        ]
    return joined


def _ranks(mask: int) -> tuple[int, ...]:
    ranks = []
    while mask:  # bit by bit set: a few of a thousand ranks hold most tensors
        lowest = mask & -mask
        ranks.append(lowest.bit_length() - 1)
        mask ^= lowest
    return tuple(ranks)
