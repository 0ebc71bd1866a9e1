"""Finds out what a filesystem can do by doing it to tiny files, which are removed again.

Nothing else tells: the same type of filesystem can or cannot exchange names, depending on versions and mount options.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardferry.storage.renames import Filesystem

# What a filesystem answers when it cannot do something, as opposed to a full or failing disk.
_CANNOT = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK})
_FAR = 8192


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What can be done below one directory.

    Attributes:
        exchange: Two directories can swap their names.
        hard_links: A file can have a second name.
        rename_directories: A directory can get another name.
        rename_files: A file can get another name in another directory.
        write_anywhere: A file can be written to in any order.
    """

    exchange: bool = True
    hard_links: bool = True
    rename_directories: bool = True
    rename_files: bool = True
    write_anywhere: bool = True


def probe_capabilities(filesystem: Filesystem, folder: str) -> Capabilities:
    """Return what can be done in `folder`, which must not exist and does not exist afterwards.

    Raises:
        OSError: If no directory or file can be made there.
    """
    able: dict[str, bool] = {}
    one, other = f"{folder}/one", f"{folder}/other"
    filesystem.make_directory(folder)
    try:
        for path in (one, other):
            filesystem.make_directory(path)
            filesystem.write_file(f"{path}/file", b"probe")
        with _noticing(able, "write_anywhere"):
            _write_backwards(f"{one}/file")
        with _noticing(able, "exchange"):
            filesystem.exchange(one, other)
        with _noticing(able, "hard_links"):
            filesystem.link(f"{one}/file", f"{other}/linked")
        with _noticing(able, "rename_files"):
            filesystem.rename(f"{one}/file", f"{other}/renamed")
        with _noticing(able, "rename_directories"):
            filesystem.rename(other, f"{folder}/renamed")
    finally:
        remove_tree(filesystem, folder)
    return Capabilities(**able)


def remove_tree(filesystem: Filesystem, folder: str, last: str = "") -> None:
    """Remove a directory and everything in it, links themselves, never what they point to.

    Args:
        filesystem: Does it.
        folder: The directory.
        last: Name of the file in it that goes last; what is left by an interruption can be told by it.

    Raises:
        OSError: If something cannot be removed; the rest is still there.
    """
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: (entry.name == last, entry.name))
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            remove_tree(filesystem, entry.path)
        else:
            filesystem.unlink(entry.path)
    filesystem.remove_directory(folder)


@contextmanager
def _noticing(able: dict[str, bool], what: str) -> Iterator[None]:
    able[what] = False
    try:
        yield
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    else:
        able[what] = True


def _write_backwards(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, b"far", _FAR)
        os.pwrite(descriptor, b"near", 0)
    finally:
        os.close(descriptor)
