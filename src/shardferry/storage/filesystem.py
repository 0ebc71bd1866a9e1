"""What the kernel says about where a file lies."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Filesystems on a disk or in the memory of this machine alone.
LOCAL_FILESYSTEMS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs"})
# Filesystems whose files are pages of memory anyway.
MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})


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
