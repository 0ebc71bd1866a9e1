"""What is at the path a save is to publish to, and around it. Only looks, changes nothing."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardferry.errors import InvalidInputError, StorageError
from shardferry.format.hubindex import read_hub_index
from shardferry.format.oldfiles import is_checkpoint_file, old_files
from shardferry.format.problem import shown
from shardferry.format.savenames import is_save_name, parse_journal, parse_sibling
from shardferry.storage.files import LocalFiles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardferry.format.oldfiles import Content, Naming

_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class TargetState:
    """What a save finds.

    Attributes:
        path: The directory, absolute, links resolved.
        home: Where a save keeps what is not published: the parent, or the directory itself where nothing can be put
            beside it.
        movable: Whether the directory may get another name.
        content: What is there.
        checkpoint_files: Names in the directory that mean there is a checkpoint.
        old_files: What a new checkpoint replaces, relative to the directory, in the order in which it must go.
        leftovers: Paths of what other saves have left; a running one among them.
    """

    path: str
    home: str
    movable: bool
    content: Content
    checkpoint_files: tuple[str, ...]
    old_files: tuple[str, ...]
    leftovers: tuple[str, ...]


def survey_target(path: str, naming: Naming) -> TargetState:
    """Return what is at `path`.

    Args:
        path: Where the checkpoint is to be. A link is followed; one that leads nowhere yet names the place to make.
        naming: How the checkpoint's files are called.

    Raises:
        InvalidInputError: If it is no directory, or links lead in a circle.
        StorageError: If it cannot be looked at.
    """
    if not path or "\0" in path:
        raise InvalidInputError(f"{path!r} is no path: say where the checkpoint is to be")
    resolved = os.path.realpath(path)
    try:
        exists = _is_folder(resolved)
        entries = os.listdir(resolved) if exists else []  # noqa: PTH208 - names are wanted, not paths
        home, movable = _home(resolved, exists=exists)
        leftovers = tuple(_leftovers(resolved, home))
    except OSError as error:
        raise StorageError(f"{shown(path)} cannot be looked at: {error.strerror}") from error
    theirs = [entry for entry in entries if not is_save_name(entry)]
    standing = tuple(sorted(entry for entry in theirs if is_checkpoint_file(entry, naming)))
    content: Content = "checkpoint" if standing else "foreign" if theirs else "empty" if exists else "absent"
    replaced = old_files(theirs, naming, _promised(resolved, naming, theirs))
    old = tuple(name for name in replaced if os.path.lexists(f"{resolved}/{name}"))
    return TargetState(resolved, home, movable, content, standing, old, leftovers)


def _is_folder(path: str) -> bool:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISLNK(mode):
        raise InvalidInputError(f"{shown(path)} is a link that leads back to itself: remove it or save elsewhere")
    if not stat.S_ISDIR(mode):
        raise InvalidInputError(f"{shown(path)} is a file, but a checkpoint is a directory: save to another path")
    return True


def _home(path: str, *, exists: bool) -> tuple[str, bool]:
    """Return where to stage, and whether the directory may be moved."""
    parent = os.path.dirname(path)  # noqa: PTH120 - as in the whole file: paths are strings, they travel between ranks
    if not exists:
        return parent, True
    if _is_mount_point(path) or not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        return path, False
    return parent, _may_move(path, parent)


def _may_move(path: str, parent: str) -> bool:
    """Return False where a sticky parent keeps others' directories in their place, as in /tmp."""
    above, user = os.stat(parent), os.geteuid()  # noqa: PTH116
    owners = (0, above.st_uid, os.stat(path).st_uid)  # noqa: PTH116
    return not above.st_mode & stat.S_ISVTX or user in (owners if user == 0 else owners[1:])


def _is_mount_point(path: str) -> bool:
    if os.path.ismount(path):
        return True
    try:  # a bind mount of the same filesystem shows only here
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return False
    escaped = path.replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011").replace("\n", "\\012")
    return any(line.split(" ")[4] == escaped for line in lines)  # proc_pid_mountinfo(5): the fifth is the mount point


def _leftovers(path: str, home: str) -> Iterator[str]:
    name = os.path.basename(path)  # noqa: PTH119
    parent = os.path.dirname(path)  # noqa: PTH120
    for folder in {parent, home, path}:
        if not os.path.isdir(folder):  # noqa: PTH112
            continue
        for entry in sorted(os.listdir(folder)):  # noqa: PTH208
            if parse_sibling(entry, name) or (folder == path and parse_journal(entry)):
                yield f"{folder}/{entry}"


def _promised(path: str, naming: Naming, entries: list[str]) -> frozenset[str]:
    """Return the files that the index names; none if it cannot be understood, numbered files go by their names."""
    if naming.index not in entries or os.path.isdir(f"{path}/{naming.index}"):  # noqa: PTH112
        return frozenset()
    index, _ = read_hub_index(LocalFiles(path), naming.index)
    return frozenset(index.weight_map.values()) if index else frozenset()
