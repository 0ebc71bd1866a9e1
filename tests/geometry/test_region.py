"""Regions select what NumPy selects."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardferry.errors import InvalidInputError
from shardferry.geometry.region import boxes, check_within, make_region, overlap, select, whole
from shardferry.testing.strategies import intervals, regions, shapes


@given(st.data())
def test_a_regions_shape_and_boxes_count_its_elements(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    region = data.draw(regions(shape))
    total = 0
    for box in boxes(region):
        count = 1
        for start, stop in box:
            count *= stop - start
        total += count
    assert total == region.num_elements
    check_within(region, shape)


@given(st.data())
def test_select_takes_local_positions(data: st.DataObject) -> None:
    held = data.draw(intervals(12))
    elements = [i for a, b in held for i in range(a, b)]
    start = data.draw(st.integers(0, len(elements)))
    stop = data.draw(st.integers(start, len(elements)))
    assert [i for a, b in select(held, start, stop) for i in range(a, b)] == elements[start:stop]


@given(st.data())
def test_overlap_says_what_is_held_of_a_range_and_where_it_lies_locally(data: st.DataObject) -> None:
    held = data.draw(intervals(12))
    start = data.draw(st.integers(0, 12))
    stop = data.draw(st.integers(start, 12))
    elements = [i for a, b in held for i in range(a, b)]
    inside, (first, last) = overlap(held, start, stop)
    wanted = [i for i in elements if start <= i < stop]
    assert [i for a, b in inside for i in range(a, b)] == wanted
    assert elements[first:last] == wanted


def test_make_region_merges_touching_intervals_and_drops_empty_ones() -> None:
    assert make_region([[(0, 2), (2, 4), (5, 5), (7, 9)]]).dims == (((0, 4), (7, 9)),)


@pytest.mark.parametrize("bad", [[(2, 1)], [(-1, 2)], [(0, 3), (2, 5)], [(4, 6), (0, 2)]])
def test_make_region_refuses_intervals_that_are_no_ascending_disjoint_list(bad: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidInputError, match="ascending"):
        make_region([bad])


@pytest.mark.parametrize("shape", [(3,), (4, 5)])
def test_a_region_outside_a_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInputError, match=r"shape|size"):
        check_within(whole((4, 6)), shape)
