"""Layouts that frameworks build by rule: packed blocks, experts, shared heads, named mesh axes.

Each function returns the regions in rank (or device) order and refuses what does not divide, before anything is
read. They exist because the placements of such tensors do not tell where their rows come from.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardferry.errors import ShardingError
from shardferry.geometry.region import Interval, Region, make_region, whole
from shardferry.geometry.sharding import MeshLayout, Split, region_at

if TYPE_CHECKING:
    from collections.abc import Sequence


def block_regions(
    shape: tuple[int, ...], *, dim: int, block_sizes: Sequence[int], group_size: int
) -> tuple[Region, ...]:
    """Return the regions of a tensor whose `dim` is made of blocks, each cut evenly over the group.

    This is a packed gate|up or q|k|v weight under tensor parallelism: a rank joins its part of every block.

    Args:
        shape: Global shape, in elements.
        dim: Dim made of blocks.
        block_sizes: Elements of each block along `dim`; their sum is the dim's size.
        group_size: Ranks of the group.

    Raises:
        ShardingError: If the blocks do not add up to the dim, or one does not divide by `group_size`.
    """
    if sum(block_sizes) != shape[dim]:
        message = f"blocks {tuple(block_sizes)} add up to {sum(block_sizes)}, but dim {dim} of {shape} has {shape[dim]}"
        raise ShardingError(message)
    for size in block_sizes:
        if size % group_size:
            message = f"a block of {size} along dim {dim} of {shape} does not divide over {group_size} ranks"
            raise ShardingError(message)
    starts = [sum(block_sizes[:index]) for index in range(len(block_sizes))]
    return tuple(
        _with_dim(
            shape,
            dim,
            [
                (start + rank * size // group_size, start + (rank + 1) * size // group_size)
                for start, size in zip(starts, block_sizes, strict=True)
            ],
        )
        for rank in range(group_size)
    )


def expert_regions(
    shape: tuple[int, ...], *, expert_ranks: int, tensor_ranks: int = 1, packed_dim: int | None = None
) -> tuple[Region, ...]:
    """Return the regions of a fused [experts, ...] tensor, by expert rank and within it by tensor rank.

    Args:
        shape: Global shape; dim 0 counts experts.
        expert_ranks: Ranks over which experts are dealt in equal runs.
        tensor_ranks: Ranks that cut `packed_dim` of every expert as two packed halves.
        packed_dim: Dim of the fused tensor that holds gate|up; needed if `tensor_ranks` > 1.

    Raises:
        ShardingError: If experts or halves do not divide.
    """
    if shape[0] % expert_ranks:
        message = f"{shape[0]} experts do not divide over {expert_ranks} ranks"
        raise ShardingError(message)
    experts = shape[0] // expert_ranks
    inner = [whole(shape)] * tensor_ranks
    if packed_dim is not None:
        half, odd = divmod(shape[packed_dim], 2)
        inner = list(
            block_regions(shape, dim=packed_dim, block_sizes=(half, half + odd), group_size=tensor_ranks),
        )
    return tuple(
        make_region([[(rank * experts, (rank + 1) * experts)], *region.dims[1:]])
        for rank in range(expert_ranks)
        for region in inner
    )


def head_regions(shape: tuple[int, ...], *, num_heads: int, head_dim: int, group_size: int) -> tuple[Region, ...]:
    """Return the regions of a tensor whose rows are heads, dealt over the group; ranks share a head if there are fewer.

    Raises:
        ShardingError: If heads and group size divide neither way, or the rows are not `num_heads * head_dim`.
    """
    if shape[0] != num_heads * head_dim:
        message = f"{num_heads} heads of {head_dim} rows do not make the {shape[0]} rows of shape {shape}"
        raise ShardingError(message)
    return tuple(
        _with_dim(shape, 0, [(first * head_dim, last * head_dim)])
        for first, last in (_heads_of(num_heads, group_size, rank) for rank in range(group_size))
    )


def fused_qkv_regions(
    shape: tuple[int, ...], *, num_heads: int, num_kv_heads: int, head_dim: int, group_size: int
) -> tuple[Region, ...]:
    """Return the regions of a tensor whose rows are q | k | v heads, each cut over the group like `head_regions`.

    Raises:
        ShardingError: If the rows do not fit, query heads do not divide, or kv heads divide neither way.
    """
    counts = (num_heads, num_kv_heads, num_kv_heads)
    if shape[0] != sum(counts) * head_dim:
        message = f"{counts} heads of {head_dim} rows do not make the {shape[0]} rows of shape {shape}"
        raise ShardingError(message)
    if num_heads % group_size:
        message = f"{num_heads} query heads do not divide over {group_size} ranks"
        raise ShardingError(message)
    regions = []
    for rank in range(group_size):
        rows: list[Interval] = []
        before = 0
        for count in counts:
            first, last = _heads_of(count, group_size, rank)
            rows.append(((before + first) * head_dim, (before + last) * head_dim))
            before += count
        regions.append(_with_dim(shape, 0, rows))
    return tuple(regions)


def named_regions(
    shape: tuple[int, ...],
    *,
    axis_names: Sequence[str],
    mesh_shape: tuple[int, ...],
    spec: Sequence[str | Sequence[str] | None],
) -> tuple[Region, ...]:
    """Return the regions of a tensor under named mesh axes, in mesh device order (JAX `NamedSharding`).

    Args:
        shape: Global shape, in elements.
        axis_names: Name of each mesh axis.
        mesh_shape: Size of each mesh axis.
        spec: Per dim None, an axis name, or several, the first one major; dims beyond it are whole.

    Raises:
        ShardingError: If a dim does not divide by the axes that cut it, or an axis is unknown or used twice.
    """
    splits: list[Split] = []
    for dim, entry in enumerate(spec):
        names = [] if entry is None else [entry] if isinstance(entry, str) else list(entry)
        axes = [_axis(name, axis_names) for name in names]
        pieces = math.prod(mesh_shape[axis] for axis in axes)
        if shape[dim] % pieces:
            message = (
                f"dim {dim} of shape {shape} has {shape[dim]} elements, not divisible by the {pieces} parts of {names}"
            )
            raise ShardingError(message)
        splits.extend(Split(axis, dim) for axis in axes)
    if len({split.axis for split in splits}) != len(splits):
        message = f"a mesh axis may cut one dim only, got {list(spec)}"
        raise ShardingError(message)
    count = math.prod(mesh_shape)
    layout = MeshLayout(mesh_shape, tuple(range(count)), tuple(splits))
    return tuple(region_at(shape, layout, position) for position in range(count))


def _heads_of(num_heads: int, group_size: int, rank: int) -> Interval:
    if num_heads % group_size == 0:
        each = num_heads // group_size
        return rank * each, (rank + 1) * each
    if group_size % num_heads == 0:
        head = rank // (group_size // num_heads)
        return head, head + 1
    message = f"{num_heads} heads cannot be dealt or shared evenly over {group_size} ranks"
    raise ShardingError(message)


def _axis(name: str, axis_names: Sequence[str]) -> int:
    if name not in axis_names:
        message = f"the mesh has axes {list(axis_names)}, not {name!r}"
        raise ShardingError(message)
    return list(axis_names).index(name)


def _with_dim(shape: tuple[int, ...], dim: int, intervals: Sequence[Interval]) -> Region:
    dims: list[Sequence[Interval]] = list(whole(shape).dims)
    dims[dim] = intervals
    return make_region(dims)
