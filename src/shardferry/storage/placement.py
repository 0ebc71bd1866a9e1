"""Where memory lies that bytes are read into: huge pages, and off the slow band.

Both matter more for a warm read than the choice of API (measured, 512 MiB into new memory on one thread: 344 ms
with ordinary pages, 99 ms with huge ones; an address 1 to 31 bytes past the file offset modulo 4096 costs 2.8x on
AMD processors).
"""

from __future__ import annotations

import ctypes
import logging
import threading
from typing import TYPE_CHECKING

import numpy as np

from shardferry.storage.filesystem import PAGE_BYTES
from shardferry.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardferry.storage.base import Bytes

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 * MIB
# Smaller memory has no whole huge page worth the call.
HUGE_ADVICE_MIN_BYTES = 4 * MIB
# malloc rounds a mapping up to pages and puts a header before it: this much lies between two memories at most.
ALLOCATOR_GAP_BYTES = 8 * KIB
# Every advised range can split a mapping in three; vm.max_map_count is 65,530 by default.
MAX_ADVISED_RANGES = 16_000
SLOW_BAND = range(1, 32)
_BAND_PERIOD = 4096
_MOVE_BYTES = 64
# Memory below this is not asked about: it only bridges what lies around it.
SMALL_BYTES = 64 * KIB
_MADV_HUGEPAGE = 14
# Linux 6.1: makes a block huge now. 128 MiB of blocks with one page each: 7 ms, against 62 ms of faults (measured).
_MADV_COLLAPSE = 25

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


# Address and size in bytes.
Memory = tuple[int, int]


class _Advised:
    """How many ranges this process has advised, over all loads."""

    def __init__(self) -> None:
        self.count = 0
        self.lock = threading.Lock()


_advised = _Advised()


def advise_huge_pages(memories: Iterable[Memory]) -> int:
    """Ask the kernel to back memory that nobody has touched yet with huge pages.

    Memories that lie side by side, but for what an allocator puts between them, are advised as one: a model of many
    small tensors then has few page faults too. Only whole 2 MiB blocks inside such a run are advised, so that no
    neighbour in the same page is touched.

    Args:
        memories: Address and size in bytes of each memory, in any order.

    Returns:
        How many ranges the kernel took advice for; none is no error, reads are only slower.
    """
    fresh = sorted(memory for memory in memories if _is_fresh(*memory))
    return sum(_advise(run) for run in _runs(fresh))


def bytes_off_band(address: int, file_offset: int) -> int:
    """Return by how many bytes to move memory at `address` before bytes from `file_offset` are read into it."""
    return _MOVE_BYTES if (address - file_offset) % _BAND_PERIOD in SLOW_BAND else 0


def place_bytes(num_bytes: int, file_offset: int) -> Bytes:
    """Return new uint8 memory of `num_bytes`, well placed for a read from `file_offset`."""
    memory = np.empty(num_bytes + _MOVE_BYTES, np.uint8)
    advise_huge_pages([(memory.ctypes.data, memory.nbytes)])
    skip = bytes_off_band(memory.ctypes.data, file_offset)
    return memory[skip : skip + num_bytes]


def _runs(memories: Iterable[Memory]) -> Iterator[list[Memory]]:
    """Yield the memories, which are in order of their addresses, grouped where they lie side by side."""
    run: list[Memory] = []
    for address, num_bytes in memories:
        if run and address - sum(run[-1]) > ALLOCATOR_GAP_BYTES:
            yield run
            run = []
        run.append((address, num_bytes))
    if run:
        yield run


def _is_fresh(address: int, num_bytes: int) -> bool:
    """Return whether the page in the middle of a memory is not there yet; what is smaller than that may be."""
    if num_bytes < SMALL_BYTES:
        return True
    state = ctypes.c_uint8(1)
    middle = (address + num_bytes // 2) // PAGE_BYTES * PAGE_BYTES
    _libc.mincore(middle, PAGE_BYTES, ctypes.byref(state))
    return not state.value & 1


def _advise(run: Sequence[Memory]) -> bool:
    start, stop = run[0][0], sum(run[-1])
    first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    last = stop // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if stop - start < HUGE_ADVICE_MIN_BYTES or last <= first:
        return False
    with _advised.lock:
        if _advised.count >= MAX_ADVISED_RANGES:
            return False
        _advised.count += 1
    if _libc.madvise(first, last - first, _MADV_HUGEPAGE):
        logger.debug("the kernel refused huge pages for %s bytes: errno %s", last - first, ctypes.get_errno())
        return False
    # An allocator has touched the page before each memory, and a block with one page is filled up with small ones.
    touched = {address // HUGE_PAGE_BYTES for memory in run for address in (memory[0] - 1, sum(memory))}
    for block in touched & set(range(first // HUGE_PAGE_BYTES, last // HUGE_PAGE_BYTES)):
        _libc.madvise(block * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, _MADV_COLLAPSE)
    return True
