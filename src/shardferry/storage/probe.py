"""Measuring a storage: timed reads of a few sizes, made as a load makes them, of bytes that must come from it.

Works on any `Store`. What may be read is a list of blocks; of a folder on this machine these are blocks of which
the page cache holds nothing, so that the storage is measured, and nothing has to be evicted first. Nothing is evicted
afterwards either: what the probe leaves in the page cache are bytes of the checkpoint.

Each size is read at a regular stride in a region of its own, as a load reads the columns of a matrix: a kernel or a
server that reads ahead does so here too, and no read finds what another has left behind. Sizes take turns, because
storage gives more in one moment than in the next: what it gave in one would else be the cost of one size only.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import accumulate, pairwise, product
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from shardferry.storage.pagecache import resident_bytes
from shardferry.storage.placement import place_bytes
from shardferry.units import KIB, MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from shardferry.storage.base import Bytes, ReadableFile, Store

# More streams than this leave too little for each in 200 MB.
MAX_STREAMS = 32
# One block is the longest read: what local.py asks of the kernel in one call.
BLOCK_BYTES = 4 * MIB
# Blocks taken at most, and needed at least: with fewer there are not two reads of three sizes for each stream.
MAX_BLOCKS = 128
MIN_BLOCKS = 12
MIN_BLOCKS_PER_STREAM = 2
# The probe ends in 2 s: later than this nothing is begun that is not foreseen to end then.
MAX_SECONDS = 1.9
# Reads of each stream in each turn, at least: the first wait for others less than those that follow.
MIN_READS = 2
# Of one size; more streams than 15 read nothing longer than 1 MiB.
MAX_SIZE_BYTES = 120 * MIB
# Reads of one size lie at most so many times their size apart; the longest touch, as when a whole file is read.
MAX_SPREAD = 8
# Turns in which each size is read and timed, with so many reads of each stream; the median over the turns counts.
MAX_TURNS, READS_PER_TURN = 8, 3
# Files looked at, and blocks asked for in each, so that a folder of any size takes milliseconds.
MAX_FILES = 16
MAX_ENTRIES = 10_000
MAX_BLOCKS_LOOKED_AT = 4096


class Size(NamedTuple):
    """One kind of read to time.

    Attributes:
        span_bytes: Bytes of each read.
        share: Part of the blocks in which they lie.
        max_reads: Reads at most, but `MIN_READS` for each stream.
        max_seconds: Of all turns together. Later no turn begins, and no read but a stream's second in a turn.
    """

    span_bytes: int
    share: float
    max_reads: int
    max_seconds: float


# Together at most 180 MiB, and 1.55 s, which leaves room in 2 s for the last reads. The smallest must be near the span
# from which a part of a file is worth reading: where that is 3 KiB, 16 KiB and more missed it by a factor of 1.8. It
# needs many reads: of a virtual disk, 320 took 25 us each at one time and 100 us at another, within a second.
SIZES = (
    Size(4 * KIB, 0.15, 2048, 0.30),
    Size(128 * KIB, 0.20, 160, 0.30),
    Size(MIB, 0.30, 32, 0.35),
    Size(BLOCK_BYTES, 0.35, 30, 0.60),
)


class Block(NamedTuple):
    """`BLOCK_BYTES` of a file that may be read."""

    file: str
    start: int


class Sample(NamedTuple):
    """Reads of one size, timed; see `shardferry.plan.fit.Point`."""

    span_bytes: int
    stride_bytes: int
    streams: int
    seconds: float


class Measurement(NamedTuple):
    """What was measured.

    Attributes:
        samples: One per size for which there were blocks and time enough.
        seen: The start of one read, and its bytes; None if nothing was read.
        read_bytes: Bytes asked for.
        seconds: Wall time of it all.
    """

    samples: tuple[Sample, ...] = ()
    seen: tuple[Block, int] | None = None
    read_bytes: int = 0
    seconds: float = 0.0


def measure(
    store: Store, blocks: Sequence[Block], *, streams: int, clock: Callable[[], float] = time.perf_counter
) -> Measurement:
    """Time reads of several sizes.

    Args:
        store: Where the files of the blocks are.
        blocks: At least `min_blocks(streams)`, in the order of the file; each is read at most once.
        streams: Reads in flight, `MAX_STREAMS` at most.
        clock: Seconds since some moment, asked from all threads.

    Raises:
        StorageError: If a read fails.
    """
    begin = clock()
    with ExitStack() as stack:
        rounds = []
        for size, region in zip(SIZES, _regions(blocks), strict=True):
            # Opened for each size: a kernel reads ahead by what was read of the same open file before.
            files = {name: stack.enter_context(store.open(name)) for name in {block.file for block in region}}
            rounds.append(_Round(files, region, size, streams, clock))
        pool = stack.enter_context(ThreadPoolExecutor(streams))
        buffers = [_touched_buffer() for _ in range(streams)]
        for turn, current in product(range(MAX_TURNS), rounds):
            left_s = begin + MAX_SECONDS - clock()
            # Of a size not read yet, bytes are taken to come as fast as the fastest so far. The smallest alone tells
            # nothing: its time may be all latency.
            known = [current] if current.num_reads else [each for each in rounds if each.num_reads][1:]
            seconds_per_byte = min((each.seconds_per_byte for each in known), default=0.0)
            if seconds_per_byte * current.size.span_bytes * MIN_READS * streams <= left_s:
                current.take_turn(turn, pool, buffers, left_s)
    done = [each for each in rounds if each.num_reads]
    return Measurement(
        tuple(Sample(each.size.span_bytes, each.stride, streams, each.seconds_per_read) for each in done),
        (done[-1].places[0], done[-1].size.span_bytes) if done else None,
        sum(each.num_reads * each.size.span_bytes for each in done),
        clock() - begin,
    )


def blocks_of_store(sizes: Mapping[str, int]) -> list[Block]:
    """Return blocks of files that no page cache of this machine holds, by the files' sizes in bytes."""
    blocks = (Block(file, start) for file, size in sizes.items() for start in _starts(size))
    return [block for block, _ in zip(blocks, range(MAX_BLOCKS), strict=False)]


