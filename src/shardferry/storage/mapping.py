"""A mapping of a file: to bring it into the page cache in large blocks, and to copy columns out of it safely.

Blocks. What a read has to fetch comes in pages of 4 KiB, and a disk is asked for each run of them that happens to lie
together in memory. A fault in a mapping that is advised MADV_HUGEPAGE fetches an aligned block of 2 MiB (Linux 5.18,
mm/filemap.c, do_sync_mmap_readahead): as one large folio where the filesystem has such (xfs, ext4 since Linux 6.16,
btrfs), else in pages as ever. 4 ranks, 1 GB, cold, on a virtual disk: 0.50 s, against 1.02 s by reads with or without
the kernel's read-ahead, and 0.46 s past the page cache (O_DIRECT), which would leave nothing for the next load.

Columns. For thin rows, copying out of a mapping moves only the wanted bytes. Where they are in the page cache already
that is up to twice as fast as reading whole rows, and elsewhere no slower. But a page that cannot be had is SIGBUS. Two
things take that away:

* A page that is gone because the file shrank: a read lease (fcntl(2), F_SETLEASE) is held while a window of 16 MiB
  is copied, and only then. Whoever wants to truncate the file or open it for writing waits until the lease is
  released; the kernel grants none while somebody has the file open for writing. Once somebody waits, no thread
  enters a window, so that those who copy are soon done.
* A page that cannot be read: the window is populated first (MADV_POPULATE_READ, Linux 5.14), which reports a
  failing disk as an error.

Where no lease is to be had (not our file, a network or FUSE mount, an old kernel) there is no window, and rows
are read the ordinary way. Fetching needs none: nothing is copied out of the mapping, and an ordinary read of the same
bytes, which comes after it, reports what is wrong.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import threading
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardferry.storage.filesystem import PAGE_BYTES
from shardferry.storage.placement import HUGE_PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardferry.storage.base import Bytes

_F_SETSIG = 10  # asm-generic/fcntl.h; Python's fcntl does not name it on every build
_MADV_HUGEPAGE = 14  # asm-generic/mman-common.h, as the next
_MADV_POPULATE_READ = 22  # Linux 5.14
# The kernel breaks a lease by force after this many seconds; a copied window takes milliseconds.
_LEASE_BREAK_TIME = Path("/proc/sys/fs/lease-break-time")
_MIN_LEASE_S = 10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class GuardedMapping:
    """A mapping of one open file on a disk of this machine, used only while it is safe; threads may share it.

    Attributes:
        fetches: Whether `fetch` can bring blocks of the file into the page cache.
    """

    def __init__(self, descriptor: int, size: int, *, wanted_whole: bool = False) -> None:
        """Map `size` bytes of the file.

        Args:
            descriptor: The open file.
            size: Its bytes.
            wanted_whole: Whether this machine's ranks want all of it. Only then blocks are fetched: the kernel goes on
                to read what lies behind one.
        """
        self._descriptor = descriptor
        self._size = size
        self._map: mmap.mmap | None = None
        self._address = 0
        self.fetches = False
        self._can_be_guarded = _can_be_guarded()
        self._lock = threading.Lock()
        self._copying = 0
        # ValueError: the file is empty or has shrunk meanwhile; OSError: the process has too many mappings already.
        with suppress(ValueError, OSError):
            self._map = mmap.mmap(descriptor, size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
            self._address = np.frombuffer(self._map, np.uint8).ctypes.data
            self.fetches = wanted_whole and not _libc.madvise(self._address, size, _MADV_HUGEPAGE)

    def fetch(self, start: int, stop: int) -> None:
        """Bring the blocks that hold bytes [start, stop) into the page cache; call it only if `fetches`.

        Errors are for the read that comes after it to report.
        """
        first, last = start // HUGE_PAGE_BYTES, -(-stop // HUGE_PAGE_BYTES)
        self._populate(first * HUGE_PAGE_BYTES, min(last * HUGE_PAGE_BYTES, self._size))

    @contextmanager
    def window(self, start: int, stop: int) -> Iterator[Bytes | None]:
        """Give bytes [start, stop) of the file, safe to copy from inside the context; None if they must be read."""
        if stop > self._size or not self._can_be_guarded or not self._enter():
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
        if self._map is None or not self._populate(start // PAGE_BYTES * PAGE_BYTES, stop):
            return None  # an ordinary read of the same bytes reports the cause, with its offset
        return np.frombuffer(self._map, np.uint8, stop - start, start)

    def _populate(self, start: int, stop: int) -> bool:
        # Not mmap's own madvise, which keeps every other thread of Python waiting for the disk.
        return not _libc.madvise(self._address + start, stop - start, _MADV_POPULATE_READ)


@cache
def _can_be_guarded() -> bool:
    try:
        return int(_LEASE_BREAK_TIME.read_text(encoding="ascii")) >= _MIN_LEASE_S
    except OSError:
        return False
