"""Tables of rows in a file, of which some columns are wanted, once whole rows are in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shardferry.storage.base import Bytes, Rows


def rows_extent(rows: Rows, num_rows: int) -> tuple[int, int]:
    """Return the half-open range of file bytes from the first wanted column to the last."""
    low, high = rows.columns[0][0], rows.columns[-1][1]
    return rows.start + low, rows.start + (num_rows - 1) * rows.row_bytes + high


def copy_columns(out: Bytes, source: Bytes, rows: Rows) -> None:
    """Copy the wanted columns of the rows that begin at the first wanted byte in `source`."""
    at = 0
    for start, stop in rows.columns:
        width, skip = stop - start, start - rows.columns[0][0]
        table = np.ndarray((len(out), width), np.uint8, source, skip, (rows.row_bytes, 1))
        np.copyto(out[:, at : at + width], table)
        at += width
