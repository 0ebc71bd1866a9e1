"""Holes between neighbours in a file that ranks read along, because a request costs more than the bytes.

All ranks that hold parts of the same tensors are looked at together, and all their neighbours at once, as arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardferry.plan.patterns import Ints, JobShape, Pattern


class Bridges(NamedTuple):
    """Holes between neighbours in a file that ranks read along; arrays of shape (num_bridges,).

    Attributes:
        kind: Equal where the neighbours are of the same patterns and lie equally far apart.
        num: How many neighbours of that kind there are.
        ranks: Who reads along.
        left: Pattern of the first neighbour.
        gap: Bytes between both.
        before: Bytes of the hole in the first.
        after: Bytes of it in the second.
        part: Which part of the first the rank holds, among the parts of all patterns.
        next_part: Which part of the second.
    """

    kind: Ints
    num: Ints
    ranks: Ints
    left: Ints
    gap: Ints
    before: Ints
    after: Ints
    part: Ints
    next_part: Ints


def find_bridges(shape: JobShape, seek_bytes: int) -> Iterator[Bridges]:
    """Yield the holes of fewer than `seek_bytes` between one tensor and the next one of ranks.

    Ranks that hold parts of the same tensors have the same neighbours, so they are looked at together.
    """
    patterns = shape.patterns
    sizes = np.array([pattern.num_bytes for pattern in patterns], np.int64)
    whole = np.flatnonzero(shape.spans[:, 1] - shape.spans[:, 0] == sizes[shape.pattern_of])  # not boxes of a tensor
    order = whole[np.argsort(shape.pattern_of[whole], kind="stable")]
    members = np.split(order, np.searchsorted(shape.pattern_of[order], np.arange(1, len(patterns))))
    parts = np.array([pattern.part_of_rank for pattern in patterns], np.int64).reshape(-1, shape.world_size)
    ends = _Ends.of(patterns)
    _, first, group_of = np.unique(np.packbits(parts >= 0, axis=0), axis=1, return_index=True, return_inverse=True)
    for group, rank in enumerate(first):
        held = np.flatnonzero(parts[:, rank] >= 0)
        if not len(held):
            continue
        mine = np.sort(np.concatenate([members[number] for number in held]))
        a, b = mine[:-1], mine[1:]
        gaps = shape.spans[b, 0] - shape.spans[a, 1]
        near = (shape.file_of[a] == shape.file_of[b]) & (gaps >= 0) & (gaps < seek_bytes)
        left, right, gaps = shape.pattern_of[a[near]], shape.pattern_of[b[near]], gaps[near]
        kinds, counts = distinct(left, right, gaps)
        ranks = np.flatnonzero(group_of.reshape(-1) == group)
        neighbours = _Neighbours(left[kinds], right[kinds], gaps[kinds], counts)
        yield _bridged(neighbours, ranks, parts[:, ranks], ends, seek_bytes)


def distinct(*keys: Ints) -> tuple[Ints, Ints]:
    """Return the position of one of each distinct combination of keys, and how often it occurs."""
    order = np.lexsort(keys)
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = np.logical_or.reduce([key[order[1:]] != key[order[:-1]] for key in keys])
    first = np.flatnonzero(is_new)
    return order[first], np.diff(first, append=len(order))


class _Ends(NamedTuple):
    """Where the parts of all patterns end, one pattern after another; shape (num_parts,) if not said.

    Attributes:
        base: Shape (num_patterns,): number of the pattern's first part.
        before: Bytes of the tensor before each part.
        behind: Bytes of the tensor behind it.
        is_one_span: Whether it is one run.
    """

    base: Ints
    before: Ints
    behind: Ints
    is_one_span: NDArray[np.bool_]

    @classmethod
    def of(cls, patterns: Sequence[Pattern]) -> _Ends:
        """Return the ends of the parts of some patterns."""
        counts = np.array([len(pattern.parts.first) for pattern in patterns], np.int64)
        parts = [pattern.parts for pattern in patterns]
        none = [np.zeros(0, np.int64)]
        return cls(
            np.cumsum(counts) - counts,
            np.concatenate(none + [part.first for part in parts]),
            np.concatenate(none + [pattern.num_bytes - pattern.parts.last for pattern in patterns]),
            np.concatenate([np.zeros(0, np.bool_)] + [part.is_one_span for part in parts]),
        )


class _Neighbours(NamedTuple):
    """Kinds of neighbours in a file; arrays of shape (num_kinds,).

    Attributes:
        left: Pattern of the first.
        right: Pattern of the second.
        gap: Bytes between both.
        num: How many there are.
    """

    left: Ints
    right: Ints
    gap: Ints
    num: Ints


def _bridged(kinds: _Neighbours, ranks: Ints, parts: Ints, ends: _Ends, seek_bytes: int) -> Bridges:
    """Return which ranks bridge what lies between neighbours.

    Args:
        kinds: The neighbours.
        ranks: Ranks that hold some of all of them.
        parts: Shape (num_patterns, num_ranks): the part each of the ranks holds.
        ends: Where parts end.
        seek_bytes: Larger holes are not bridged.
    """
    a, b = (ends.base[numbers, None] + parts[numbers] for numbers in (kinds.left, kinds.right))
    holes = ends.behind[a] + kinds.gap[:, None] + ends.before[b]
    kind, at = np.nonzero((holes < seek_bytes) & ends.is_one_span[a] & ends.is_one_span[b])
    a, b = a[kind, at], b[kind, at]
    return Bridges(
        kind=kind,
        num=kinds.num[kind],
        ranks=ranks[at],
        left=kinds.left[kind],
        gap=kinds.gap[kind],
        before=ends.behind[a],
        after=ends.before[b],
        part=a,
        next_part=b,
    )
