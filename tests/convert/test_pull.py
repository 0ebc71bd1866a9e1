"""A rank's region of a converted tensor, pulled back, is what converting the whole tensor and cutting it gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.convert.oracle import evaluate, fill, gather

from shardferry.convert.ops import (
    Expression,
    Picked,
    Stored,
    concatenate,
    deinterleave,
    interleave,
    pad,
    reshape,
    rope,
    stack,
    transpose,
    unrope,
)
from shardferry.convert.pull import pull_back
from shardferry.geometry.region import Region, whole
from shardferry.testing.strategies import regions

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

Arrays = dict[str, "NDArray[np.int64]"]


def stored(shape: tuple[int, ...], arrays: Arrays) -> Stored:
    """Return a stored tensor in which every element is another number from 1 on."""
    start = 1 + sum(array.size for array in arrays.values())
    key = f"t{len(arrays)}"
    arrays[key] = np.arange(start, start + int(np.prod(shape, dtype=np.int64))).reshape(shape)
    return Stored(key, shape)


def check(expression: Expression, region: Region, arrays: Arrays) -> int:
    """Compare a region with the plain way; return how many pieces it took."""
    out = np.full(region.shape, -1, np.int64)
    pieces = list(pull_back(expression, region))
    for piece in pieces:
        fill(out, piece, arrays)
    assert np.array_equal(out, gather(evaluate(expression, arrays), region))
    return len(pieces)


def factors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def expressions(draw: st.DrawFn, arrays: Arrays) -> Expression:
    """Draw a chain of operations on stored tensors of any shape."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    expression: Expression = stored(shape, arrays)
    for _ in range(draw(st.integers(0, 5))):
        expression = draw(st.sampled_from(STEPS))(draw, expression, arrays)
    return expression


def _transpose(draw: st.DrawFn, of: Expression, _: Arrays) -> Expression:
    return transpose(of, draw(st.permutations(range(len(of.shape)))))


def _reshape(draw: st.DrawFn, of: Expression, _arrays: Arrays) -> Expression:
    left = int(np.prod(of.shape, dtype=np.int64))
    if left == 0:
        return reshape(of, draw(st.permutations([0, 2, 3])))
    shape = []
    for _ in range(draw(st.integers(0, 3))):
        shape.append(draw(st.sampled_from(factors(left))))
        left //= shape[-1]
    return reshape(of, draw(st.permutations([*shape, left])))


def _pick(draw: st.DrawFn, of: Expression, _: Arrays) -> Expression:
    return Picked(of, draw(regions(of.shape)))


def _join(draw: st.DrawFn, of: Expression, arrays: Arrays) -> Expression:
    if not of.shape:
        return stack([of, stored((), arrays)], 0)
    dim = draw(st.integers(0, len(of.shape) - 1))
    other = stored((*of.shape[:dim], draw(st.integers(0, 3)), *of.shape[dim + 1 :]), arrays)
    return concatenate(draw(st.permutations([of, other])), dim)


def _stack(draw: st.DrawFn, of: Expression, arrays: Arrays) -> Expression:
    return stack(draw(st.permutations([of, stored(of.shape, arrays)])), draw(st.integers(0, len(of.shape))))


def _halves(draw: st.DrawFn, of: Expression, _: Arrays) -> Expression:
    dims = [dim for dim, size in enumerate(of.shape) if size % 2 == 0]
    return draw(st.sampled_from([interleave, deinterleave]))(of, draw(st.sampled_from(dims))) if dims else of


def _rope(draw: st.DrawFn, of: Expression, _: Arrays) -> Expression:
    if not of.shape or of.shape[0] % 2 or not of.shape[0]:
        return of
    heads = draw(st.sampled_from(factors(of.shape[0] // 2)))
    return draw(st.sampled_from([rope, unrope]))(of, heads)


def _pad(draw: st.DrawFn, of: Expression, _: Arrays) -> Expression:
    if not of.shape:
        return of
    dim = draw(st.integers(0, len(of.shape) - 1))
    return pad(of, dim, of.shape[dim] + draw(st.integers(0, 3)))


STEPS: list[Callable[[st.DrawFn, Expression, Arrays], Expression]] = [
    _transpose,
    _reshape,
    _pick,
    _join,
    _stack,
    _halves,
    _rope,
    _pad,
]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_region_of_any_chain_of_operations_is_that_of_the_whole_result(data: st.DataObject) -> None:
    arrays: Arrays = {}
    expression = data.draw(expressions(arrays))
    check(expression, data.draw(regions(expression.shape)), arrays)
    check(expression, whole(expression.shape), arrays)
