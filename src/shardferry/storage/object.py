"""Files of an object store or a web server, read by concurrent requests for ranges.

Every range is checked whole: an answer that breaks off is asked for again from where it ended. What identifies an
object (its size and, where the server tells, its ETag) is pinned when the checkpoint is opened, asked for with every
request and compared with every answer, so that a change while loading is an error and never a mix. Bytes arrive in
chunks and are copied to where they belong at once: a request in flight holds one chunk, however long it is.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from shardferry.errors import CheckpointChangedError, CheckpointNotFoundError, StorageError
from shardferry.format.header import FIRST_READ_BYTES
from shardferry.storage.base import Place
from shardferry.storage.client import AccessDeniedError, Trouble, check_process, failures
from shardferry.storage.rows import copy_columns, rows_extent
from shardferry.storage.source import Pin, WebSource
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardferry.format.index import FileInfo
    from shardferry.storage.base import Bytes, OnRead, Rows
    from shardferry.storage.client import Patience
    from shardferry.storage.source import Answer, Source

# Whole rows are read in blocks of this size; a guess at what makes a request worth its latency.
BLOCK_BYTES = 4 * MIB
# Headers under way at once; a guess between what a store takes and what a process of one core handles.
HEADER_REQUESTS = 32


class ObjectFiles:
    """The files of a folder of objects, for their headers; a file's size and first bytes come with one request."""

    def __init__(self, source: Source, patience: Patience) -> None:
        """Read from `source`."""
        self._source = source
        self._patience = patience
        self._pins: dict[str, Pin] = {}
        self._firsts: dict[str, bytes] = {}

    @property
    def root(self) -> str:
        """The folder's URL, without secrets."""
        return self._source.root

    @property
    def concurrency(self) -> int:
        """Files worth asking for at the same time."""
        return HEADER_REQUESTS

    def names(self) -> tuple[str, ...]:
        """Return what lies directly in the folder; on a web server those of the usual names that are there.

        Raises:
            CheckpointNotFoundError: If there is nothing.
            StorageError: If the store does not answer or denies access.
        """
        if isinstance(self._source, WebSource):
            return self._tried(self._source.likely)
        trouble = Trouble(self.root, self._patience)
        while True:
            try:
                names = self._source.names()
            except failures() as error:
                trouble.wait(error, _go_on)
            else:
                if not names:
                    raise CheckpointNotFoundError(f"{self.root} holds no object: no checkpoint is there")
                return names

    def size(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            CheckpointNotFoundError: If it is not there.
            StorageError: If the store does not answer or denies access.
        """
        return self._pin(name).size

    def version(self, name: str) -> str:
        """Return the ETag under which the file is read; empty if the server gives none."""
        return self._pin(name).version

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return exactly the bytes [start, stop) of a file.

        Raises:
            CheckpointChangedError: If the file is not the one that was looked at first.
            StorageError: If reading fails.
        """
        pin = self._pin(name)
        first = self._firsts.pop(name, b"")  # kept for one read: there may be hundreds of files
        if stop <= len(first):
            return first[start:stop]
        out = np.empty(stop - start, np.uint8)
        ObjectFile(self._source, name, pin, self._patience).read_into(out, start, _ignore)
        return out.tobytes()

    def _tried(self, likely: Sequence[str]) -> tuple[str, ...]:
        with ThreadPoolExecutor(len(likely)) as pool:
            missing = tuple(pool.map(self._missing, likely))
        found = tuple(name for name, error in zip(likely, missing, strict=True) if error is None)
        denied = next((error for error in missing if isinstance(error, AccessDeniedError)), None)
        if not found and denied is not None:
            raise denied
        if not found:
            raise CheckpointNotFoundError(
                f"{self.root}: a web server does not list its files, and none of {', '.join(likely)} is there. Name "
                "the safetensors file or the index"
            )
        return found

    def _missing(self, name: str) -> CheckpointNotFoundError | AccessDeniedError | None:
        """Return why a file is not there: a bucket may say of what is not there that it may not be seen."""
        try:
            self.size(name)
        except (CheckpointNotFoundError, AccessDeniedError) as error:
            return error
        return None

    def _pin(self, name: str) -> Pin:
        check_process(self.root)
        pin = self._pins.get(name)
        if pin is None:
            pin, self._firsts[name] = self._look(name)
            self._pins[name] = pin
        return pin

    def _look(self, name: str) -> tuple[Pin, bytes]:
        """Return what an object is, and its first bytes: most headers are whole in them."""
        where = f"{self.root}/{name}"
        trouble = Trouble(where, self._patience)
        while True:
            try:
                answer = self._source.ask(name, 0, FIRST_READ_BYTES, "")
                first = b"".join(chunk.tobytes() for chunk in answer.chunks)
            except failures() as error:
                trouble.wait(error, _go_on)
                continue
            if len(first) == min(answer.pin.size, FIRST_READ_BYTES):
                return answer.pin, first
            trouble.wait(_short(len(first), min(answer.pin.size, FIRST_READ_BYTES)), _go_on)


class ObjectStore:
    """The objects of a folder as a job has agreed to read them; opening one asks for nothing."""

    def __init__(self, source: Source, files: Mapping[str, FileInfo], patience: Patience) -> None:
        """Read from `source` the objects that `files` describes."""
        self._source = source
        self._files = files
        self._patience = patience

    @contextmanager
    def open(self, name: str) -> Iterator[ObjectFile]:
        """Give an object for reading."""
        check_process(self._source.root)
        info = self._files[name]
        yield ObjectFile(self._source, name, Pin(info.size, info.version), self._patience)


class ObjectFile:
    """One object; may be used by several threads at once."""

    def __init__(self, source: Source, name: str, pin: Pin, patience: Patience) -> None:
        """Read `name` as long as it is what `pin` says."""
        self._source = source
        self._name = name
        self._pin = pin
        self._patience = patience

    @property
    def size(self) -> int:
        """Bytes of the object."""
        return self._pin.size

    def read_into(self, out: Bytes, start: int, on_read: OnRead) -> None:
        """Fill `out` with the bytes from offset `start` on.

        Args:
            out: Contiguous, one-dimensional, uint8.
            start: Offset in the object, in bytes.
            on_read: Called for every request and every chunk.

        Raises:
            CheckpointChangedError: If the object has changed or is gone.
            StorageError: If the store does not answer or denies access.
        """
        self.read_scattered([Place(start, out)], on_read)

    def read_scattered(self, places: Sequence[Place], on_read: OnRead) -> None:
        """Fill several memories by one request from the first to the last; the holes between them are dropped.

        Raises:
            CheckpointChangedError: As in `read_into`.
            StorageError: As in `read_into`.
        """
        try:
            self._fetch(places, on_read)
        except CheckpointNotFoundError as error:
            raise CheckpointChangedError(f"{error}; it was there when the checkpoint was opened") from error

    def read_rows(self, out: Bytes, rows: Rows, on_read: OnRead) -> None:
        """Fill `out` with the wanted columns of consecutive rows, read in blocks of whole rows.

        Args:
            out: Shape (number of rows, bytes of the columns), uint8.
            rows: Where the rows lie.
            on_read: Called for every request and every chunk.

        Raises:
            CheckpointChangedError: As in `read_into`.
            StorageError: As in `read_into`.
        """
        step = max(1, BLOCK_BYTES // rows.row_bytes)
        scratch = np.empty(min(step, len(out)) * rows.row_bytes, np.uint8)
        for first in range(0, len(out), step):
            part = out[first : first + step]
            here = rows._replace(start=rows.start + first * rows.row_bytes)
            start, stop = rows_extent(here, len(part))
            block = scratch[: stop - start]
            self.read_into(block, start, on_read)
            copy_columns(part, block, here)

    def _fetch(self, places: Sequence[Place], on_read: OnRead) -> None:
        """Fill places, asking again for what does not arrive."""
        where = f"{self._source.root}/{self._name}"
        trouble = Trouble(where, self._patience)
        scatter = _Scatter(places)
        position, stop = places[0].start, places[-1].start + len(places[-1].memory)
        if stop > self._pin.size:
            raise StorageError(f"{where} has {self._pin.size} bytes: it cannot be read up to byte {stop}")
        while position < stop:
            on_read(0, 1)
            try:
                answer = self._source.ask(self._name, position, stop, self._pin.version)
            except failures() as error:
                trouble.wait(error, lambda: on_read(0, 0))
                continue
            _check_pin(answer, self._pin, position, where)
            while position < stop:
                try:
                    chunk = next(answer.chunks, None)
                except failures() as error:
                    trouble.wait(error, lambda: on_read(0, 0))
                    break
                if chunk is None:
                    trouble.wait(_short(position, stop), lambda: on_read(0, 0))
                    break
                chunk = chunk[: stop - position]
                scatter.take(chunk)
                position += len(chunk)
                on_read(len(chunk), 0)
                trouble.clear()  # after the callback: what time that takes is not the store's


def _check_pin(answer: Answer, pin: Pin, start: int, where: str) -> None:
    version = answer.pin.version
    if answer.pin.size != pin.size or (version and pin.version and version != pin.version):
        raise CheckpointChangedError(
            f"{where} has changed since it was opened: it had {pin.size} bytes and ETag {pin.version or '(none)'}, now "
            f"{answer.pin.size} and {version or '(none)'}. Load again, when nothing writes to it"
        )
    if answer.start != start:
        raise StorageError(f"{where}: the server sent bytes from {answer.start} on, those from {start} were asked for")


class _Scatter:
    """Copies bytes that arrive in order to the places they belong, and drops those between."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._position = places[0].start
        self._places = iter(places)
        self._place = next(self._places)

    def take(self, chunk: Bytes) -> None:
        """Take the next bytes of the object."""
        while len(chunk):
            start, memory = self._place
            if self._position < start:
                skipped = min(len(chunk), start - self._position)
            else:
                at = self._position - start
                skipped = min(len(chunk), len(memory) - at)
                memory[at : at + skipped] = chunk[:skipped]
            self._position += skipped
            chunk = chunk[skipped:]
            if self._position == start + len(memory):
                following = next(self._places, None)
                if following is None:
                    return
                self._place = following


def _short(position: int, stop: int) -> Exception:
    return ConnectionError(f"the answer broke off at byte {position} of {stop}")


def _go_on() -> None:
    pass


def _ignore(num_bytes: int, num_requests: int) -> None:
    pass
