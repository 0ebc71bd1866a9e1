"""Foreign files of a directory that a new checkpoint takes the place of: none is lost, none changes its inode.

Before the change they get a second name in the staged directory, where the filesystem has hard links. After it,
whatever else lies in the old directory is moved over: sub-directories, and what has come late.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from shardferry.format.savenames import is_save_name

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardferry.storage.renames import Filesystem

# What NFS and FUSE clients call a file that was removed while it was open; they remove it when it is closed.
_HIDDEN = re.compile(r"\.(?:nfs|fuse_hidden)[0-9a-f]{8,}")
# Somebody who still works in the old directory may add files while it is emptied.
_TRIES = 3


def link_foreign(filesystem: Filesystem, old: str, new: str, drop: Collection[str]) -> tuple[str, ...]:
    """Give the foreign files of `old` a second name in `new` and return their names.

    What cannot be linked (a directory; a file whose owner the kernel wants to ask) is moved later.

    Args:
        filesystem: Does it.
        old: The directory that is replaced.
        new: The staged directory.
        drop: Names that are not foreign.
    """
    linked = []
    with os.scandir(old) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        is_ours = entry.name in drop or is_save_name(entry.name)
        if is_ours or entry.is_dir(follow_symlinks=False) or _HIDDEN.fullmatch(entry.name):
            continue
        path = f"{new}/{entry.name}"
        try:
            if os.path.lexists(path):  # of an earlier try: the file may have been replaced since
                filesystem.unlink(path)
            filesystem.link(entry.path, path)
        except OSError:
            continue
        linked.append(entry.name)
    return tuple(linked)


def move_over(
    filesystem: Filesystem, old: str, new: str, *, drop: Collection[str], linked: Collection[str]
) -> list[str]:
    """Move everything foreign from `old` to `new`, then remove `old` with what is replaced in it.

    Args:
        filesystem: Does it.
        old: The directory that was replaced.
        new: The directory of the new checkpoint.
        drop: What is replaced, relative to `old`.
        linked: Foreign files that had a second name in `new` before it took the place of `old`.

    Returns:
        Paths of what is in both and differs: it stays in `old`, and `old` with it.

    Raises:
        OSError: If something cannot be moved; the rest is still there, and the call can be repeated.
    """
    _drop_nested(filesystem, old, drop)
    kept: list[str] = []
    for _ in range(_TRIES):
        kept = _move(filesystem, old, new, drop, linked)
        filesystem.sync_directory(new)
        for name in sorted(drop):
            if _is_file(f"{old}/{name}"):
                filesystem.unlink(f"{old}/{name}")
        if kept or not os.listdir(old):  # noqa: PTH208
            break
    if not kept:
        filesystem.remove_directory(old)
    return kept


def _drop_nested(filesystem: Filesystem, old: str, drop: Collection[str]) -> None:
    """Remove replaced files from sub-directories, so that these can move as a whole, and those left empty."""
    for name in sorted(name for name in drop if "/" in name):
        if not _is_file(f"{old}/{name}"):
            continue
        filesystem.unlink(f"{old}/{name}")
        folder = os.path.dirname(name)  # noqa: PTH120
        while folder and not os.listdir(f"{old}/{folder}"):  # noqa: PTH208
            filesystem.remove_directory(f"{old}/{folder}")
            folder = os.path.dirname(folder)  # noqa: PTH120


def _move(filesystem: Filesystem, old: str, new: str, drop: Collection[str], linked: Collection[str]) -> list[str]:
    kept = []
    with os.scandir(old) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        path, is_folder = f"{new}/{entry.name}", entry.is_dir(follow_symlinks=False)
        if (entry.name in drop and not is_folder) or _HIDDEN.fullmatch(entry.name):
            continue
        if not os.path.lexists(path):
            filesystem.rename_new(entry.path, path)
        elif is_folder and os.path.isdir(path) and not os.path.islink(path):  # noqa: PTH112, PTH114
            inner = _move(filesystem, entry.path, path, (), ())
            if not inner:
                filesystem.remove_directory(entry.path)
            kept += inner
        elif not is_folder and _is_second_name(entry.path, path):
            filesystem.unlink(entry.path)
        elif entry.name in linked and not is_folder:
            _keep_newer(filesystem, entry.path, path)
        else:
            kept.append(entry.path)
    return kept


def _is_second_name(one: str, other: str) -> bool:
    return os.path.samestat(os.lstat(one), os.lstat(other))


def _keep_newer(filesystem: Filesystem, old: str, new: str) -> None:
    """Keep the later version of a file that somebody has replaced around the moment of the change."""
    if os.lstat(old).st_mtime_ns > os.lstat(new).st_mtime_ns:
        filesystem.rename(old, new)
    else:
        filesystem.unlink(old)


def _is_file(path: str) -> bool:
    return os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path))  # noqa: PTH112, PTH114
