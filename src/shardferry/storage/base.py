"""What moving bytes needs from a place that stores files.

A reader fills memory the caller owns. Every read is exact: it fills what was asked for, or raises `StorageError`
naming the file and the offset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

    from shardferry.geometry.region import Intervals

    Bytes = NDArray[np.uint8]

# Called with the bytes just fetched and the requests made for them; may raise to stop the read.
OnRead = Callable[[int, int], None]


class Rows(NamedTuple):
    """A table of rows in a file, of which some columns are wanted.

    Attributes:
        start: Offset in the file of the first row.
        row_bytes: Bytes from one row to the next.
        columns: Half-open byte ranges wanted of each row, ascending.
    """

    start: int
    row_bytes: int
    columns: Intervals


class Place(NamedTuple):
    """Bytes of a file and the memory they go to.

    Attributes:
        start: Offset in the file.
        memory: One-dimensional and contiguous; filled with the bytes from `start` on.
    """

    start: int
    memory: Bytes


class ReadableFile(Protocol):
    """One open file."""

    @property
    def size(self) -> int:
        """Bytes in the file when it was opened."""
        ...

    def read_into(self, out: Bytes, start: int, on_read: OnRead) -> None:
        """Fill the one-dimensional, contiguous `out` with the bytes from offset `start` on."""
        ...

    def read_scattered(self, places: Sequence[Place], on_read: OnRead) -> None:
        """Fill several memories by one read from the first to the last, in which the holes between them are dropped.

        Args:
            places: Ascending in the file, without overlap; none is empty.
            on_read: Called with bytes fetched, holes included.
        """
        ...

    def read_rows(self, out: Bytes, rows: Rows, on_read: OnRead) -> None:
        """Fill `out`, of shape (number of rows, bytes of the columns), with the columns of consecutive rows."""
        ...


class Store(Protocol):
    """A place that stores files."""

    def open(self, name: str) -> AbstractContextManager[ReadableFile]:
        """Open the file of this name for reading; the context closes it."""
        ...
