"""Files being written by several processes at once, each at its own offsets."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING, Protocol, Self

from shardferry.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardferry.storage.base import Bytes


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
# sync_file_range(2): begin to write pages to the disk now, and do not wait.
_SYNC_FILE_RANGE_WRITE = 2
# Whole blocks of this size, the kernel's largest unit: what a neighbour still changes would be written twice (4% of
# all bytes, measured). Begun early, an exchange of 1 GB and its sync took 1.0-1.2 s instead of 1.3 s (measured).
EARLY_BLOCK_BYTES = 2 << 20


def create_file(path: str, header: bytes, size: int) -> None:
    """Create a file of its final size that holds its header, before anybody else opens it.

    The space is reserved where the filesystem can do that, so that a full disk shows now. The C library's own
    `posix_fallocate` is not used: where it has to emulate, it writes into blocks others may be writing.

    Raises:
        StorageError: If there is no space or the file cannot be made; names it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StorageError(f"cannot create '{path}': {error.strerror}") from error
    try:
        _reserve(descriptor, size)
        _write_all(descriptor, memoryview(header), 0)
        os.fsync(descriptor)
    except OSError as error:
        raise StorageError(f"cannot make '{path}' of {size} bytes: {error.strerror}") from error
    finally:
        os.close(descriptor)


def write_header(path: str, header: bytes) -> None:
    """Write the header of a file that was created without one, and wait until it is on the disk.

    Raises:
        StorageError: If that fails; names the file.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            _write_all(descriptor, memoryview(header), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"writing the header of '{path}' failed: {error.strerror}") from error


class Writable(Protocol):
    """One file of a save, as those who write it see it."""

    def write(self, data: Bytes, start: int, on_write: Callable[[int, int], None]) -> None:
        """Write contiguous `data` at offset `start`."""
        ...


class WritableFiles(Protocol):
    """The files of a save."""

    def get(self, name: str) -> Writable:
        """Return the file of this name."""
        ...

    def sync(self) -> None:
        """Wait until everything written is where it is safe."""
        ...


class WritableFile:
    """One open file of a save."""

    def __init__(self, descriptor: int, path: str) -> None:
        """Take over an open descriptor; `path` is what errors name."""
        self._descriptor = descriptor
        self._path = path

    def write(self, data: Bytes, start: int, on_write: Callable[[int, int], None]) -> None:
        """Write contiguous `data` at offset `start`.

        Raises:
            StorageError: If the kernel reports an error; names the file and the offset.
        """
        view, done = data.data, 0
        while done < len(view):
            try:
                count = os.pwrite(self._descriptor, view[done : done + CALL_BYTES], start + done)
            except OSError as error:
                raise StorageError(
                    f"writing '{self._path}' at offset {start + done} failed: {error.strerror}"
                ) from error
            done += count
            on_write(count, 1)
        self._begin_writing_back(start, start + done)

    def _begin_writing_back(self, start: int, stop: int) -> None:
        first = -(-start // EARLY_BLOCK_BYTES) * EARLY_BLOCK_BYTES
        last = stop // EARLY_BLOCK_BYTES * EARLY_BLOCK_BYTES
        if first < last and hasattr(_libc, "sync_file_range"):  # not in musl; a failure shows in the sync
            size = ctypes.c_int64(last - first)
            _libc.sync_file_range(self._descriptor, ctypes.c_int64(first), size, _SYNC_FILE_RANGE_WRITE)

    def sync(self) -> None:
        """Wait until everything written through this descriptor is on the disk.

        Raises:
            StorageError: If the disk says otherwise.
        """
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise StorageError(f"syncing '{self._path}' failed: {error.strerror}") from error


# A stop is noticed after each call of this size.
CALL_BYTES = 4 << 20


class OpenFiles:
    """The files of a save that this rank writes, each opened when it is first written to.

    The end of the context checks that closing them succeeds: some network filesystems report a failed write only then.
    """

    def __init__(self, folder: str) -> None:
        """Open files below `folder`, which exist or which another rank has created where this one may not see it."""
        self._folder = folder
        self._descriptors: dict[str, int] = {}

    def get(self, name: str) -> WritableFile:
        """Return the file of this name.

        Raises:
            StorageError: If it cannot be opened; names it.
        """
        path = f"{self._folder}/{name}"
        if name not in self._descriptors:
            try:
                # O_CREAT: a network filesystem may still remember that the file was not there.
                self._descriptors[name] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise StorageError(f"cannot open '{path}' for writing: {error.strerror}") from error
        return WritableFile(self._descriptors[name], path)

    def sync(self) -> None:
        """Wait until everything written is on the disk.

        Raises:
            StorageError: If the disk says otherwise; names the file.
        """
        for name in self._descriptors:
            self.get(name).sync()

    def __enter__(self) -> Self:
        """Return the files."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close every file; raise if that fails, unless another error is on its way.

        Raises:
            StorageError: If the kernel reports an error; names the file.
        """
        failed = [failure for name in list(self._descriptors) if (failure := self._close(name))]
        if failed and kind is None:
            raise StorageError("; ".join(failed))

    def _close(self, name: str) -> str | None:
        try:
            os.close(self._descriptors.pop(name))
        except OSError as error:
            return f"closing '{self._folder}/{name}' failed: {error.strerror}"
        return None


def _reserve(descriptor: int, size: int) -> None:
    if size and _libc.fallocate(descriptor, 0, 0, size):
        code = ctypes.get_errno()
        if code not in {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}:
            raise OSError(code, os.strerror(code))
        os.ftruncate(descriptor, size)


def _write_all(descriptor: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], start + done)
