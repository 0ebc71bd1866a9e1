"""Files in memory as a place to read from: the smallest store there is."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from shardferry.errors import StorageError
from shardferry.storage.rows import copy_columns, rows_extent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardferry.storage.base import Bytes, OnRead, Place, Rows


class MemoryStore:
    """Bytes by name."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        """Read from `contents`."""
        self._contents = contents

    @contextmanager
    def open(self, name: str) -> Iterator[MemoryFile]:
        """Give a file for reading.

        Raises:
            StorageError: If there is none of this name.
        """
        if name not in self._contents:
            raise StorageError(f"cannot open memory/{name}: there is no such file")
        yield MemoryFile(name, self._contents[name])


class MemoryFile:
    """One file."""

    def __init__(self, name: str, content: bytes) -> None:
        """Read from `content`."""
        self._name = name
        self._content = np.frombuffer(content, np.uint8)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self._content)

    def read_into(self, out: Bytes, start: int, on_read: OnRead) -> None:
        """Fill `out` with the bytes from offset `start` on.

        Raises:
            StorageError: If the file ends before.
        """
        found = self._content[start : start + len(out)]
        if len(found) < len(out):
            end = start + len(found)
            raise StorageError(
                f"reading memory/{self._name} at offset {end} failed: the file ends at {self.size} bytes"
            )
        out[:] = found
        on_read(len(out), 1)

    def read_scattered(self, places: Sequence[Place], on_read: OnRead) -> None:
        """Fill several memories.

        Raises:
            StorageError: As `read_into`.
        """
        for place in places:
            self.read_into(place.memory, place.start, on_read)

    def read_rows(self, out: Bytes, rows: Rows, on_read: OnRead) -> None:
        """Fill `out` with the wanted columns of consecutive rows.

        Raises:
            StorageError: As `read_into`.
        """
        start, stop = rows_extent(rows, len(out))
        block = np.empty(stop - start, np.uint8)
        self.read_into(block, start, on_read)
        copy_columns(out, block, rows)
