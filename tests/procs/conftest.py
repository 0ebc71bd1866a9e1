"""The `ranks` fixture: real processes with a fresh gloo group per run. See pool.py for how to use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .pool import RankPool

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes kept for the whole session; `ranks(4).run(function)` runs a function on four of them."""
    pool = RankPool()
    yield pool
    pool.close()
