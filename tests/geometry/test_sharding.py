"""Mesh layouts hold what torch's splitting rule gives, element by element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardferry.errors import ShardingError
from shardferry.geometry.sharding import MeshLayout, Split, mesh_sharding, region_at
from shardferry.testing.strategies import mesh_layouts, shapes

from .oracle import cut_by_torch_rule, gather, numbered


@given(st.data())
def test_every_rank_holds_what_cutting_in_order_gives_it(data: st.DataObject) -> None:
    shape = data.draw(shapes(min_dims=1))
    layout = data.draw(mesh_layouts(len(shape)))
    array = numbered(shape)
    sharding = mesh_sharding(shape, layout, len(layout.ranks))
    for position, rank in enumerate(layout.ranks):
        region = sharding.regions[rank]
        assert region is not None
        assert np.array_equal(gather(array, region), cut_by_torch_rule(array, layout, position))


@given(st.data())
def test_every_element_is_held_once_per_replica(data: st.DataObject) -> None:
    shape = data.draw(shapes(min_dims=1))
    layout = data.draw(mesh_layouts(len(shape)))
    cut = {split.axis for split in layout.splits}
    replicas = int(np.prod([size for axis, size in enumerate(layout.mesh_shape) if axis not in cut], dtype=np.int64))
    count = np.zeros(numbered(shape).size, np.int64)
    for position in range(len(layout.ranks)):
        count[gather(numbered(shape), region_at(shape, layout, position)).reshape(-1)] += 1
    assert (count == replicas).all()


@pytest.mark.parametrize(
    ("rows", "groups", "ranks", "held"),
    [
        (12, 2, 4, [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11], []]),
        (10, 3, 4, [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]),
        (3, 4, 2, [[0, 1, 2], []]),
    ],
)
def test_a_strided_shard_joins_its_piece_of_every_group(
    rows: int, groups: int, ranks: int, held: list[list[int]]
) -> None:
    layout = MeshLayout((ranks,), tuple(range(ranks)), (Split(0, 0, groups),))
    assert [gather(numbered((rows,)), region_at((rows,), layout, i)).tolist() for i in range(ranks)] == held


def test_the_order_of_cuts_matters_where_a_dim_does_not_divide() -> None:
    left_to_right = MeshLayout((4, 2), tuple(range(8)), (Split(0, 0, 2), Split(1, 0)))
    tensor_parallel_first = MeshLayout((4, 2), tuple(range(8)), (Split(1, 0), Split(0, 0)))
    assert region_at((9,), left_to_right, 7).dims == ((),)
    assert region_at((9,), tensor_parallel_first, 7).dims == (((8, 9),),)


def test_a_rank_outside_the_mesh_has_no_part_which_is_not_an_empty_one() -> None:
    sharding = mesh_sharding((1,), MeshLayout((2,), (1, 2), (Split(0, 0),)), 4)
    assert [region and region.shape for region in sharding.regions] == [None, (1,), (0,), None]


@pytest.mark.parametrize(
    "layout",
    [
        MeshLayout((2,), (0, 0), ()),
        MeshLayout((2,), (0, 9), ()),
        MeshLayout((2, 2), (0, 1), ()),
        MeshLayout((2,), (0, 1), (Split(0, 1),)),
        MeshLayout((2,), (0, 1), (Split(1, 0),)),
        MeshLayout((2,), (0, 1), (Split(0, 0, 0),)),
    ],
)
def test_an_impossible_layout_is_refused(layout: MeshLayout) -> None:
    with pytest.raises(ShardingError):
        mesh_sharding((4,), layout, 2)
