"""Local files: exact bytes, or an error that names the file and the offset; a mapping can never kill the process."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardferry.errors import StorageError
from shardferry.storage import local
from shardferry.storage.base import Place, Rows
from shardferry.storage.filesystem import LOCAL_FILESYSTEMS, MEMORY_FILESYSTEMS, filesystem_type
from shardferry.storage.local import BLOCK_BYTES, LocalFile, LocalStore
from shardferry.storage.mapping import GuardedMapping
from shardferry.storage.pagecache import resident_bytes
from shardferry.storage.placement import advise_huge_pages, bytes_off_band, place_bytes
from shardferry.testing.strategies import intervals
from shardferry.units import MIB

if TYPE_CHECKING:
    from shardferry.geometry.region import Intervals

DATA = np.random.default_rng(0).integers(0, 256, 3 * BLOCK_BYTES + 123, np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "data").write_bytes(DATA.tobytes())
    return folder


def nothing(_num_bytes: int, _num_requests: int) -> None:
    """Count nothing."""


@pytest.mark.parametrize(("start", "size"), [(0, 10), (5, 2 * BLOCK_BYTES), (len(DATA) - 1, 1), (7, 0)])
def test_reads_are_exact(folder: Path, start: int, size: int) -> None:
    out = np.zeros(size, np.uint8)
    counted = []
    with LocalStore(folder).open("data") as file:
        file.read_into(out, start, lambda count, requests: counted.append((count, requests)))
    assert np.array_equal(out, DATA[start : start + size])
    assert sum(count for count, _ in counted) == size


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A folder with a file of 8 MiB of which the page cache holds nothing."""
    path = tmp_path / "data"
    path.write_bytes(DATA[:MIB].tobytes() * 8)
    with path.open("rb") as file:
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if filesystem_type(file.fileno()) not in LOCAL_FILESYSTEMS - MEMORY_FILESYSTEMS:
            pytest.skip("the temporary folder is not on a disk's own filesystem: nothing is fetched in blocks")
        assert resident_bytes(file.fileno(), 0, 8 * MIB) == 0
    return path


def test_what_a_node_wants_a_part_of_is_fetched_to_the_byte(cold: Path) -> None:
    out = np.zeros(4 * MIB, np.uint8)
    with LocalStore(cold.parent).open("data") as file, cold.open("rb") as raw:
        file.read_into(out, MIB, nothing)
        assert resident_bytes(raw.fileno(), MIB, 5 * MIB) == 4 * MIB
        assert resident_bytes(raw.fileno(), 0, 8 * MIB) == 4 * MIB
    assert np.array_equal(out, np.tile(DATA[:MIB], 4))


def test_what_a_node_wants_whole_is_fetched_in_blocks(cold: Path) -> None:
    out = np.zeros(4096, np.uint8)
    with LocalStore(cold.parent, {"data"}).open("data") as file, cold.open("rb") as raw:
        file.read_into(out, 5 * MIB, nothing)
        if resident_bytes(raw.fileno(), 4 * MIB, 6 * MIB) == 4096:
            pytest.skip("this kernel has no huge pages for files")
        assert resident_bytes(raw.fileno(), 4 * MIB, 6 * MIB) == 2 * MIB
        assert resident_bytes(raw.fileno(), 0, 4 * MIB) == 0
    assert np.array_equal(out, DATA[:4096])


def test_a_mapping_fetches_no_bytes_beyond_the_end_and_none_of_a_file_that_shrank(cold: Path) -> None:
    os.truncate(cold, 3 * MIB)
    with LocalStore(cold.parent, {"data"}).open("data") as file:
        os.truncate(cold, MIB)
        with pytest.raises(StorageError, match=f"the file ends at {MIB} bytes"):
            file.read_into(np.zeros(MIB, np.uint8), 2 * MIB, nothing)


