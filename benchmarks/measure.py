"""What the benchmarks read from the kernel: page cache, bytes from disk, private memory.

Answers no question itself. Linux only.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SAMPLE_SECONDS = 0.02
BLOCK_BYTES = 8 << 20


class Meter:
    """Times a block and samples how far private memory grows in it.

    Private memory is resident anonymous memory and shared memory: the pages of a mapped file are not counted, they
    belong to the page cache. Make it before the barrier that ranks start from: collecting garbage takes longer on some.
    """

    def __init__(self) -> None:
        """Give back memory that nobody uses."""
        give_back_memory()
        self.seconds = 0.0

    def __enter__(self) -> Self:
        self._start_memory = self._peak = private_bytes()
        self._start_disk = disk_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self._stop.set()
        self._thread.join()
        self._peak = max(self._peak, private_bytes())
        self.peak_bytes = self._peak - self._start_memory
        self.disk_bytes = disk_bytes() - self._start_disk

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._peak = max(self._peak, private_bytes())


def give_back_memory() -> None:
    """Give memory that nobody uses back to the kernel, so that whoever allocates next gets pages nobody has touched."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def private_bytes() -> int:
    """Return this process's resident memory that no file backs."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def disk_bytes() -> int:
    """Return the bytes the kernel has fetched from disks for this process."""
    return int(_io()["read_bytes"])


def written_bytes() -> int:
    """Return the bytes of pages that this process has made dirty."""
    return int(_io()["write_bytes"])


def drop_from_page_cache(files: Iterable[Path]) -> None:
    """Drop the files' clean pages; what a rank then reads shows in its `disk_bytes`."""
    os.sync()
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def bring_into_page_cache(files: Iterable[Path]) -> None:
    """Read the files once."""
    block = bytearray(BLOCK_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(block):
                pass


def wake_memory(num_bytes: int) -> None:
    """Touch and free so much memory, so that the next to ask for it gets pages that exist.

    A virtual machine gives freed memory back to its host within seconds; getting it again can take longer than the
    load that is measured, for whichever loader comes first.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for start in range(0, num_bytes, mmap.PAGESIZE):
        memory[start] = 1
    memory.close()


def own_peak_bytes() -> int:
    """Return the most memory this process has had resident."""
    # Not getrusage: its maximum counts the parent's memory at the fork too.
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["VmHWM"].split()[0])


@contextmanager
def timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    """Record how many seconds the context takes under a name."""
    start = time.perf_counter()
    yield
    seconds[step] = time.perf_counter() - start


def _io() -> dict[str, str]:
    return dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())


def file_mappings() -> tuple[tuple[int, int], ...]:
    """Return the address ranges [start, stop) where this process maps a safetensors file."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if ".safetensors" in line:
            start, stop = line.split(" ", 1)[0].split("-")
            found.append((int(start, 16), int(stop, 16)))
    return tuple(found)
