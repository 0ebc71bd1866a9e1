"""What a probe reads, and what it measures of a storage whose costs are known."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn

import pytest

from shardferry.errors import StorageError
from shardferry.plan.fit import Point, fit_points
from shardferry.storage.probe import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    MAX_STREAMS,
    Block,
    blocks_of_store,
    cold_blocks,
    keeps_pages,
    largest_files,
    measure,
    min_blocks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.tools.mounts import MakeMounts

    from shardferry.storage.base import Bytes, OnRead, Place, Rows

MIB = 1 << 20
MAX_BYTES = 200 * 10**6


class SlowStore:
    """Files of zeros behind a latency and one bandwidth for all, in a time of its own. Remembers what was read.

    Time passes when as many reads as there are streams wait together: their latency side by side, their bytes one after
    another. No stall of this machine can be seen.
    """

    def __init__(
        self,
        streams: int,
        *,
        latency_s: float = 0.0,
        rate: float = float("inf"),
        before: Callable[[SlowStore, int], object] = lambda *_: None,
    ) -> None:
        self.streams, self.latency_s, self.rate, self.before = streams, latency_s, rate, before
        self.reads: list[tuple[str, int, int]] = []
        self.now = 0.0
        self.waiting = threading.Barrier(streams, timeout=60)

    def clock(self) -> float:
        return self.now

    def read(self, num_bytes: int) -> None:
        self.before(self, num_bytes)
        if self.waiting.wait() == 0:
            self.now += max(self.latency_s + num_bytes / self.rate, self.streams * num_bytes / self.rate)
        self.waiting.wait()

    @contextmanager
    def open(self, name: str) -> Iterator[SlowFile]:
        yield SlowFile(self, name)


@dataclass
class SlowFile:
    store: SlowStore
    name: str
    size: int = MAX_BLOCKS * BLOCK_BYTES

    def read_into(self, out: Bytes, start: int, on_read: OnRead) -> None:
        self.store.reads.append((self.name, start, start + len(out)))
        self.store.read(len(out))
        on_read(len(out), 1)

    def read_rows(self, out: Bytes, rows: Rows, on_read: OnRead) -> NoReturn:
        raise NotImplementedError

    def read_scattered(self, places: Sequence[Place], on_read: OnRead) -> NoReturn:
        raise NotImplementedError


def break_even(latency_s: float, rate: float, streams: int, fraction: float) -> float:
    """The span at which this part of a file takes as long as all of it, from what `SlowStore` does."""

    def seconds(span: float) -> float:
        return max((latency_s + span / rate) / streams, span / rate)

    low, high = 1.0, 1e9
    for _ in range(100):
        middle = (low * high) ** 0.5
        slower = fraction * seconds(middle) / middle > seconds(BLOCK_BYTES) / BLOCK_BYTES
        low, high = (middle, high) if slower else (low, middle)
    return low


@pytest.mark.parametrize(
    ("latency_s", "rate", "streams"),
    [(0.005, 200e6, 1), (0.005, 200e6, 4), (0.02, 200e6, 16), (0.02, 200e6, 32), (0.05, 200e6, 32)],
)
def test_the_break_even_span_of_a_slow_store_is_told_within_twice(latency_s: float, rate: float, streams: int) -> None:
    store = SlowStore(streams, latency_s=latency_s, rate=rate)
    measured = measure(store, blocks_of_store({"a": 128 * BLOCK_BYTES}), streams=streams, clock=store.clock)
    fit = fit_points([Point(*sample) for sample in measured.samples])
    assert fit is not None
    assert fit.holds
    assert fit.bandwidth == pytest.approx(rate, rel=0.4)
    assert 0.5 < fit.break_even_bytes(1 / 8) / break_even(latency_s, rate, streams, 1 / 8) < 2
    assert measured.read_bytes < MAX_BYTES
    assert measured.seconds < 2


@pytest.mark.parametrize("streams", range(1, MAX_STREAMS + 1))
@pytest.mark.parametrize("spare", [0, 7, MAX_BLOCKS])
def test_every_byte_is_read_at_most_once_and_none_outside_the_blocks(streams: int, spare: int) -> None:
    store = SlowStore(streams)
    few = [Block(file, 2 * at * BLOCK_BYTES) for file in "ab" for at in range(MAX_BLOCKS // 2)]
    blocks = few[: min_blocks(streams) + spare]
    measured = measure(store, blocks, streams=streams, clock=store.clock)
    assert len(measured.samples) >= 3
    assert sum(stop - start for _, start, stop in store.reads) == measured.read_bytes <= MAX_BYTES
    ordered = sorted(store.reads)
    for one, other in pairwise(ordered):
        assert one[0] != other[0] or one[2] <= other[1]
    for file, start, stop in ordered:
        assert Block(file, start // BLOCK_BYTES * BLOCK_BYTES) in blocks
        assert start // BLOCK_BYTES == (stop - 1) // BLOCK_BYTES
    assert measured.seen is not None
    (file, start), num_bytes = measured.seen
    assert (file, start, start + num_bytes) in store.reads


def test_a_store_too_slow_for_long_reads_is_left_alone_in_time() -> None:
    store = SlowStore(4, rate=4e6)
    measured = measure(store, blocks_of_store({"a": 64 * BLOCK_BYTES}), streams=4, clock=store.clock)
    assert measured.seconds < 2
    assert BLOCK_BYTES not in [sample.span_bytes for sample in measured.samples]


def test_a_single_stall_is_no_cost_of_the_storage() -> None:
    stalled: list[int] = []

    def stall(store: SlowStore, num_bytes: int) -> None:
        if num_bytes == MIB and not stalled:
            stalled.append(num_bytes)
            store.now += 0.2

    store = SlowStore(1, latency_s=0.002, rate=400e6, before=stall)
    measured = measure(store, blocks_of_store({"a": 64 * BLOCK_BYTES}), streams=1, clock=store.clock)
    (sample,) = (sample for sample in measured.samples if sample.span_bytes == MIB)
    assert stalled
    assert sample.seconds < 3 * (0.002 + MIB / 400e6)


def test_a_read_that_fails_is_raised() -> None:
    def fail(_: SlowStore, num_bytes: int) -> None:
        if num_bytes >= MIB:
            raise StorageError("the disk is gone")

    with pytest.raises(StorageError, match="the disk is gone"):
        measure(SlowStore(4, before=fail), blocks_of_store({"a": 64 * BLOCK_BYTES}), streams=4)


def test_blocks_of_a_store_are_whole_and_few() -> None:
    assert blocks_of_store({"a": BLOCK_BYTES - 1, "b": 2 * BLOCK_BYTES + 1}) == [Block("b", 0), Block("b", BLOCK_BYTES)]
    assert len(blocks_of_store({"a": 1 << 50})) == MAX_BLOCKS


def test_only_blocks_that_are_not_resident_are_taken(make_mounts: MakeMounts, tmp_path: Path) -> None:
    num_blocks = min_blocks(1) + 1
    (tmp_path / "file").write_bytes(os.urandom(MIB) * (num_blocks * BLOCK_BYTES // MIB))
    with make_mounts(tmp_path) as mounts:
        root = mounts.paths[0]
        everything = [Block("file", at * BLOCK_BYTES) for at in range(num_blocks)]
        assert cold_blocks(root, ["file"], streams=1) == (everything, "")
        with (root / "file").open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no more than is asked for
            os.pread(file.fileno(), 1, 3 * BLOCK_BYTES + 5)
        del everything[3]
        assert cold_blocks(root, ["file"], streams=1) == (everything, "")
        (root / "file").read_bytes()
        mounts.reset()
        blocks, why = cold_blocks(root, ["file"], streams=1)
        assert not blocks
        assert why.startswith("all resident")
        (root / "file").read_bytes()
        assert mounts.counts()["read_bytes"] == 0  # nothing was evicted by looking


@pytest.mark.parametrize(("direct_io", "kept"), [(False, True), (True, False)])
def test_a_mount_without_a_page_cache_is_told(
    make_mounts: MakeMounts, tmp_path: Path, *, direct_io: bool, kept: bool
) -> None:
    (tmp_path / "file").write_bytes(bytes(MIB))
    with make_mounts(tmp_path, direct_io=direct_io) as mounts:
        file = mounts.paths[0] / "file"
        assert len(file.read_bytes()) == MIB
        assert keeps_pages(file, 0, MIB) is kept


def test_holes_and_small_files_are_nothing_to_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(64 * BLOCK_BYTES)
    (tmp_path / "small").write_bytes(b"small")
    blocks, why = cold_blocks(tmp_path, ["sparse", "small"], streams=1)
    assert not blocks
    assert "nothing large enough" in why


def test_the_largest_files_come_first_and_folders_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name, size in (("a", 1), ("b", 3), ("c", 2)):
        (tmp_path / name).write_bytes(bytes(size))
    assert largest_files(tmp_path) == ("b", "c", "a")
