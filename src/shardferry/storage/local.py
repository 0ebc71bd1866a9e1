"""Files of a directory on this machine, read with `preadv` into memory the caller owns."""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from shardferry.errors import StorageError
from shardferry.storage.filesystem import LOCAL_FILESYSTEMS, MEMORY_FILESYSTEMS, filesystem_type
from shardferry.storage.mapping import GuardedMapping
from shardferry.storage.pagecache import resident_bytes
from shardferry.storage.placement import place_bytes
from shardferry.storage.rows import copy_columns, rows_extent
from shardferry.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence
    from contextlib import AbstractContextManager

    from shardferry.storage.base import Bytes, OnRead, Place, Rows

# Bytes per preadv: 1, 4 and 16 MiB are equally fast (measured), and a stop is noticed after each.
CALL_BYTES = 4 * MIB
# Whole rows are read in blocks of this size, which stay in the processor's cache until they are copied out.
BLOCK_BYTES = MIB
# Memories per preadv: what Linux allows (IOV_MAX).
MAX_VIEWS = 1024
# Bytes that nobody wants are dropped here; small enough to stay in the processor's cache.
SINK_BYTES = 64 * KIB
# Rows copied out of a mapping between two looks at its lease.
WINDOW_BYTES = 16 * MIB


class LocalStore:
    """The files below one directory."""

    def __init__(self, root: str | os.PathLike[str], wanted_whole: Container[str] = ()) -> None:
        """Read files relative to `root`.

        Args:
            root: The directory.
            wanted_whole: Names of files of which this machine's ranks together want every byte.
        """
        self._root = Path(root)
        self._wanted_whole = wanted_whole
        self._filesystems: dict[int, str] = {}

    @contextmanager
    def open(self, name: str) -> Iterator[LocalFile]:
        """Open a file for reading; closed when the context ends.

        Raises:
            StorageError: If it cannot be opened; names the file.
        """
        path = self._root / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            message = f"cannot open '{path}': {error.strerror}"
            raise StorageError(message) from error
        file = LocalFile(descriptor, str(path), self._mapping(descriptor, name))
        try:
            yield file
        finally:
            file.close()

    def _mapping(self, descriptor: int, name: str) -> GuardedMapping | None:
        """Return a mapping of an open file if it lies on this machine."""
        status = os.fstat(descriptor)
        if status.st_dev not in self._filesystems:
            self._filesystems[status.st_dev] = filesystem_type(descriptor)
        filesystem = self._filesystems[status.st_dev]
        if filesystem not in LOCAL_FILESYSTEMS:
            return None
        # No read-ahead: every byte wanted is asked for, and what lies behind a piece is another node's. A half of
        # each tensor of 2 GB, cold: 1.67 times the bytes and 2.4 times the seconds with the kernel's read-ahead.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        whole = name in self._wanted_whole and filesystem not in MEMORY_FILESYSTEMS
        return GuardedMapping(descriptor, status.st_size, wanted_whole=whole)


