"""What reading a checkpoint's index needs from the place its files are in."""

from __future__ import annotations

from typing import Protocol


class Files(Protocol):
    """A flat or nested set of named files that can be read by ranges.

    Implementations live with the storage code. Names are relative to the root, with `/` between folders.
    """

    @property
    def root(self) -> str:
        """Where the files are, as messages name it."""

    @property
    def concurrency(self) -> int:
        """How many files are worth asking for at the same time."""

    def version(self, name: str) -> str:
        """Return what the place calls the content of a file whose size was asked, e.g. its ETag; empty if nothing."""

    def names(self) -> tuple[str, ...]:
        """Return the entries directly inside the root, folders included, in any order."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            CheckpointNotFoundError: If there is no such file; a link whose target is gone is named with its target.
            CheckpointError: If it is something no checkpoint is made of, a folder for example.
            StorageError: If the place does not answer.
        """

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return exactly the bytes [start, stop) of a file.

        Raises:
            CheckpointChangedError: If the file ends before `stop`.
            StorageError: If reading fails.
        """
