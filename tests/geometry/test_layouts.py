"""Layouts that frameworks build by rule, against the rule written out with NumPy; what does not divide is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardferry.errors import ShardingError
from shardferry.geometry.layouts import (
    block_regions,
    expert_regions,
    fused_qkv_regions,
    head_regions,
    named_regions,
)

from .oracle import gather, numbered

if TYPE_CHECKING:
    from shardferry.geometry.region import Region


def rows_of(regions: tuple[Region, ...], shape: tuple[int, ...]) -> list[list[int]]:
    per_row = int(np.prod(shape[1:], dtype=np.int64))
    return [
        [e // per_row for e in gather(numbered(shape), r).reshape(len(range(r.shape[0])), -1)[:, 0]] for r in regions
    ]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 1))
def test_a_rank_joins_its_part_of_every_block(units: list[int], group: int, dim: int) -> None:
    sizes = [unit * group for unit in units]
    shape = (sum(sizes), 3) if dim == 0 else (3, sum(sizes))
    array = numbered(shape)
    blocks = np.split(array, np.cumsum(sizes)[:-1], axis=dim)
    for rank, region in enumerate(block_regions(shape, dim=dim, block_sizes=sizes, group_size=group)):
        wanted = np.concatenate([np.split(block, group, axis=dim)[rank] for block in blocks], axis=dim)
        assert np.array_equal(gather(array, region), wanted)


@pytest.mark.parametrize(("sizes", "words"), [((8, 6), "block of 6"), ((8, 4), "add up to 12")])
def test_blocks_that_do_not_fit_are_refused(sizes: tuple[int, ...], words: str) -> None:
    with pytest.raises(ShardingError, match=words):
        block_regions((14, 2), dim=0, block_sizes=sizes, group_size=4)


def test_experts_go_to_expert_ranks_and_packed_halves_to_tensor_ranks() -> None:
    shape = (4, 8, 2)
    array = numbered(shape)
    regions = expert_regions(shape, expert_ranks=2, tensor_ranks=2, packed_dim=1)
    for rank, region in enumerate(regions):
        experts = array[rank // 2 * 2 : rank // 2 * 2 + 2]
        half = rank % 2
        wanted = np.concatenate([experts[:, half * 2 : half * 2 + 2], experts[:, 4 + half * 2 : 6 + half * 2]], axis=1)
        assert np.array_equal(gather(array, region), wanted)


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ShardingError, match="7 experts do not divide over 2 ranks"):
        expert_regions((7, 2), expert_ranks=2)


def test_ranks_share_heads_when_there_are_fewer() -> None:
    assert rows_of(head_regions((4, 3), num_heads=2, head_dim=2, group_size=4), (4, 3)) == [[0, 1]] * 2 + [[2, 3]] * 2
    assert rows_of(head_regions((8, 3), num_heads=4, head_dim=2, group_size=2), (8, 3)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(("heads", "head_dim", "group"), [(3, 4, 2), (2, 6, 3), (2, 5, 2)])
def test_heads_that_cannot_be_dealt_or_shared_are_refused(heads: int, head_dim: int, group: int) -> None:
    with pytest.raises(ShardingError, match="heads"):
        head_regions((12, 2), num_heads=heads, head_dim=head_dim, group_size=group)


def test_fused_qkv_cuts_each_of_its_parts() -> None:
    shape = (16, 1)  # 4 query, 2 key and 2 value heads of 2 rows
    regions = fused_qkv_regions(shape, num_heads=4, num_kv_heads=2, head_dim=2, group_size=2)
    assert rows_of(regions, shape) == [[0, 1, 2, 3, 8, 9, 12, 13], [4, 5, 6, 7, 10, 11, 14, 15]]
    shared = fused_qkv_regions(shape, num_heads=4, num_kv_heads=2, head_dim=2, group_size=4)
    assert rows_of(shared, shape)[1] == [2, 3, 8, 9, 12, 13]
    with pytest.raises(ShardingError, match="4 query heads do not divide over 3"):
        fused_qkv_regions(shape, num_heads=4, num_kv_heads=2, head_dim=2, group_size=3)
    with pytest.raises(ShardingError, match="16 rows"):
        fused_qkv_regions(shape, num_heads=4, num_kv_heads=4, head_dim=2, group_size=2)


def test_the_first_of_several_named_axes_is_the_major_one() -> None:
    names, mesh = ("data", "model"), (2, 2)
    data_major = named_regions((4,), axis_names=names, mesh_shape=mesh, spec=[("data", "model")])
    model_major = named_regions((4,), axis_names=names, mesh_shape=mesh, spec=[("model", "data")])
    assert [r.dims[0] for r in data_major] == [((0, 1),), ((1, 2),), ((2, 3),), ((3, 4),)]
    assert [r.dims[0] for r in model_major] == [((0, 1),), ((2, 3),), ((1, 2),), ((3, 4),)]


@pytest.mark.parametrize(
    ("spec", "words"),
    [(["data", "data"], "one dim only"), (["x"], "not 'x'"), ([None, "data"], "not divisible")],
)
def test_named_axes_that_cannot_cut_are_refused(spec: list[str | None], words: str) -> None:
    with pytest.raises(ShardingError, match=words):
        named_regions((4, 3) if None in spec else (4, 4), axis_names=("data",), mesh_shape=(2,), spec=spec)
