"""Copying columns out of a file mapping, without the mapping being able to kill the process.

For thin rows, copying out of a mapping moves only the wanted bytes. Where they are in the page cache already that is up
to twice as fast as reading whole rows, and elsewhere no slower. But a page that cannot be had is SIGBUS. Two things
take that away:

* A page that is gone because the file shrank: a read lease (fcntl(2), F_SETLEASE) is held while a window of a few MiB
  is copied, and only then. Whoever wants to truncate the file or open it for writing waits until the lease is
  released; the kernel grants none while somebody has the file open for writing. Once somebody waits, no thread
  enters a window, so that those who copy are soon done.
* A page that cannot be read: the window is populated first (MADV_POPULATE_READ, Linux 5.14), which reports a
  failing disk as an error.

Where no lease is to be had (not our file, a network or FUSE mount, an old kernel) there is no mapping, and rows
are read the ordinary way.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardferry.storage.filesystem import LOCAL_FILESYSTEMS, PAGE_BYTES, filesystem_type

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardferry.storage.base import Bytes

_F_SETSIG = 10  # asm-generic/fcntl.h; Python's fcntl does not name it on every build
_MADV_POPULATE_READ = 22  # asm-generic/mman-common.h, Linux 5.14
# The kernel breaks a lease by force after this many seconds; a copied window takes milliseconds.
_LEASE_BREAK_TIME = Path("/proc/sys/fs/lease-break-time")
_MIN_LEASE_S = 10


class GuardedMapping:
    """A mapping of one open file that is used only while it is safe; threads may share it."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Map `size` bytes of the file if it can be guarded; else every window is None."""
        self._descriptor = descriptor
        self._size = size
        self._map: mmap.mmap | None = None
        self._lock = threading.Lock()
        self._copying = 0
        if size and _can_be_guarded(descriptor):
            # ValueError: the file has shrunk meanwhile; OSError: the process has too many mappings already.
            with suppress(ValueError, OSError):
                self._map = mmap.mmap(descriptor, size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)

    @contextmanager
    def window(self, start: int, stop: int) -> Iterator[Bytes | None]:
        """Give bytes [start, stop) of the file, safe to copy from inside the context; None if they must be read."""
        if stop > self._size or not self._enter():
            yield None
            return
        try:
            yield self._populated(start, stop)
        finally:
            self._leave()

    def close(self) -> None:
        """Give up the mapping; no window may be open."""
        self._map = None  # unmapped when the last window's array is gone

    def _enter(self) -> bool:
        with self._lock:
            if self._map is None or not (self._is_leased() if self._copying else self._lease()):
                return False
            self._copying += 1
            return True

    def _leave(self) -> None:
        with self._lock:
            self._copying -= 1
            if not self._copying:
                self._release()

    def _is_leased(self) -> bool:
        return fcntl.fcntl(self._descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK  # no longer so once somebody waits

    def _lease(self) -> bool:
        try:
            # Whoever waits makes the kernel send SIGIO, which ends a process; SIGURG is ignored unless somebody asked
            # for it. Every release puts SIGIO back (fs/locks.c, lease_modify).
            fcntl.fcntl(self._descriptor, _F_SETSIG, signal.SIGURG)
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError:  # somebody has the file open for writing, or the filesystem has no leases
            return False
        if os.fstat(self._descriptor).st_size < self._size:
            self._release()
            return False
        return True

    def _release(self) -> None:
        with suppress(BlockingIOError):  # the kernel has taken the lease away: this process was stopped for too long
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    def _populated(self, start: int, stop: int) -> Bytes | None:
        if self._map is None:
            return None
        first = start // PAGE_BYTES * PAGE_BYTES
        try:
            self._map.madvise(_MADV_POPULATE_READ, first, stop - first)
        except OSError:
            return None  # an ordinary read of the same bytes reports the cause, with its offset
        return np.frombuffer(self._map, np.uint8, stop - start, start)


def _can_be_guarded(descriptor: int) -> bool:
    if filesystem_type(descriptor) not in LOCAL_FILESYSTEMS:
        return False
    try:
        return int(_LEASE_BREAK_TIME.read_text(encoding="ascii")) >= _MIN_LEASE_S
    except OSError:
        return False
