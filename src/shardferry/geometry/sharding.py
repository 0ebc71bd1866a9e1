"""Shardings: who holds which region of a tensor, and the rules that cut one over a mesh.

`MeshLayout` is the rule in neutral words: an ordered list of cuts, each over one mesh axis. Placements that apply
left to right are such a list in axis order; FSDP2 over tensor parallelism is the same notation with another order.
`Sharding` is the result: one region per rank, or None for a rank that does not have the tensor at all, which is
not the same as an empty piece.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardferry.errors import ShardingError
from shardferry.geometry.region import Interval, Intervals, Region, select, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Split(NamedTuple):
    """One cut of a tensor dim over one mesh axis.

    Attributes:
        axis: Mesh axis whose coordinate picks the piece.
        dim: Tensor dim that is cut, not negative.
        groups: The dim is first cut into this many groups; each group is cut over the axis, and a rank's pieces
            are joined in order. 1 is a plain shard, more is torch's `_StridedShard` with this `split_factor`.
    """

    axis: int
    dim: int
    groups: int = 1


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """A tensor cut over a mesh of ranks.

    Attributes:
        mesh_shape: Size of each mesh axis.
        ranks: Rank at each mesh position, row-major.
        splits: Cuts in the order in which they act, each on what the one before left. Axes not named replicate.
    """

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    splits: tuple[Split, ...]
    # Kept: layouts are keys of caches, and hashing a thousand ranks takes longer than what is looked up.
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.mesh_shape, self.ranks, self.splits)))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class Sharding:
    """The region of one tensor that every rank holds.

    Attributes:
        shape: Global shape, in elements.
        regions: By rank; None where the rank does not have the tensor.
    """

    shape: tuple[int, ...]
    regions: tuple[Region | None, ...]


def chunk(size: int, pieces: int, index: int) -> Interval:
    """Return the half-open range of piece `index` when `size` elements are cut in `pieces`.

    The rule is `torch.chunk`'s: every piece has ceil(size / pieces) elements until they run out.

    Examples:
        >>> [chunk(5, 4, i) for i in range(4)]
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    width = -(-size // pieces)
    return min(size, index * width), min(size, (index + 1) * width)


@lru_cache(maxsize=65536)
def region_at(shape: tuple[int, ...], layout: MeshLayout, position: int) -> Region:
    """Return the region held at a mesh position (row-major index into `layout.ranks`).

    Raises:
        ShardingError: If a cut names a dim or axis that is not there.
    """
    dims = list(whole(shape).dims)
    coordinates = _coordinates(position, layout.mesh_shape)
    for split in layout.splits:
        _check_split(split, shape, layout.mesh_shape)
        dims[split.dim] = _cut(dims[split.dim], split.groups, layout.mesh_shape[split.axis], coordinates[split.axis])
    return Region(tuple(dims))


@lru_cache(maxsize=1024)
def mesh_sharding(shape: tuple[int, ...], layout: MeshLayout, world_size: int) -> Sharding:
    """Return the region of every rank of the world under a mesh layout.

    Raises:
        ShardingError: If the mesh lists a rank twice or one that is not in the world, or a cut is impossible.
    """
    if math.prod(layout.mesh_shape) != len(layout.ranks) or len(set(layout.ranks)) != len(layout.ranks):
        message = f"a mesh of shape {layout.mesh_shape} must list each of its ranks once, got {layout.ranks}"
        raise ShardingError(message)
    regions: list[Region | None] = [None] * world_size
    for position, rank in enumerate(layout.ranks):
        if not 0 <= rank < world_size:
            message = f"the mesh names rank {rank}, but the world has ranks 0 to {world_size - 1}"
            raise ShardingError(message)
        regions[rank] = region_at(shape, layout, position)
    return Sharding(shape, tuple(regions))


def replicated(shape: tuple[int, ...], world_size: int) -> Sharding:
    """Return the sharding in which every rank holds the whole tensor."""
    return Sharding(shape, (whole(shape),) * world_size)


def _cut(intervals: Intervals, groups: int, pieces: int, index: int) -> Intervals:
    size = sum(stop - start for start, stop in intervals)
    if groups == 1:
        return select(intervals, *chunk(size, pieces, index))
    picked: list[Interval] = []
    for group_start, group_stop in _groups(size, groups):
        start, stop = chunk(group_stop - group_start, pieces, index)
        for piece in select(intervals, group_start + start, group_start + stop):
            if picked and picked[-1][1] == piece[0]:
                picked[-1] = (picked[-1][0], piece[1])
            else:
                picked.append(piece)
    return tuple(picked)


def _groups(size: int, groups: int) -> Iterator[Interval]:
    for group in range(groups):
        start, stop = chunk(size, groups, group)
        if start < stop:
            yield start, stop


def _coordinates(position: int, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    coordinates = []
    for size in reversed(mesh_shape):
        position, coordinate = divmod(position, size)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


def _check_split(split: Split, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> None:
    if not 0 <= split.dim < len(shape):
        message = f"dim {split.dim} cannot be cut over mesh axis {split.axis}: the tensor has shape {shape}"
        raise ShardingError(message)
    if not 0 <= split.axis < len(mesh_shape) or split.groups < 1:
        message = f"{split} does not fit a mesh of shape {mesh_shape}"
        raise ShardingError(message)
