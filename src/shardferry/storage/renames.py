"""The changes a save makes to a directory tree, one method for each, so that a test can stand between any two of them.

Python has no call for exchanging two names or for renaming without replacing: renameat2(2) is called through ctypes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from typing import Protocol

# linux/fs.h and fcntl.h
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
# Some network and FUSE filesystems cannot sync a directory; they have nothing that would be lost by that.
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS})
# The kernel or the filesystem does not know the flag.
NOT_SUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})

_libc = ctypes.CDLL(None, use_errno=True)


class Filesystem(Protocol):
    """The changes a save makes. Every method raises `OSError` with the paths if it did not happen."""

    def make_directory(self, path: str) -> None:
        """Make a directory whose parent exists."""
        ...

    def write_file(self, path: str, data: bytes) -> None:
        """Make or overwrite a small file, never through a link, and wait until it is on the disk."""
        ...

    def copy_mode(self, source: str, path: str) -> None:
        """Give the directory `path` the permissions and extended attributes of `source`."""
        ...

    def link(self, source: str, path: str) -> None:
        """Give a file, or a symbolic link itself, a second name."""
        ...

    def rename(self, source: str, path: str) -> None:
        """Give `source` the name `path`; replaces a file, or an empty directory."""
        ...

    def rename_new(self, source: str, path: str) -> None:
        """Give `source` the name `path`, which nothing has."""
        ...

    def exchange(self, one: str, other: str) -> None:
        """Swap two names in one step."""
        ...

    def unlink(self, path: str) -> None:
        """Take away the name of a file."""
        ...

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        ...

    def sync_directory(self, path: str) -> None:
        """Wait until the names in a directory are on the disk."""
        ...


class LocalFilesystem:
    """The filesystem of this machine."""

    def make_directory(self, path: str) -> None:
        """Make a directory whose parent exists."""
        os.mkdir(path)  # noqa: PTH102 - paths are strings here: they travel between ranks

    def write_file(self, path: str, data: bytes) -> None:
        """Make or overwrite a small file, never through a link, and wait until it is on the disk."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        with open(descriptor, "wb", buffering=0) as file:  # noqa: PTH123 - an open descriptor
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(descriptor)

    def copy_mode(self, source: str, path: str) -> None:
        """Give the directory `path` the permissions and extended attributes of `source`."""
        shutil.copystat(source, path)

    def link(self, source: str, path: str) -> None:
        """Give a file, or a symbolic link itself, a second name."""
        os.link(source, path, follow_symlinks=False)

    def rename(self, source: str, path: str) -> None:
        """Give `source` the name `path`; replaces a file, or an empty directory."""
        os.rename(source, path)  # noqa: PTH104

    def rename_new(self, source: str, path: str) -> None:
        """Give `source` the name `path`, which nothing has."""
        try:
            _renameat2(source, path, _RENAME_NOREPLACE)
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), source, None, path) from None
            os.rename(source, path)  # noqa: PTH104

    def exchange(self, one: str, other: str) -> None:
        """Swap two names in one step."""
        _renameat2(one, other, _RENAME_EXCHANGE)

    def unlink(self, path: str) -> None:
        """Take away the name of a file."""
        os.unlink(path)  # noqa: PTH108

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        os.rmdir(path)  # noqa: PTH106

    def sync_directory(self, path: str) -> None:
        """Wait until the names in a directory are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise
        finally:
            os.close(descriptor)


def _renameat2(source: str, path: str, flags: int) -> None:
    try:
        renameat2 = _libc.renameat2  # glibc 2.28, musl 1.2.6
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), source, None, path) from None
    if renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(path), flags):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), source, None, path)
