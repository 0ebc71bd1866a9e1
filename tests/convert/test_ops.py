"""Operations check shapes when they are put together, and undo each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.convert.oracle import evaluate, fill

from shardferry.convert.ops import (
    Expression,
    Stored,
    Tile,
    Tiled,
    chunk,
    concatenate,
    deinterleave,
    index,
    interleave,
    leaves,
    narrow,
    pad,
    reshape,
    rope,
    split,
    stack,
    swap,
    transpose,
    unrope,
)
from shardferry.convert.pull import pull_back
from shardferry.errors import InvalidInputError
from shardferry.geometry.region import Region, whole

if TYPE_CHECKING:
    from collections.abc import Callable

W = Stored("w", (24, 3))
IDS = np.arange(72).reshape(24, 3)


def result(expression: Expression) -> list[int]:
    """Return the first column of a tensor made of `W`."""
    values = evaluate(expression, {"w": IDS})
    out = np.full(expression.shape, -1, np.int64)
    for piece in pull_back(expression, whole(expression.shape)):
        fill(out, piece, {"w": IDS})
    assert np.array_equal(out, values)
    return [int(row) // 3 for row in values.reshape(-1, 3)[:, 0]]


def test_interleave_puts_even_rows_before_odd_ones() -> None:
    assert result(interleave(W, 0)) == [*range(0, 24, 2), *range(1, 24, 2)]


def test_rope_takes_pairs_apart_inside_every_head() -> None:
    """Row h*D + t*D/2 + p comes from row h*D + 2p + t."""
    expected = [h * 8 + 2 * p + t for h in range(3) for t in range(2) for p in range(4)]
    assert result(rope(W, 3)) == expected


def test_chunks_are_those_of_torch() -> None:
    assert [part.shape[0] for part in chunk(Stored("w", (7, 2)), 0, 3)] == [3, 3, 1]
    assert [part.shape[0] for part in chunk(Stored("w", (4, 2)), 0, 3)] == [2, 2, 0]


@pytest.mark.parametrize(
    ("there", "back"),
    [
        (lambda of: interleave(of, 0), lambda of: deinterleave(of, 0)),
        (lambda of: rope(of, 2), lambda of: unrope(of, 2)),
        (lambda of: swap(of, 0, -1), lambda of: swap(of, 0, -1)),
        (lambda of: reshape(of, (4, -1)), lambda of: reshape(of, (24, 3))),
        (lambda of: pad(of, 0, 30), lambda of: narrow(of, 0, 0, 24)),
        (lambda of: stack([of, of], 1), lambda of: index(of, 1, 1)),
        (lambda of: concatenate(split(of, 0, (4, 20)), -2), lambda of: of),
        (lambda of: concatenate(chunk(of, 1, 3), 1), lambda of: of),
    ],
)
def test_an_operation_and_its_inverse_change_nothing(
    there: Callable[[Expression], Expression], back: Callable[[Expression], Expression]
) -> None:
    assert back(there(W)).shape == W.shape
    assert result(back(there(W))) == list(range(24))


def test_whole_heads_are_read_and_placed_in_one_piece() -> None:
    """Pairs are taken apart in memory: reading every other row would read the file twice."""
    (piece,) = pull_back(rope(W, 3), whole(W.shape))
    assert piece.region == whole((3, 4, 2, 3))


def test_a_flattened_tensor_is_one_plain_copy() -> None:
    (piece,) = pull_back(reshape(Stored("w", (4, 3, 2, 2, 2)), (4, 24)), whole((4, 24)))
    assert (piece.source.shape, piece.axes, piece.fine) == ((4, 24), (0, 1), ())


def test_an_index_of_a_stack_is_a_run_of_its_rows() -> None:
    (piece,) = pull_back(index(Stored("w", (4, 6, 5)), 0, 2), whole((6, 5)))
    assert (piece.source.shape, piece.region.dims, piece.axes, piece.fine) == (
        (24, 5),
        (((12, 18),), ((0, 5),)),
        (0, 1),
        (),
    )


def test_a_tensor_stored_in_boxes_is_read_from_those_it_needs() -> None:
    """Rows 3 and 4 of a tensor stored as rows 0-3 and 4-5 come from both boxes."""
    boxes = Tiled((6, 2), (Tile((0, 0), Stored("w", (4, 2))), Tile((4, 0), Stored("w", (2, 2), 1))))
    pieces = list(pull_back(boxes, Region((((3, 5),), ((0, 2),)))))
    assert [(p.source.part, p.region.dims[0], p.target[0]) for p in pieces if isinstance(p.source, Stored)] == [
        (0, ((3, 4),), (0, 1)),
        (1, ((0, 1),), (1, 2)),
    ]
    assert [leaf.part for leaf in leaves(boxes)] == [0, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: transpose(W, (0,)), "reorder"),
        (lambda: transpose(W, (0, 0)), "reorder"),
        (lambda: concatenate([Stored("a", (2, 3)), Stored("b", (2, 4))], 0), r"\(2, 3\) and \(2, 4\)"),
        (lambda: concatenate([W], 2), "no dim 2"),
        (lambda: concatenate([], 0), "at least one"),
        (lambda: stack([W, Stored("a", (2, 3))], 0), r"\(24, 3\) and \(2, 3\)"),
        (lambda: reshape(W, (5, -1)), "72 elements"),
        (lambda: reshape(W, (24,)), "72 elements"),
        (lambda: split(W, 0, (20, 5)), r"sizes \[20, 5\]"),
        (lambda: narrow(W, 1, 2, 4), "no indices 2 to 4"),
        (lambda: interleave(W, 1), "3 is not divisible by 2"),
        (lambda: rope(W, 5), "5 heads"),
        (lambda: pad(W, 0, 20), "padded to 20"),
        (lambda: chunk(Stored("s", ()), 0, 2), r"shape \(\) has no dim 0"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(make: Callable[[], Expression], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make()
