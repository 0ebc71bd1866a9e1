"""A rank's region of a converted tensor, pulled back, is what converting the whole tensor and cutting it gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardferry.convert.ops import Expression, Stored, Tile, Tiled, concatenate, leaves, pull_back, transpose
from shardferry.errors import InvalidInputError
from shardferry.geometry.region import Region
from shardferry.testing.strategies import regions

Arrays = dict[str, NDArray[np.int64]]


def gather(array: NDArray[np.int64], region: Region) -> NDArray[np.int64]:
    for dim, held in enumerate(region.dims):
        array = np.take(array, np.array([i for a, b in held for i in range(a, b)], np.int64), axis=dim)
    return array


@st.composite
def expressions(draw: st.DrawFn, shape: tuple[int, ...], arrays: Arrays, depth: int = 3) -> Expression:
    """Draw how a tensor of `shape` is made; its stored tensors are added to `arrays`, every element another number."""
    kind = draw(st.sampled_from(["stored", "transpose", "concatenate"])) if depth and shape else "stored"
    if kind == "transpose":
        axes = draw(st.permutations(range(len(shape))))
        below = tuple(shape[axes.index(dim)] for dim in range(len(shape)))
        return transpose(draw(expressions(below, arrays, depth - 1)), axes)
    if kind == "concatenate":
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, shape[dim]))
        sizes = [(*shape[:dim], size, *shape[dim + 1 :]) for size in (cut, shape[dim] - cut)]
        return concatenate([draw(expressions(size, arrays, depth - 1)) for size in sizes], dim)
    start = sum(array.size for array in arrays.values())
    key = f"t{len(arrays)}"
    arrays[key] = np.arange(start, start + int(np.prod(shape, dtype=np.int64))).reshape(shape)
    return Stored(key, shape)


def evaluate(expression: Expression, arrays: Arrays) -> NDArray[np.int64]:
    """Return the whole tensor, converted the ordinary way."""
    if isinstance(expression, Stored):
        return arrays[expression.key]
    if isinstance(expression, Tiled):
        whole = np.full(expression.shape, -1, np.int64)
        for tile in expression.tiles:
            part = evaluate(tile.part, arrays)
            whole[tuple(slice(o, o + n) for o, n in zip(tile.offsets, part.shape, strict=True))] = part
        return whole
    return evaluate(expression.of, arrays).transpose(expression.axes)


@given(st.data())
def test_pieces_fill_the_local_tensor_once_with_the_right_elements(data: st.DataObject) -> None:
    arrays: Arrays = {}
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
    expression = data.draw(expressions(shape, arrays))
    region = data.draw(regions(shape))
    out = np.full(region.shape, -1, np.int64)
    for piece in pull_back(expression, region):
        place = tuple(slice(*interval) for interval in piece.target)
        assert (out[place] == -1).all(), "no element is filled twice"
        out[place] = gather(arrays[piece.source.key], piece.region).transpose(piece.axes)
    assert np.array_equal(out, gather(evaluate(expression, arrays), region))


def test_a_tensor_stored_in_boxes_is_read_from_those_it_needs() -> None:
    """Rows 3 and 4 of a tensor stored as rows 0-3 and 4-5 come from both boxes."""
    boxes = Tiled((6, 2), (Tile((0, 0), Stored("w", (4, 2))), Tile((4, 0), Stored("w", (2, 2), 1))))
    pieces = list(pull_back(boxes, Region((((3, 5),), ((0, 2),)))))
    assert [(p.source.part, p.region.dims[0], p.target[0]) for p in pieces] == [
        (0, ((3, 4),), (0, 1)),
        (1, ((0, 1),), (1, 2)),
    ]
    assert [leaf.part for leaf in leaves(boxes)] == [0, 1]


@pytest.mark.parametrize("axes", [(0,), (0, 0), (0, 2)])
def test_axes_that_are_no_permutation_are_refused(axes: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInputError, match="reorder"):
        transpose(Stored("w", (2, 3)), axes)


def test_parts_that_cannot_be_joined_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"\(2, 3\) and \(2, 4\)"):
        concatenate([Stored("a", (2, 3)), Stored("b", (2, 4))], 0)
    with pytest.raises(InvalidInputError, match="no dim 2"):
        concatenate([Stored("a", (2, 3))], 2)
    with pytest.raises(InvalidInputError, match="at least one"):
        concatenate([], 0)
