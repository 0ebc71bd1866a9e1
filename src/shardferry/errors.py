"""Every error shardferry raises on purpose, grouped by what a handler would do.

    ShardferryError
    +-- InvalidInputError      (ValueError)         an argument is wrong: fix the call
    +-- CheckpointError        (ValueError)         the checkpoint is not acceptable: fix or re-fetch the files
    |   +-- CheckpointNotFoundError (FileNotFoundError)  there is no checkpoint, or a file of it is missing
    |   +-- CheckpointChangedError  files differ from what the job agreed to read
    +-- CheckpointExistsError  (FileExistsError)    a save would replace a checkpoint: allow it or choose another path
    +-- MismatchError          (ValueError)         names, shapes or dtypes of model and checkpoint do not fit
    +-- ShardingError          (ValueError)         a layout cannot be true, or ranks disagree about it
    +-- StorageError           (OSError)            reading or writing bytes failed
    +-- RankFailedError        (RuntimeError)       another rank failed: its cause is in the message

A message says what is wrong with the actual names and values, where, and what to do.
"""

from __future__ import annotations


class ShardferryError(Exception):
    """Base of every error raised on purpose."""


class InvalidInputError(ShardferryError, ValueError):
    """An argument given to a public function is not usable."""


class CheckpointError(ShardferryError, ValueError):
    """The bytes or the set of files of a checkpoint break the format's rules."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No checkpoint at the path, or a file it needs is missing."""

    # FileNotFoundError formats itself from errno; the message alone is what the user needs.
    __str__ = Exception.__str__


class CheckpointChangedError(CheckpointError):
    """A file is not the one whose header the job agreed to read."""


class CheckpointExistsError(ShardferryError, FileExistsError):
    """A save would replace a checkpoint, which the caller has not allowed."""

    __str__ = Exception.__str__


class MismatchError(ShardferryError, ValueError):
    """Model and checkpoint do not fit; the message lists the names by class."""


class ShardingError(ShardferryError, ValueError):
    """A layout is impossible or ambiguous, or ranks disagree about it."""


class StorageError(ShardferryError, OSError):
    """Reading or writing failed; names the file and the offset."""

    __str__ = Exception.__str__


class RankFailedError(ShardferryError, RuntimeError):
    """A step failed on another rank.

    Attributes:
        step: What the ranks were doing, e.g. `"read tensors"`.
        rank: The rank that failed first.
        world_size: Number of ranks in the group.
        host: Host name of that rank, `"unknown"` if it never said.
        cause: Type and message of its error, or what was observed (`"the process ended"`).
    """

    def __init__(self, step: str, rank: int, world_size: int, host: str, cause: str) -> None:
        super().__init__(f"{step} failed on rank {rank} of {world_size} (host {host}): {cause}")
        self.step = step
        self.rank = rank
        self.world_size = world_size
        self.host = host
        self.cause = cause

    def __reduce__(self) -> tuple[type[RankFailedError], tuple[str, int, int, str, str]]:
        return type(self), (self.step, self.rank, self.world_size, self.host, self.cause)


class CheckpointWarning(UserWarning):
    """Something about a checkpoint is odd but readable."""
