"""Read shares of files for nothing but the pages the kernel keeps of them, and see what it keeps."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardferry.errors import StorageError
from shardferry.execute.report import Progress
from shardferry.execute.warm_report import Tally
from shardferry.storage.filesystem import MEMORY_FILESYSTEMS, filesystem_type
from shardferry.storage.pagecache import fetch, missing_spans, resident_bytes
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardferry.plan.warm import FileReads, Share
    from shardferry.storage.base import Bytes

# What a thread asks for at a time; it holds a buffer of so many bytes.
PIECE_BYTES = 4 * MIB
# With the pieces this bounds the buffers of a process to 32 MiB.
MAX_THREADS = 8


class Watch(NamedTuple):
    """Who is told while a process reads.

    Attributes:
        rank: Named in the progress.
        on_progress: Called after every piece; None for nobody.
        check: Called between pieces; may raise to stop.
    """

    rank: int
    on_progress: Callable[[Progress], None] | None
    check: Callable[[], None]


class _Piece(NamedTuple):
    descriptor: int
    path: Path
    start: int
    stop: int


def read_shares(root: str, shares: Sequence[Share], *, num_threads: int, watch: Watch) -> Tally:
    """Bring what the page cache lacks of the shares into it.

    Args:
        root: The folder that file names are relative to.
        shares: What this process reads.
        num_threads: Threads to read with; more than `MAX_THREADS` are not used.
        watch: Who is told.

    Raises:
        StorageError: If a read fails; names the file.
    """
    with ExitStack() as opened:
        pieces = [piece for share in shares for piece in _pieces(root, share, opened)]
        reader = _Reader(pieces, watch)
        if pieces:
            held = _held(pieces[0])
            if not _keeps_pages(pieces[0]):
                return Tally(0, 1, kept=False)
            reader.num_bytes, reader.requests = _held(pieces[0]) - held, 1
        num_threads = max(1, min(num_threads, MAX_THREADS, len(pieces)))
        with ThreadPoolExecutor(num_threads) as pool:
            for future in [pool.submit(reader.run) for _ in range(num_threads)]:
                future.result()
    return Tally(reader.num_bytes, reader.requests, kept=True)


def absent_bytes(root: str, files: Sequence[FileReads]) -> int | None:
    """Return how many of the planned bytes the page cache does not hold; None if the kernel does not tell."""
    absent = 0
    for file in files:
        with opened_file(root, file.file) as descriptor:
            resident = held_bytes(descriptor, file)
        if resident is None:
            return None
        absent += file.num_bytes - resident
    return absent


@contextmanager
def opened_file(root: str, file: str) -> Iterator[int]:
    """Give a descriptor of a file for reading.

    Raises:
        StorageError: If it cannot be opened; names it.
    """
    path = Path(root, file)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"cannot open '{path}': {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def held_bytes(descriptor: int, file: FileReads) -> int | None:
    """Return how many bytes of the spans are in memory already; None if the kernel does not tell."""
    if filesystem_type(descriptor) in MEMORY_FILESYSTEMS:
        return file.num_bytes
    total = 0
    for start, stop in file.spans.tolist():
        held = resident_bytes(descriptor, start, stop)
        if held is None:
            return None
        total += held
    return total


def _pieces(root: str, share: Share, opened: ExitStack) -> Iterator[_Piece]:
    descriptor = opened.enter_context(opened_file(root, share.file))
    if filesystem_type(descriptor) in MEMORY_FILESYSTEMS:
        return
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # what lies behind a span is another node's
    for first, last in share.spans.tolist():
        for start, stop in missing_spans(descriptor, first, last, step_bytes=PIECE_BYTES):
            yield _Piece(descriptor, Path(root, share.file), start, stop)


def _held(piece: _Piece) -> int:
    return resident_bytes(piece.descriptor, piece.start, piece.stop) or 0


def _keeps_pages(piece: _Piece) -> bool:
    """Return whether what is read stays in the page cache, also when the file is opened again.

    FUSE has mounts on which it does not: `direct_io`, and those that drop the pages of a file at every open.
    """
    _fetch(piece._replace(stop=piece.start + 1), np.empty(1, np.uint8), ahead=False)
    with opened_file(str(piece.path.parent), piece.path.name) as descriptor:
        return resident_bytes(descriptor, piece.start, piece.start + 1) != 0


class _Reader:
    """Pieces that several threads fetch, each the next one that nobody has."""

    def __init__(self, pieces: Sequence[_Piece], watch: Watch) -> None:
        self.num_bytes = 0
        self.requests = 0
        self._total = sum(piece.stop - piece.start for piece in pieces)
        self._done = 0
        self._next = iter(pieces)
        self._watch = watch
        self._lock = threading.Lock()

    def run(self) -> None:
        """Fetch pieces until none is left, or one has failed."""
        scratch = np.empty(PIECE_BYTES, np.uint8)
        try:
            while (piece := self._take()) is not None:
                self._watch.check()
                self._note(piece, _held(piece), _fetch(piece, scratch))
        except BaseException:
            self._stop()
            raise

    def _take(self) -> _Piece | None:
        with self._lock:
            return next(self._next, None)

    def _note(self, piece: _Piece, held: int, requests: int) -> None:
        with self._lock:
            size = piece.stop - piece.start
            self.num_bytes += size - held
            self.requests += requests
            self._done += size
            if self._watch.on_progress is not None:
                self._watch.on_progress(Progress(self._watch.rank, self._done, self._total))

    def _stop(self) -> None:
        with self._lock:
            self._next = iter(())


def _fetch(piece: _Piece, scratch: Bytes, *, ahead: bool = True) -> int:
    try:
        return fetch(piece.descriptor, piece.start, piece.stop, scratch, ahead=ahead)
    except OSError as error:  # ours, for a file that has become shorter, is one too
        where = f"reading '{piece.path}' from offset {piece.start} to {piece.stop} failed"
        raise StorageError(f"{where}: {error.strerror or error}") from error
