"""Makes the memory that a measured call is given exist.

A virtual machine gives free blocks of 2 MiB back to its host some seconds after they were freed; getting them again
can take longer than a load does, for whichever loader is given them. So nearly all free memory is kept in use between
calls, and some of it is freed right before each: whoever allocates then gets pages that exist, of either size.

Answers no question itself. Linux only.
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path

MADV_POPULATE_WRITE = 23  # Linux 5.14, asm-generic/mman-common.h
CHUNK_BYTES = 256 << 20
# Never taken: what other programs of the machine may ask for meanwhile.
RESERVE_BYTES = 512 << 20
# Linux gives back what is free two seconds after something was freed (mm/page_reporting.c).
SETTLE_S = 2.2


class AwakeMemory:
    """Memory kept in use between calls, so that it stays with this machine."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._chunks: list[mmap.mmap] = []

    def hold(self) -> None:
        """Take what is free, but for a reserve; do this right after a call, before its memory is given back."""
        while free_bytes() > RESERVE_BYTES + CHUNK_BYTES:
            chunk = mmap.mmap(-1, CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            chunk.madvise(mmap.MADV_HUGEPAGE)
            chunk.madvise(MADV_POPULATE_WRITE)
            self._chunks.append(chunk)

    def free(self, num_bytes: int) -> None:
        """Free this much, once nothing that was freed earlier is being given back any more."""
        self.hold()
        time.sleep(SETTLE_S)
        for _ in range(min(len(self._chunks), -(-num_bytes // CHUNK_BYTES))):
            self._chunks.pop().close()


def free_bytes() -> int:
    """Return the bytes of memory that nobody uses, not even the page cache."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * int(fields["MemFree"].split()[0])
