"""Thin rows are read whole, everything else exactly."""

from __future__ import annotations

import pytest

from shardferry.geometry.region import Region, box
from shardferry.geometry.spans import collapse
from shardferry.plan.cost import choose_access
from shardferry.plan.costmodel import PRESETS
from shardferry.units import KIB, MIB


@pytest.mark.parametrize(
    ("row_bytes", "piece_bytes", "storage", "access"),
    [
        (4 * KIB, KIB, "local", "rows"),
        (128 * KIB, 32 * KIB, "local", "spans"),
        (128 * KIB, 31 * KIB, "local", "rows"),
        (160 * KIB, 16 * KIB, "local", "spans"),
        (2 * MIB, 2 * MIB, "local", "spans"),
        (160 * KIB, 16 * KIB, "network_mount", "rows"),
        (128 * KIB, 32 * KIB, "network_mount", "rows"),
    ],
)
def test_the_piece_and_the_hole_decide(row_bytes: int, piece_bytes: int, storage: str, access: str) -> None:
    collapsed = collapse(box((0, 0), (8, piece_bytes)), (8, row_bytes), 8)
    assert choose_access(collapsed, PRESETS[storage].seek_bytes) == access


def test_rows_too_long_for_a_scratch_are_read_exactly() -> None:
    """Many thin pieces of a long row."""
    columns = tuple((start, start + KIB) for start in range(0, 2 * MIB, 2 * KIB))
    assert choose_access(collapse(Region((((0, 2),), columns)), (2, 2 * MIB), 8), MIB) == "spans"


def test_nothing_to_read_needs_no_rows() -> None:
    assert choose_access(collapse(box((0, 0), (0, 4)), (8, 8), 8), MIB) == "spans"
