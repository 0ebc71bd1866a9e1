"""Where a checkpoint's index is read from: a folder of the local file system, or memory.

Both are `shardferry.format.files.Files`. Only whole small ranges are read here, headers and index files; tensors' bytes
take other ways.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardferry.errors import CheckpointChangedError, CheckpointError, CheckpointNotFoundError, StorageError
from shardferry.format.problem import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

# Headers under way at once: hides the latency of network file systems; bounds memory to so many headers of 100 MB.
HEADER_READS = 8


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """Files below a folder of the local file system; links are followed.

    Attributes:
        root: Path of the folder.
    """

    root: str

    @property
    def concurrency(self) -> int:
        """Files worth reading at the same time."""
        return HEADER_READS

    def version(self, name: str) -> str:  # noqa: ARG002 - no file has one
        """Return the empty string: sizes and headers tell local files apart."""
        return ""

    def names(self) -> tuple[str, ...]:
        """Return the entries of the folder, sorted.

        Raises:
            CheckpointNotFoundError: If there is no such folder.
            StorageError: If it cannot be listed.
        """
        try:
            return tuple(sorted(entry.name for entry in Path(self.root).iterdir()))
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"{shown(self.root)} does not exist") from error
        except OSError as error:
            raise StorageError(f"{shown(self.root)} cannot be listed: {error.strerror}") from error

    def size(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            CheckpointNotFoundError: If it is not there; a link whose target is gone is named with its target.
            CheckpointError: If it is no regular file.
            StorageError: If the file system does not tell.
        """
        path = Path(self.root, name)
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointNotFoundError(_missing(path)) from error
        except ValueError as error:  # a NUL in the name
            raise CheckpointNotFoundError(f"{shown(str(path))} is missing: no file can have this name") from error
        except OSError as error:
            raise StorageError(f"{shown(str(path))} cannot be looked at: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for a writer
            kind = "a folder" if stat.S_ISDIR(found.st_mode) else "no regular file"
            raise CheckpointError(f"{shown(str(path))} is {kind}, where a file of the checkpoint is expected")
        return found.st_size

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return exactly the bytes [start, stop) of a file.

        Raises:
            CheckpointChangedError: If the file ends before `stop`.
            StorageError: If reading fails.
        """
        path = Path(self.root, name)
        try:
            with path.open("rb", buffering=0) as file:
                return _read_range(file.fileno(), path, start, stop)
        except OSError as error:
            raise StorageError(f"{shown(str(path))} cannot be read: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class MemoryFiles:
    """Files held in memory, for tests and for checkpoints that were just made.

    Attributes:
        contents: Bytes of each file by its name; `/` separates folders.
        root: What messages call the place.
    """

    contents: Mapping[str, bytes]
    root: str = "memory"

    @property
    def concurrency(self) -> int:
        """Files worth reading at the same time."""
        return 1

    def version(self, name: str) -> str:  # noqa: ARG002 - no file has one
        """Return the empty string: what is in memory does not change."""
        return ""

    def names(self) -> tuple[str, ...]:
        """Return what lies directly inside the root, folders included, sorted."""
        return tuple(sorted({name.partition("/")[0] for name in self.contents}))

    def size(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            CheckpointNotFoundError: If there is no such file.
        """
        if name not in self.contents:
            raise CheckpointNotFoundError(f"{self.root}/{shown(name)} is missing")
        return len(self.contents[name])

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return exactly the bytes [start, stop) of a file.

        Raises:
            CheckpointChangedError: If the file ends before `stop`.
        """
        found = bytes(self.contents[name][start:stop])
        if len(found) != stop - start:
            raise CheckpointChangedError(_ended(f"{self.root}/{shown(name)}", start + len(found), stop))
        return found


def _missing(path: Path) -> str:
    if path.is_symlink():
        return f"{shown(str(path))} is a link to {shown(str(path.readlink()))}, which is missing: fetch the file again"
    return f"{shown(str(path))} is missing: no such file"


def _read_range(descriptor: int, path: Path, start: int, stop: int) -> bytes:
    pieces = []
    position = start
    while position < stop:
        piece = os.pread(descriptor, stop - position, position)
        if not piece:
            raise CheckpointChangedError(_ended(shown(str(path)), position, stop))
        pieces.append(piece)
        position += len(piece)
    return b"".join(pieces)


def _ended(path: str, position: int, stop: int) -> str:
    return f"{path} ended at byte {position} of the {stop} it had when it was looked at: another process changed it"
