"""What the kernel knows about a file: which bytes are in the page cache, and on which filesystem it lies."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

# cachestat(2), Linux 6.5; the same number on every architecture.
_CACHESTAT = 451
_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent"))


def is_resident(descriptor: int, start: int, stop: int) -> bool:
    """Return whether every page of bytes [start, stop) of an open file is in the page cache.

    False where the kernel cannot say.
    """
    first = start // PAGE_BYTES
    last = -(-stop // PAGE_BYTES)
    wanted = _Range(first * PAGE_BYTES, (last - first) * PAGE_BYTES)
    counts = _Counts()
    failed = _libc.syscall(_CACHESTAT, descriptor, ctypes.byref(wanted), ctypes.byref(counts), 0)
    return not failed and counts.cached >= last - first


def filesystem_type(descriptor: int) -> str:
    """Return the type of the filesystem an open file lies on, e.g. `"ext4"`; `"unknown"` if not listed."""
    device = os.fstat(descriptor).st_dev
    return _filesystem_of(f"{os.major(device)}:{os.minor(device)}")


@lru_cache(maxsize=64)
def _filesystem_of(device: str) -> str:
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    for line in lines:
        # proc_pid_mountinfo(5): id, parent, major:minor, root, mount point, options, optional fields, "-", type
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == device and rest:
            return rest.split()[0]
    return "unknown"