class LocalFile:
    """One open file; may be used by several threads at once."""

    def __init__(self, descriptor: int, path: str, mapping: GuardedMapping | None = None) -> None:
        """Take over an open descriptor, and a mapping of it; `path` is what errors name."""
        self._descriptor = descriptor
        self._path = path
        self._size = os.fstat(descriptor).st_size
        self._mapping = mapping

    @property
    def size(self) -> int:
        """Bytes in the file when it was opened."""
        return self._size

    def read_into(self, out: Bytes, start: int, on_read: OnRead) -> None:
        """Fill `out` with the bytes from offset `start` on.

        Args:
            out: Contiguous, one-dimensional, uint8.
            start: Offset in the file, in bytes.
            on_read: Called after every call to the kernel.

        Raises:
            StorageError: If the kernel reports an error or the file ends early.
        """
        view = out.data
        done = 0
        while done < len(view):
            done += self._call([view[done : done + CALL_BYTES]], start + done, start + len(view), on_read)

    def read_scattered(self, places: Sequence[Place], on_read: OnRead) -> None:
        """Fill several memories by one read from the first to the last; what lies between them goes to a sink.

        Raises:
            StorageError: As in `read_into`.
        """
        views = _views(places)
        position, stop = places[0].start, places[-1].start + len(places[-1].memory)
        at = 0
        while at < len(views):
            count = self._call(_next_call(views, at), position, stop, on_read)
            position += count
            while at < len(views) and count >= len(views[at]):
                count -= len(views[at])
                at += 1
            if count:
                views[at] = views[at][count:]

    def read_rows(self, out: Bytes, rows: Rows, on_read: OnRead) -> None:
        """Fill `out` with the wanted columns of consecutive rows.

        They are copied out of a guarded mapping where there can be one, else read in blocks of whole rows.

        Args:
            out: Shape (number of rows, bytes of the columns), uint8.
            rows: Where the rows lie.
            on_read: Called after every block with the bytes fetched.

        Raises:
            StorageError: As in `read_into`.
        """
        step = max(1, WINDOW_BYTES // rows.row_bytes)
        scratch: Bytes | None = None
        for first in range(0, len(out), step):
            part = out[first : first + step]
            start = rows.start + first * rows.row_bytes
            here = rows._replace(start=start)
            with self._window(*rows_extent(here, len(part))) as window:
                if window is not None:
                    copy_columns(part, window, here)
            if window is not None:
                on_read(part.size, 0)
                continue
            if scratch is None:
                scratch = place_bytes(max(BLOCK_BYTES, rows.row_bytes), here.start)
            self._read_blocks(part, here, scratch, on_read)

    def close(self) -> None:
        """Close the file."""
        if self._mapping is not None:
            self._mapping.close()
        os.close(self._descriptor)

    def _window(self, start: int, stop: int) -> AbstractContextManager[Bytes | None]:
        return self._mapping.window(start, stop) if self._mapping is not None else nullcontext()

    def _read_blocks(self, out: Bytes, rows: Rows, scratch: Bytes, on_read: OnRead) -> None:
        step = max(1, len(scratch) // rows.row_bytes)
        for first in range(0, len(out), step):
            part = out[first : first + step]
            here = rows._replace(start=rows.start + first * rows.row_bytes)
            start, stop = rows_extent(here, len(part))
            block = scratch[: stop - start]
            self.read_into(block, start, on_read)
            copy_columns(part, block, here)

    def _call(self, views: list[memoryview], start: int, stop: int, on_read: OnRead) -> int:
        """Fill `views` from offset `start` on, perhaps not to the end; return how many bytes came."""
        try:
            self._fetch(start, min(self._size, start + sum(map(len, views))))
            count = os.preadv(self._descriptor, views, start)
        except OSError as error:
            raise StorageError(self._failure(start, str(error.strerror))) from error
        if count == 0:
            raise StorageError(self._failure(start, self._early_end(stop)))
        on_read(count, 1)
        return count

    def _fetch(self, start: int, stop: int) -> None:
        """Bring bytes [start, stop) into the page cache, unless they are there, or nobody can tell whether they are."""
        # Not asked with RWF_NOWAIT, which begins to read by pages what it does not find.
        mapping = self._mapping
        if mapping is None or not mapping.fetches:
            return
        try:
            held = resident_bytes(self._descriptor, start, stop)
        except (OSError, ValueError):  # the read that follows tells what is wrong, if it matters to it
            held = None
        if held is not None and held < stop - start:
            mapping.fetch(start, stop)

    def _failure(self, offset: int, cause: str) -> str:
        return f"reading '{self._path}' at offset {offset} failed: {cause}"

    def _early_end(self, wanted: int) -> str:
        size = os.fstat(self._descriptor).st_size
        return (
            f"the file ends at {size} bytes, but bytes up to {wanted} were expected; it had {self._size} when it was "
            "opened. Something changes the checkpoint while it is loaded"
        )


def _views(places: Sequence[Place]) -> list[memoryview]:
    """Return the memories of neighbouring places, with pieces of a sink where something lies between them."""
    starts = [place.start for place in places[1:]]
    holes = [start - place.start - len(place.memory) for place, start in zip(places, starts, strict=False)]
    sink = memoryview(bytearray(min(SINK_BYTES, max(holes, default=0))))
    views = []
    for place, hole in zip(places, (*holes, 0), strict=True):
        views.append(place.memory.data)
        views += [sink[: hole - done] for done in range(0, hole, SINK_BYTES)]
    return views


def _next_call(views: Sequence[memoryview], at: int) -> list[memoryview]:
    """Return what one call fills, from view `at` on."""
    room = CALL_BYTES
    taken = []
    for view in islice(views, at, at + MAX_VIEWS):
        taken.append(view[:room])
        room -= len(taken[-1])
        if not room:
            break
    return taken