def min_blocks(streams: int) -> int:
    """Return how many blocks are needed to measure with so many reads in flight."""
    return max(MIN_BLOCKS, MIN_BLOCKS_PER_STREAM * streams + 2)


def cold_blocks(root: Path, files: Sequence[str], *, streams: int) -> tuple[list[Block], str]:
    """Return blocks of which the page cache holds nothing, and, where they are too few, why in words.

    Args:
        root: Folder that `files` are relative to.
        files: Those to look at.
        streams: Reads that will be in flight.

    Raises:
        OSError: If a file cannot be opened.
    """
    blocks: list[Block] = []
    held = 0
    for file in files:
        descriptor = os.open(root / file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for start in _starts(os.fstat(descriptor).st_size):
                resident = resident_bytes(descriptor, start, start + BLOCK_BYTES)
                if resident is None:
                    return [], f"the kernel tells only the owner of '{root / file}' what the page cache holds of it"
                if resident:
                    held += 1
                elif _is_stored(descriptor, start):
                    blocks.append(Block(file, start))
                    if len(blocks) == MAX_BLOCKS:
                        return blocks, ""
        finally:
            os.close(descriptor)
    why = too_few(blocks, streams)
    if why and held:
        free = format_bytes(len(blocks) * BLOCK_BYTES)
        why = f"all resident: only {free} are not in the page cache, and {_needed(streams)} are needed"
    return ([], why) if why else (blocks, "")


def too_few(blocks: Sequence[Block], streams: int) -> str:
    """Return what is wrong with the number of blocks, in words; empty if they are enough."""
    if len(blocks) >= min_blocks(streams):
        return ""
    return f"there is nothing large enough to read: {_needed(streams)} are needed"


def largest_files(folder: Path) -> tuple[str, ...]:
    """Return the names of the largest regular files in a folder, largest first.

    Raises:
        OSError: If the folder cannot be listed.
    """
    with os.scandir(folder) as entries:
        found = [
            (entry.stat().st_size, entry.name)
            for entry, _ in zip(entries, range(MAX_ENTRIES), strict=False)
            if entry.is_file()
        ]
    return tuple(name for _, name in sorted(found, reverse=True)[:MAX_FILES])


def keeps_pages(path: Path, start: int, num_bytes: int) -> bool | None:
    """Return whether the page cache holds what was just read, for one who opens the file anew.

    A FUSE filesystem may have no page cache (direct_io), or have it emptied whenever the file is opened.

    Args:
        path: The file.
        start: Offset of the first byte that was read.
        num_bytes: Bytes that were read.

    Returns:
        None if the kernel does not say.

    Raises:
        OSError: If the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        held = resident_bytes(descriptor, start, start + num_bytes)
    finally:
        os.close(descriptor)
    return None if held is None else held > num_bytes // 2


class _Round:
    """Reads of one size, made by all streams in turns, until the places or the time are used up.

    Attributes:
        size: What is read.
        stride: From the start of one read to that of the next.
        places: Where the reads begin.
        num_reads: Reads made so far.
    """

    def __init__(
        self,
        files: Mapping[str, ReadableFile],
        region: Sequence[Block],
        size: Size,
        streams: int,
        clock: Callable[[], float],
    ) -> None:
        self.size = size
        self.stride, self.places = _places(size, region, streams)
        self.num_reads = 0
        self._files = files
        self._streams = streams
        self._clock = clock
        self._lock = threading.Lock()
        self._used_s = 0.0
        self._times: list[float] = []

    @property
    def seconds_per_read(self) -> float:
        """What a read takes, all streams running: the median over the turns, which a single stall is no part of."""
        return median(self._times)

    @property
    def seconds_per_byte(self) -> float:
        """The same for each of its bytes."""
        return self.seconds_per_read / self.size.span_bytes

    def take_turn(self, turn: int, pool: ThreadPoolExecutor, buffers: Sequence[Bytes], left_s: float) -> None:
        """Make the reads of one turn, if there is one, and begin none after `left_s` seconds but those that must be."""
        waves = len(self.places) // self._streams
        num_turns = max(1, min(MAX_TURNS, waves // READS_PER_TURN))
        first, last = (waves * number // num_turns * self._streams for number in (turn, turn + 1))
        left_s = min(left_s, self.size.max_seconds * (turn + 1) / num_turns - self._used_s)
        if waves == 0 or turn >= num_turns or left_s <= 0:
            return
        begin = self._clock()
        ends: list[float] = []
        places = iter(self.places[first:last])
        outs = [buffer[: self.size.span_bytes] for buffer in buffers]
        for work in [pool.submit(self._read, out, places, ends, begin + left_s) for out in outs]:
            work.result()
        self.num_reads += len(ends)
        self._used_s += ends[-1] - begin
        self._times.append((ends[-1] - begin) / len(ends))

    def _read(self, out: Bytes, places: Iterator[Block], ends: list[float], stop: float) -> None:
        done = 0
        while done < MIN_READS or self._clock() < stop:
            with self._lock:
                place = next(places, None)
            if place is None:
                return
            self._files[place.file].read_into(out, place.start, _ignore)
            with self._lock:
                ends.append(self._clock())
            done += 1


def _touched_buffer() -> Bytes:
    """Return memory as a load has it: placed well, or cold reads take twice as long; and with no page to be made."""
    buffer = place_bytes(BLOCK_BYTES, 0)
    buffer.fill(1)
    return buffer


def _regions(blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
    """Yield the blocks of each size, by its share."""
    ends = [round(len(blocks) * share) for share in accumulate(size.share for size in SIZES)]
    for begin, end in pairwise((0, *ends)):
        yield blocks[begin:end]


def _places(size: Size, region: Sequence[Block], streams: int) -> tuple[int, list[Block]]:
    """Return the stride and the places of the reads of one size; none if there are not two for each stream."""
    per_block = BLOCK_BYTES // size.span_bytes
    fitting = len(region) * per_block
    needed = MIN_READS * streams
    allowed = min(max(size.max_reads, needed), MAX_SIZE_BYTES // size.span_bytes)
    if per_block > 1:  # where there is room for it, not one after another, which a kernel would read ahead of
        allowed = min(allowed, max(fitting // 2, needed))
    count = min(allowed, fitting) // streams * streams
    if count < needed:
        return 0, []
    spread = min(MAX_SPREAD, fitting // count) if per_block > 1 else 1
    places = [
        Block(region[at // per_block].file, region[at // per_block].start + at % per_block * size.span_bytes)
        for at in range(0, count * spread, spread)
    ]
    return spread * size.span_bytes, places


def _needed(streams: int) -> str:
    return format_bytes(min_blocks(streams) * BLOCK_BYTES)


def _starts(size: int) -> range:
    return range(0, min(size, MAX_BLOCKS_LOOKED_AT * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES)


def _is_stored(descriptor: int, start: int) -> bool:
    """Return whether a block has no hole: nobody has to fetch zeros."""
    try:
        return os.lseek(descriptor, start, os.SEEK_HOLE) >= start + BLOCK_BYTES
    except OSError:  # the filesystem cannot tell, so it has no holes
        return True


def _ignore(num_bytes: int, num_requests: int) -> None:
    """Count nothing: reads are counted here."""
