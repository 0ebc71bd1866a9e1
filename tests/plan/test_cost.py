"""Thin rows are read whole, everything else exactly."""

from __future__ import annotations

import pytest

from shardferry.geometry.region import Region, box
from shardferry.geometry.spans import collapse
from shardferry.plan.cost import choose_access
from shardferry.units import KIB, MIB


@pytest.mark.parametrize(
    ("row_bytes", "piece_bytes", "access"),
    [
        (4 * KIB, KIB, "rows"),
        (128 * KIB, 32 * KIB, "spans"),
        (128 * KIB, 31 * KIB, "rows"),
        (160 * KIB, 16 * KIB, "spans"),
        (2 * MIB, 2 * MIB, "spans"),
    ],
)
def test_the_piece_and_the_hole_decide(row_bytes: int, piece_bytes: int, access: str) -> None:
    assert choose_access(collapse(box((0, 0), (8, piece_bytes)), (8, row_bytes), 8)) == access


def test_rows_too_long_for_a_scratch_are_read_exactly() -> None:
    """Many thin pieces of a long row."""
    columns = tuple((start, start + KIB) for start in range(0, 2 * MIB, 2 * KIB))
    assert choose_access(collapse(Region((((0, 2),), columns)), (2, 2 * MIB), 8)) == "spans"


def test_nothing_to_read_needs_no_rows() -> None:
    assert choose_access(collapse(box((0, 0), (0, 4)), (8, 8), 8)) == "spans"
