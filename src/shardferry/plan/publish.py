"""Decides how staged files become a checkpoint at a path, from what is there and what the filesystem can do.

From the best to the least that a filesystem allows:

    rename     the target is absent or empty: the staged directory takes its name
    exchange   the staged directory and the target swap their names in one step
    swap       the target is renamed away, then the staged directory gets its name: a reader in between sees nothing
    files      files are renamed one by one, what makes a reader open the others first and last
    in place   files are written where they belong, the index last; only where there is no checkpoint yet
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from shardferry.errors import CheckpointExistsError, InvalidInputError, StorageError
from shardferry.format.problem import listed, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardferry.format.oldfiles import Content
    from shardferry.format.savenames import PublishProtocol

OnExisting = Literal["refuse", "replace"]


class Target(Protocol):
    """What has to be known of the place that is published to."""

    @property
    def path(self) -> str:
        """The directory, links resolved."""

    @property
    def content(self) -> Content:
        """What is there."""

    @property
    def checkpoint_files(self) -> Sequence[str]:
        """Names in the directory that mean there is a checkpoint."""

    @property
    def movable(self) -> bool:
        """Whether the directory itself may get another name: no mount point, and its parent can be written to."""


class Abilities(Protocol):
    """What the filesystem can do."""

    @property
    def exchange(self) -> bool:
        """Two directories can swap their names."""

    @property
    def hard_links(self) -> bool:
        """A file can have a second name."""

    @property
    def rename_directories(self) -> bool:
        """A directory can get another name."""

    @property
    def rename_files(self) -> bool:
        """A file can get another name in another directory."""

    @property
    def write_anywhere(self) -> bool:
        """A file can be written to in any order."""


def check_existing(target: Target, on_existing: OnExisting) -> None:
    """Check that the caller allows what a save would do to the checkpoint that is there.

    Raises:
        CheckpointExistsError: If there is one and it must not be replaced; names its files.
    """
    if on_existing == "refuse" and target.content == "checkpoint":
        files = listed(target.checkpoint_files, 5)
        raise CheckpointExistsError(
            f"{shown(target.path)} already holds a checkpoint ({files}). Save to another path, or replace it with "
            'on_existing="replace"'
        )


def choose_protocol(target: Target, able: Abilities) -> PublishProtocol:
    """Return how to publish to `target`.

    Raises:
        StorageError: If files there can only be appended to.
        InvalidInputError: If a checkpoint is to be replaced where nothing can be renamed.
    """
    if not able.write_anywhere:
        raise StorageError(
            f"files below {shown(target.path)} can only be appended to, but several ranks write to one file at "
            "their own offsets. Save to another filesystem and copy the result"
        )
    if target.movable and able.rename_directories:
        if target.content in ("absent", "empty"):
            return "rename"
        return "exchange" if able.exchange and able.hard_links else "swap"
    if able.rename_files:
        return "files"
    if target.content == "checkpoint":
        raise InvalidInputError(
            f"{shown(target.path)} holds a checkpoint, and nothing can be renamed on this filesystem, so readers would "
            "see a mix of old and new files. Save to a path that holds no checkpoint, or remove the old one first"
        )
    return "in place"
