"""The change from the old checkpoint to the new one, in every protocol, and the way back.

Each function can be called again after it was interrupted anywhere: it looks at what is there and does the rest. What
is there is told by the journal, and by which of staging, target and retired holds a file.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from shardferry.storage.absorb import move_over
from shardferry.storage.capabilities import remove_tree

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardferry.storage.journal import Journal
    from shardferry.storage.place import Place
    from shardferry.storage.renames import Filesystem

_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST})
# Somebody may make the target again while its name is free.
_TRIES = 3


def is_complete(place: Place, journal: Journal) -> bool:
    """Return whether every new file is there with its size, wherever an unfinished change has left it."""
    return all(_size(_new_path(place, journal, name)) == size for name, size in journal.files.items())


def change_directories(filesystem: Filesystem, place: Place, journal: Journal) -> None:
    """Put the staged directory in the target's place, in one or two steps.

    Raises:
        OSError: If it cannot be done.
    """
    if journal.protocol == "exchange":
        filesystem.exchange(place.staging, place.target)
    elif journal.protocol == "rename":
        filesystem.rename(place.staging, place.target)
    else:
        _swap(filesystem, place)
    try:
        filesystem.sync_directory(place.home)
    except OSError:
        _change_back(filesystem, place, journal)  # what may be gone after a power failure is not published
        raise


def put_files(filesystem: Filesystem, place: Place, journal: Journal) -> None:
    """Move the old files away and the new ones into the target, one by one; the journal is in the target.

    Raises:
        OSError: If one cannot be moved.
    """
    _make_folders(filesystem, place.retired, journal.replaced)
    for name in journal.replaced:
        there, moved = f"{place.target}/{name}", f"{place.retired}/{name}"
        if os.path.lexists(there) and not os.path.lexists(moved):  # else it is the new one
            filesystem.rename_new(there, moved)
    _sync(filesystem, place.target, journal.replaced)
    _sync(filesystem, place.retired, journal.replaced)
    _make_folders(filesystem, place.target, journal.files)
    names = [name for name in journal.files if name != journal.last]
    for group in (names, [journal.last] if journal.last else []):
        for name in group:
            if os.path.lexists(place.path_of(name)):
                filesystem.rename(place.path_of(name), f"{place.target}/{name}")
        _sync(filesystem, place.target, group)
    filesystem.rename(place.journal("publishing"), place.journal("published"))
    try:
        filesystem.sync_directory(place.target)
    except OSError:
        filesystem.rename(place.journal("published"), place.journal("publishing"))
        raise


def take_files_back(filesystem: Filesystem, place: Place, journal: Journal) -> None:
    """Undo `put_files`, and remove its journal.

    Raises:
        OSError: If a file cannot be moved.
    """
    names = [name for name in journal.files if name != journal.last]
    for name in [journal.last, *names] if journal.last else names:
        there = f"{place.target}/{name}"
        if _new_path(place, journal, name) == there and os.path.lexists(there):
            filesystem.rename(there, place.path_of(name))
    _remove_folders(filesystem, place.target, journal.files)
    for name in reversed(journal.replaced):
        if os.path.lexists(f"{place.retired}/{name}"):
            _make_folders(filesystem, place.target, (name,))
            filesystem.rename(f"{place.retired}/{name}", f"{place.target}/{name}")
    _sync(filesystem, place.target, journal.replaced)
    if os.path.lexists(place.retired):
        remove_tree(filesystem, place.retired)
    filesystem.unlink(place.journal("publishing"))
    filesystem.sync_directory(place.target)


def bring_back(filesystem: Filesystem, place: Place) -> None:
    """Give a target that was renamed away its name again.

    Raises:
        OSError: If it cannot be renamed.
    """
    for _ in range(_TRIES):
        if os.path.lexists(place.target) and os.listdir(place.target):  # noqa: PTH208
            move_over(filesystem, place.target, place.retired, drop=(), linked=())
        try:
            filesystem.rename(place.retired, place.target)
        except OSError as error:
            if error.errno not in _OCCUPIED:
                raise
        else:
            break
    filesystem.sync_directory(place.home)


def clear_away(filesystem: Filesystem, place: Place, journal: Journal) -> list[str]:
    """Deal with what the published checkpoint has replaced, then remove the journal.

    Returns:
        Paths of foreign files that are in both directories and differ. They stay, and the journal with them.

    Raises:
        OSError: If something cannot be moved or removed; the call can be repeated.
    """
    if journal.protocol == "files":
        for folder in (place.retired, place.staging):
            if os.path.lexists(folder):
                remove_tree(filesystem, folder)
    elif journal.protocol != "in place":
        if os.path.lexists(place.staging):  # the old directory, by its new name
            filesystem.rename_new(place.staging, place.retired)
        if os.path.lexists(place.retired):
            drop = {*journal.replaced, *journal.files}
            kept = move_over(filesystem, place.retired, place.target, drop=drop, linked=journal.linked)
            if kept:
                return kept
    filesystem.sync_directory(place.home)
    filesystem.unlink(place.journal("published"))
    filesystem.sync_directory(place.target)
    return []


def _swap(filesystem: Filesystem, place: Place) -> None:
    if not os.path.lexists(place.retired):
        filesystem.rename_new(place.target, place.retired)
    for _ in range(_TRIES):
        try:
            filesystem.rename(place.staging, place.target)
        except OSError as error:
            if error.errno not in _OCCUPIED:
                raise
            move_over(filesystem, place.target, place.retired, drop=(), linked=())
        else:
            return
    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), place.staging, None, place.target)


def _change_back(filesystem: Filesystem, place: Place, journal: Journal) -> None:
    if journal.protocol == "exchange":
        filesystem.exchange(place.staging, place.target)
        return
    filesystem.rename(place.target, place.staging)
    if journal.protocol == "swap":
        filesystem.rename(place.retired, place.target)


def _new_path(place: Place, journal: Journal, name: str) -> str:
    """Return where a new file is: not to be taken for an old one of the same name."""
    staged, there = place.path_of(name), f"{place.target}/{name}"
    if journal.protocol == "in place":
        return there
    is_moved = os.path.lexists(f"{place.retired}/{name}") or name not in journal.replaced
    return there if journal.protocol == "files" and is_moved and not os.path.lexists(staged) else staged


def _folders(names: Iterable[str]) -> list[str]:
    """Return the folders that these names lie in, outer ones first, the root not among them."""
    found = set()
    for name in names:
        parts = name.split("/")[:-1]
        found |= {"/".join(parts[: count + 1]) for count in range(len(parts))}
    return sorted(found)


def _make_folders(filesystem: Filesystem, root: str, names: Iterable[str]) -> None:
    for path in (root, *(f"{root}/{folder}" for folder in _folders(names))):
        if not os.path.lexists(path):
            filesystem.make_directory(path)


def _remove_folders(filesystem: Filesystem, root: str, names: Iterable[str]) -> None:
    for folder in reversed(_folders(names)):
        path = f"{root}/{folder}"
        if os.path.lexists(path) and not os.listdir(path):  # noqa: PTH208
            filesystem.remove_directory(path)


def _sync(filesystem: Filesystem, root: str, names: Iterable[str]) -> None:
    for folder in reversed(_folders(names)):
        if os.path.lexists(f"{root}/{folder}"):
            filesystem.sync_directory(f"{root}/{folder}")
    filesystem.sync_directory(root)


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return -1
