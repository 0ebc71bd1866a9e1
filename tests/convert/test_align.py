"""Every element of a converted tensor is found in the tensor it comes from, in order dim by dim."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.convert.oracle import evaluate, gather
from tests.convert.test_pull import Arrays, expressions

from shardferry.convert.align import aligned_parts
from shardferry.convert.ops import Stored, index, reshape, unrope


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_both_sides_hold_the_same_elements_in_the_same_order(data: st.DataObject) -> None:
    arrays: Arrays = {}
    expression = data.draw(expressions(arrays))
    plain = evaluate(expression, arrays)
    done = np.zeros(plain.shape, np.int64)
    for key, region, origin, axes in aligned_parts(expression, {name: array.shape for name, array in arrays.items()}):
        want = gather(plain, region)
        if key is None:
            assert not want.any()
        else:
            held = gather(arrays[key], origin)
            order = [dim for dim in range(held.ndim) if dim not in axes] + [axis for axis in axes if axis >= 0]
            assert np.array_equal(held.transpose(order).reshape(want.shape), want)
        done[np.ix_(*([i for a, b in dim for i in range(a, b)] for dim in region.dims))] += 1
    assert (done == 1).all()


def test_only_the_two_halves_of_a_rotary_embedding_are_taken_apart() -> None:
    """32 heads of 8 rows are two parts, not 128."""
    parts = list(aligned_parts(unrope(Stored("q", (256, 4)), 32), {"q": (256, 4)}))
    assert [part.region.num_elements for part in parts] == [512, 512]


def test_an_index_of_a_stack_is_one_part() -> None:
    (part,) = aligned_parts(index(Stored("w", (4, 6, 5)), 0, 2), {"w": (4, 6, 5)})
    assert (part.axes, part.origin.dims[0]) == ((1, 2), ((2, 3),))


def test_a_source_that_is_seen_in_another_shape_is_found_by_its_own() -> None:
    (part,) = aligned_parts(reshape(Stored("w", (6, 5)), (1, 6, 5)), {"w": (6, 5)})
    assert part.origin.shape == (6, 5)
