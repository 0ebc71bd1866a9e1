"""The kernel's page cache: what it holds of a file, and bringing in more of it.

Residency is asked of cachestat(2), and of mincore(2) on kernels before 6.5. The kernel tells it only to those who own
the file or may write to it; to others it is unknown. Bytes are brought in by asking ahead in windows the kernel honours
(posix_fadvise and readahead(2) take no more than `read_ahead_kb` of what they are asked, silently) and reading behind
that into one reused scratch buffer: a read waits, says what went wrong, and works on any filesystem.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardferry.errors import StorageError
from shardferry.storage.filesystem import PAGE_BYTES
from shardferry.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardferry.storage.base import Bytes

# linux/mm.h, VM_READAHEAD_PAGES: what a device has that says nothing else.
DEFAULT_READ_AHEAD_BYTES = 128 * KIB
# Looked at with one call of mincore: 16 KiB of answer.
_MINCORE_BYTES = 64 * MIB
# System call numbers of a common table (since Linux 5.1 all architectures but alpha share it).
_CACHESTAT = 451
_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent"))


def resident_bytes(descriptor: int, start: int, stop: int) -> int | None:
    """Return how many of the bytes [start, stop) of an open file the page cache holds; None if the kernel won't say.

    Pages are counted: a range that begins or ends within one holds less of it than is counted.

    Raises:
        OSError: If the kernel reports an error.
    """
    if start >= stop:
        return 0
    pages = _cachestat(descriptor, start, stop)
    if pages is None:
        pages = _mincore(descriptor, start, stop)
    if pages is None or pages >= -(-stop // PAGE_BYTES) - start // PAGE_BYTES:
        return None if pages is None else stop - start
    return min(pages * PAGE_BYTES, stop - start - 1)  # some page of it is missing


def missing_spans(descriptor: int, start: int, stop: int, *, step_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of [start, stop) of which the page cache lacks something, in order.

    Args:
        descriptor: An open file.
        start: Offset of the first byte.
        stop: Offset behind the last.
        step_bytes: Length of a part at most; one that is held in full is left out.
    """
    held = resident_bytes(descriptor, start, stop)
    if held == stop - start:
        return
    for at in range(start, stop, step_bytes):
        end = min(at + step_bytes, stop)
        if not held or resident_bytes(descriptor, at, end) != end - at:
            yield at, end


def read_ahead_bytes(descriptor: int) -> int:
    """Return the most bytes that the kernel fetches when it is asked to fetch ahead once."""
    device = os.fstat(descriptor).st_dev
    return _read_ahead_of(f"{os.major(device)}:{os.minor(device)}")


def fetch(descriptor: int, start: int, stop: int, scratch: Bytes, *, ahead: bool = True) -> int:
    """Bring [start, stop) of an open file into the page cache and return the calls that read it.

    Args:
        descriptor: Opened for reading; `POSIX_FADV_RANDOM` on it keeps the kernel from fetching what lies behind.
        start: Offset of the first byte.
        stop: Offset behind the last.
        scratch: Reused memory; what it holds afterwards is of no use.
        ahead: Whether the kernel is asked to fetch before it is read. It then fills the page cache also on mounts whose
            reads pass it by.

    Raises:
        OSError: If the kernel reports an error.
        StorageError: If the file ends before `stop`.
    """
    requests = 0
    view = scratch.data
    window = read_ahead_bytes(descriptor)
    for first in range(start, stop, len(view)):
        last = min(first + len(view), stop)
        for at in range(first, last, window) if ahead else ():
            os.posix_fadvise(descriptor, at, min(window, last - at), os.POSIX_FADV_WILLNEED)
        done = first
        while done < last:
            count = os.preadv(descriptor, [view[: last - done]], done)
            if not count:
                raise StorageError(f"the file ends at byte {done}, but bytes up to {stop} were expected")
            done += count
            requests += 1
    return requests


def _cachestat(descriptor: int, start: int, stop: int) -> int | None:
    counts = _Counts()
    span = _Range(start, stop - start)
    if _libc.syscall(_CACHESTAT, ctypes.c_uint(descriptor), ctypes.byref(span), ctypes.byref(counts), 0) == 0:
        return int(counts.cached)
    error = ctypes.get_errno()
    if error in (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP):  # older kernel or sandbox, not our file, huge pages
        return None
    raise OSError(error, os.strerror(error))


def _mincore(descriptor: int, start: int, stop: int) -> int | None:
    if not _may_see(descriptor):
        return None
    pages = 0
    stop = min(stop, os.fstat(descriptor).st_size)  # no more can be mapped
    for first in range(start - start % PAGE_BYTES, stop, _MINCORE_BYTES):
        length = min(first + _MINCORE_BYTES, stop) - first
        with mmap.mmap(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=first) as mapping:
            answer = np.empty(-(-length // PAGE_BYTES), np.uint8)
            memory = np.frombuffer(mapping, np.uint8)
            address, size, out = (ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(length), answer.ctypes.data)
            code = _libc.mincore(address, size, ctypes.c_void_p(out))
            del memory  # else the mapping could not be closed
        if code:
            return None
        pages += int((answer & 1).sum())
    return pages


def _may_see(descriptor: int) -> bool:
    """Return whether mincore tells the truth: to others it calls every page resident (Linux 5.2, can_do_mincore)."""
    return os.geteuid() in (0, os.fstat(descriptor).st_uid) or os.access(f"/proc/self/fd/{descriptor}", os.W_OK)


@lru_cache(maxsize=64)
def _read_ahead_of(device: str) -> int:
    places = (
        f"/sys/class/bdi/{device}/read_ahead_kb",
        f"/sys/dev/block/{device}/queue/read_ahead_kb",
        f"/sys/dev/block/{device}/../queue/read_ahead_kb",  # a partition
    )
    for place in places:
        try:
            kib = int(Path(place).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        return max(PAGE_BYTES, kib * KIB)
    return DEFAULT_READ_AHEAD_BYTES