@given(intervals(100).filter(bool), st.sampled_from([(1, 7), (1, 4096), (len(DATA) // 100, 4 * MIB)]))
def test_scattered_reads_fill_every_memory_and_drop_the_holes(
    folder: Path, wanted: Intervals, scale: tuple[int, int]
) -> None:
    factor, call_bytes = scale
    places = [Place(start * factor, np.zeros((stop - start) * factor, np.uint8)) for start, stop in wanted]
    counted = []
    small = patch.multiple(local, CALL_BYTES=call_bytes, MAX_VIEWS=3)
    with small, LocalStore(folder).open("data") as file:
        file.read_scattered(places, lambda count, requests: counted.append((count, requests)))
    for place in places:
        assert np.array_equal(place.memory, DATA[place.start :][: len(place.memory)])
    assert sum(count for count, _ in counted) == (wanted[-1][1] - wanted[0][0]) * factor


def test_a_scattered_read_beyond_the_end_is_an_error_naming_file_and_offset(folder: Path) -> None:
    places = [Place(start, np.zeros(10, np.uint8)) for start in (len(DATA) - 50, len(DATA) - 5)]
    with LocalStore(folder).open("data") as file, pytest.raises(StorageError) as caught:
        file.read_scattered(places, nothing)
    assert f"{folder}/data" in str(caught.value)
    assert f"at offset {len(DATA)}" in str(caught.value)


@given(st.data(), st.integers(1, 300), st.integers(0, 40), st.integers(0, 50))
def test_rows_are_what_numpy_slices(
    folder: Path, data: st.DataObject, row_bytes: int, num_rows: int, start: int
) -> None:
    columns = data.draw(intervals(row_bytes).filter(bool))
    width = sum(b - a for a, b in columns)
    out = np.zeros((num_rows, width), np.uint8)
    with LocalStore(folder).open("data") as file:
        file.read_rows(out, Rows(start, row_bytes, columns), nothing)
    table = DATA[start : start + num_rows * row_bytes].reshape(num_rows, row_bytes)
    assert np.array_equal(out, np.concatenate([table[:, a:b] for a, b in columns], axis=1))


def test_rows_longer_than_a_block_and_a_last_row_at_the_end_of_the_file(folder: Path) -> None:
    row_bytes = BLOCK_BYTES + 41
    out = np.zeros((3, 8), np.uint8)
    start = len(DATA) - 2 * row_bytes - 108
    with LocalStore(folder).open("data") as file:
        file.read_rows(out, Rows(start, row_bytes, ((100, 108),)), nothing)
    assert np.array_equal(out[2], DATA[-8:])


def test_a_file_that_ends_early_is_an_error_naming_file_and_offset(folder: Path) -> None:
    with LocalStore(folder).open("data") as file, pytest.raises(StorageError) as caught:
        file.read_into(np.zeros(100, np.uint8), len(DATA) - 10, nothing)
    assert f"{folder}/data" in str(caught.value)
    assert f"at offset {len(DATA)}" in str(caught.value)


def test_a_failing_read_is_an_error_naming_file_and_offset(tmp_path: Path) -> None:
    """A directory opens, and every read of it fails."""
    file = LocalFile(os.open(tmp_path, os.O_RDONLY), str(tmp_path))
    with pytest.raises(StorageError, match="at offset 7 failed: Is a directory"):
        file.read_into(np.zeros(1, np.uint8), 7, nothing)
    file.close()


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"absent.*No such file"), LocalStore(tmp_path).open("absent"):
        pass


def test_a_callback_that_raises_stops_the_read(folder: Path) -> None:
    def stop(_num_bytes: int, _num_requests: int) -> None:
        raise KeyboardInterrupt

    with LocalStore(folder).open("data") as file, pytest.raises(KeyboardInterrupt):
        file.read_into(np.zeros(10, np.uint8), 0, stop)


def truncate_elsewhere(path: Path, size: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", f"import os; os.truncate({str(path)!r}, {size})"])


def test_a_file_cannot_shrink_while_its_mapping_is_copied_from(tmp_path: Path) -> None:
    """Whoever truncates it waits until the copy is done, and no signal ends this process, in any window."""
    path = tmp_path / "data"
    path.write_bytes(DATA.tobytes())
    descriptor = os.open(path, os.O_RDONLY)
    mapping = GuardedMapping(descriptor, len(DATA))
    with mapping.window(0, 10):
        pass
    with mapping.window(0, len(DATA)) as window:
        if window is None:
            pytest.skip("no read lease on this filesystem, so nothing is ever mapped")
        other = truncate_elsewhere(path, 10)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
        assert np.array_equal(window, DATA), "every page is still there"
    other.wait(10)
    assert path.stat().st_size == 10
    with mapping.window(0, len(DATA)) as window:
        assert window is None, "the file has not all of these bytes any more"
    mapping.close()
    os.close(descriptor)


def test_a_lease_waited_for_is_given_up_only_when_no_thread_copies(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(DATA.tobytes())
    descriptor = os.open(path, os.O_RDONLY)
    mapping = GuardedMapping(descriptor, len(DATA))
    with mapping.window(0, 100) as first:
        if first is None:
            pytest.skip("no read lease on this filesystem, so nothing is ever mapped")
        other = truncate_elsewhere(path, 10)
        noticed = threading.Event()
        while not noticed.is_set():
            with mapping.window(0, 100) as second:
                if second is None:
                    noticed.set()
        assert path.stat().st_size == len(DATA)
        assert np.array_equal(first, DATA[:100])
    other.wait(10)
    assert path.stat().st_size == 10
    mapping.close()
    os.close(descriptor)


def test_rows_of_a_file_that_shrank_since_it_was_opened_are_an_error_naming_it(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(DATA.tobytes())
    out = np.zeros((3000, 10), np.uint8)
    with LocalStore(tmp_path).open("data") as file:
        os.truncate(tmp_path / "data", 10)
        with pytest.raises(StorageError, match=r"data' at offset 10 failed: the file ends at 10 bytes"):
            file.read_rows(out, Rows(3, 1000, ((0, 10),)), nothing)
    with LocalStore(tmp_path).open("data") as file, pytest.raises(StorageError, match="the file ends at 10 bytes"):
        file.read_rows(out, Rows(3, 1000, ((0, 10),)), nothing)


def test_nobody_waits_for_a_file_that_is_open_but_not_copied_from(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(DATA.tobytes())
    with LocalStore(tmp_path).open("data") as file:
        out = np.zeros((3000, 10), np.uint8)
        file.read_rows(out, Rows(3, 1000, ((10, 20),)), nothing)
        os.truncate(path, 10)
        with pytest.raises(StorageError, match="the file ends at 10 bytes"):
            file.read_rows(out, Rows(3, 1000, ((10, 20),)), nothing)


def test_a_file_open_for_writing_is_read_and_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(DATA.tobytes())
    with path.open("r+b"):
        descriptor = os.open(path, os.O_RDONLY)
        with GuardedMapping(descriptor, len(DATA)).window(0, 10) as window:
            assert window is None
        os.close(descriptor)


def test_rows_come_out_right_whether_they_are_mapped_or_read(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(DATA.tobytes())
    rows = Rows(3, 1000, ((10, 20), (500, 600)))
    outs = []
    for writer in (False, True):
        requests: list[int] = []
        out = np.zeros((3000, 110), np.uint8)
        held = path.open("r+b") if writer else None
        with LocalStore(tmp_path).open("data") as file:
            file.read_rows(out, rows, lambda _, count, seen=requests: seen.append(count))  # type: ignore[misc]
        if held:
            held.close()
            assert sum(requests) > 0, "a file somebody writes is never mapped"
        outs.append(out)
    assert np.array_equal(outs[0], outs[1])


def test_memory_is_moved_off_the_slow_band_only_there() -> None:
    assert [bytes_off_band(4096 * 5 + delta, 4096 * 2) for delta in (0, 1, 31, 32, 4095)] == [0, 64, 64, 0, 0]
    assert bytes_off_band(64, 40) == 64
    memory = place_bytes(100, 10)
    assert bytes_off_band(memory.ctypes.data, 10) == 0


def untouched() -> np.ndarray:
    """Return memory straight from the kernel, of which no page is there yet."""
    return np.frombuffer(mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def test_small_memory_is_not_advised_unless_it_lies_beside_more() -> None:
    memory, whole = untouched(), untouched()
    start = memory.ctypes.data
    assert advise_huge_pages([(start, 1 << 20)]) == 0
    apart = [(start + at * (2 << 20), 1 << 20) for at in range(8)]
    assert advise_huge_pages(apart) == 0
    beside = [(start + at * ((1 << 20) + 4096), 1 << 20) for at in range(8)]
    assert advise_huge_pages(reversed(beside)) == advise_huge_pages([(whole.ctypes.data, whole.nbytes)])


def test_memory_that_is_there_already_is_not_advised() -> None:
    memory = untouched().copy()
    assert advise_huge_pages([(memory.ctypes.data, memory.nbytes)]) == 0


def disk_bytes_read() -> int:
    """Return the bytes this process has made the kernel fetch from disks."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return int(fields["read_bytes"])


def test_no_more_is_fetched_from_the_disk_than_is_asked_for(tmp_path: Path) -> None:
    """Every other 64 KiB of a file: the kernel's own read-ahead would fetch the rest of it too."""
    path, piece = tmp_path / "data", 64 << 10
    path.write_bytes(bytes(64 * piece))
    with LocalStore(tmp_path).open("data") as file, path.open("rb") as raw:
        if filesystem_type(raw.fileno()) not in LOCAL_FILESYSTEMS:
            pytest.skip("the temporary folder is not on a local filesystem: the kernel reads ahead there")
        os.fsync(raw.fileno())
        os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = disk_bytes_read()
        for at in range(0, 64, 2):
            file.read_into(np.zeros(piece, np.uint8), at * piece, nothing)
        fetched = disk_bytes_read() - before
    if fetched == 0:
        pytest.skip("this file system is not on a disk, or keeps what it is told to drop")
    assert fetched <= 32 * piece * 1.02
