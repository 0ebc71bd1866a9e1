"""Pause Python's cyclic garbage collector while many objects are made that stay.

Reading the headers of a large checkpoint, and planning it, makes some 100,000 small objects, none of them garbage.
The collector looks at them again and again, and at everything else the process holds: a fifth of the time, measured.
"""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# The collector is one for all threads: to ask whether it runs and to stop it must be one step.
_lock = threading.Lock()


@contextmanager
def paused_collector() -> Iterator[None]:
    """Stop the collector in a block or, as a decorator, in a function; a collector that was off stays off.

    For code that computes without waiting, as it stops for all threads. Where blocks of several threads overlap, the
    collector runs again when the first one to have stopped it ends.
    """
    was_enabled = False
    try:
        with _lock:
            was_enabled = gc.isenabled()
            gc.disable()
        yield
    finally:
        if was_enabled:
            with _lock:
                gc.enable()
