"""What a way of reading costs, and so which one to take.

Measured with warm and cold page cache on a local virtio disk (128 MiB regions, one thread): exact reads win when a
row's piece has at least 32 KiB, or when the hole to the next piece is so large that reading it would cost more than
another call; thinner pieces are read as whole rows and copied out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shardferry.plan.costmodel import PRESETS
from shardferry.units import KIB, MIB

if TYPE_CHECKING:
    from shardferry.geometry.spans import Collapsed

# Measured on a local disk, with warm and cold page cache. On a slower storage the hole alone decides.
EXACT_PIECE_BYTES = 32 * KIB
# Longer rows are not read whole: the scratch they need would have no bound.
MAX_ROW_BYTES = MIB

Access = Literal["spans", "rows"]


def choose_access(collapsed: Collapsed, seek_bytes: int) -> Access:
    """Return how to read a region: each span exactly, or whole rows of which the wanted columns are kept.

    Args:
        collapsed: The region, in bytes.
        seek_bytes: What one more request costs, in bytes; see `CostModel`.
    """
    if len(collapsed.sizes) == 1 or not all(collapsed.dims) or collapsed.sizes[-1] > MAX_ROW_BYTES:
        return "spans"
    columns = collapsed.dims[-1]
    piece = min(stop - start for start, stop in columns)
    held = sum(stop - start for start, stop in columns)
    gap = (collapsed.sizes[-1] - held) // len(columns)
    is_local = seek_bytes <= PRESETS["local"].seek_bytes
    return "spans" if gap > seek_bytes or (is_local and piece >= EXACT_PIECE_BYTES) else "rows"
