"""Carry out the writes of a save plan: bytes of local tensors into files that others write too.

Where a write's elements lie in memory as they will lie in the file they are written from there; else (a device, a
cast, a strided or split tensor) they are gathered in a reused staging buffer first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from shardferry.execute.load import outer_offsets
from shardferry.plan.save import Write, split_write
from shardferry.storage.base import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardferry.execute.meter import Buffers
    from shardferry.storage.base import Bytes
    from shardferry.storage.writing import Writable, WritableFiles


class Source(Protocol):
    """The memory of one local tensor, as a place that bytes are written from."""

    def direct(self, write: Write) -> Bytes | None:
        """Return the contiguous memory that holds exactly what is to be written, or None."""
        ...

    def fetch(self, write: Write, out: Bytes) -> None:
        """Gather what is to be written, in the dtype it is written in, into staging memory."""
        ...


class WriteSettings(NamedTuple):
    """How to write.

    Attributes:
        piece_bytes: What has to be staged is cut to this size.
        buffers: Where staging memory comes from.
        on_bytes: Called with the bytes just written and the calls made for them; may raise to stop.
    """

    piece_bytes: int
    buffers: Buffers
    on_bytes: Callable[[int, int], None]


def execute_writes(
    writes: Sequence[Write], sources: Mapping[str, Source], files: WritableFiles, settings: WriteSettings
) -> None:
    """Write everything a plan names; what is written still has to be synced.

    Args:
        writes: What to write, in file order.
        sources: The memory of every tensor, by the model's name.
        files: The files, which have been created.
        settings: Staging and callbacks.

    Raises:
        StorageError: If a write fails; names the file and the offset.
    """
    for write in writes:
        _write(files.get(write.file), write, sources[write.memory], settings)


def _write(file: Writable, write: Write, source: Source, settings: WriteSettings) -> None:
    data = source.direct(write)
    if data is not None:
        _put(file, write, data, settings)
        return
    for piece in split_write(write, settings.piece_bytes):
        staged = settings.buffers.get("piece", piece.num_bytes)
        source.fetch(piece, staged)
        _put(file, piece, staged, settings)


def _put(file: Writable, write: Write, data: Bytes, settings: WriteSettings) -> None:
    collapsed = write.collapsed
    if len(collapsed.sizes) == 1:
        done = 0
        for start, stop in collapsed.dims[0]:
            file.write(data[done : done + stop - start], write.start + start, settings.on_bytes)
            done += stop - start
        return
    row_bytes, columns = collapsed.sizes[-1], collapsed.dims[-1]
    table = data.reshape(-1, sum(stop - start for start, stop in columns))
    done = 0
    for offset in outer_offsets(collapsed, keep=2):
        for start, stop in collapsed.dims[-2]:
            rows = Rows(write.start + offset + start * row_bytes, row_bytes, columns)
            _put_rows(file, rows, table[done : done + stop - start], settings)
            done += stop - start


def _put_rows(file: Writable, rows: Rows, data: Bytes, settings: WriteSettings) -> None:
    """Write `data`, of shape (number of rows, bytes of the columns), into the columns of consecutive rows."""
    for row in range(len(data)):
        at = 0
        for start, stop in rows.columns:
            first = rows.start + row * rows.row_bytes + start
            file.write(data[row, at : at + stop - start], first, settings.on_bytes)
            at += stop - start
