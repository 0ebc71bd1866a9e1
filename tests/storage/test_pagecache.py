"""What the page cache holds, and filling it: on a mount of its own, whose server counts what is asked of it."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardferry.errors import StorageError
from shardferry.storage import pagecache
from shardferry.storage.filesystem import PAGE_BYTES
from shardferry.storage.pagecache import fetch, missing_spans, read_ahead_bytes, resident_bytes
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.tools.mounts import MakeMounts, SlowMounts

SIZE = 8 * MIB + 100


@pytest.fixture
def mounts(make_mounts: MakeMounts, tmp_path: Path) -> Iterator[SlowMounts]:
    (tmp_path / "file").write_bytes(bytes(SIZE))
    with make_mounts(tmp_path) as mounts:
        yield mounts


@pytest.fixture
def descriptor(mounts: SlowMounts) -> Iterator[int]:
    descriptor = os.open(mounts.paths[0] / "file", os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    yield descriptor
    os.close(descriptor)


def test_nothing_is_there_until_it_is_fetched(mounts: SlowMounts, descriptor: int) -> None:
    assert resident_bytes(descriptor, 0, SIZE) == 0
    fetch(descriptor, MIB, 3 * MIB, np.empty(MIB, np.uint8))
    assert resident_bytes(descriptor, 0, SIZE) == 2 * MIB
    assert resident_bytes(descriptor, MIB, 3 * MIB) == 2 * MIB
    assert resident_bytes(descriptor, 2 * MIB, 4 * MIB) == MIB
    assert resident_bytes(descriptor, 3 * MIB, 3 * MIB) == 0
    assert mounts.counts()["read_bytes"] == 2 * MIB


def test_the_end_of_a_file_counts_with_its_bytes(descriptor: int) -> None:
    fetch(descriptor, 0, SIZE, np.empty(MIB, np.uint8))
    assert resident_bytes(descriptor, 0, SIZE) == SIZE
    assert resident_bytes(descriptor, SIZE - 50, SIZE) == 50


def test_a_range_is_not_called_there_while_a_page_of_it_is_missing(descriptor: int) -> None:
    fetch(descriptor, 0, 1, np.empty(1, np.uint8))
    assert resident_bytes(descriptor, PAGE_BYTES - 10, PAGE_BYTES) == 10
    assert resident_bytes(descriptor, PAGE_BYTES - 10, PAGE_BYTES + 10) == 19
    assert list(missing_spans(descriptor, 0, PAGE_BYTES + 10, step_bytes=PAGE_BYTES)) == [(PAGE_BYTES, PAGE_BYTES + 10)]


def test_only_the_parts_that_lack_something_are_missing(descriptor: int) -> None:
    fetch(descriptor, 2 * MIB, 4 * MIB, np.empty(MIB, np.uint8))
    assert list(missing_spans(descriptor, 0, 5 * MIB, step_bytes=MIB)) == [
        (0, MIB),
        (MIB, 2 * MIB),
        (4 * MIB, 5 * MIB),
    ]
    assert not list(missing_spans(descriptor, 2 * MIB, 4 * MIB, step_bytes=MIB))


def test_mincore_agrees_with_cachestat(descriptor: int) -> None:
    fetch(descriptor, MIB, 2 * MIB, np.empty(MIB, np.uint8))
    for start, stop in ((0, SIZE), (MIB - 1, MIB + 1), (5000, SIZE), (SIZE - 1, SIZE)):
        assert pagecache._mincore(descriptor, start, stop) == pagecache._cachestat(descriptor, start, stop)  # noqa: SLF001 - one of the two is not taken on a given kernel


def test_a_window_is_what_the_kernel_honours(mounts: SlowMounts, descriptor: int) -> None:
    """Ask for everything at once, and it stops there: what `fetch` has to work around."""
    window = read_ahead_bytes(descriptor)
    assert window == MIB  # as the mount sets it
    os.posix_fadvise(descriptor, 0, SIZE, os.POSIX_FADV_WILLNEED)
    os.pread(descriptor, 1, window - 1)  # waits for what was asked for
    assert resident_bytes(descriptor, 0, SIZE) == window
    mounts.drop("file")
    for at in range(0, SIZE, window):
        os.posix_fadvise(descriptor, at, window, os.POSIX_FADV_WILLNEED)
    os.pread(descriptor, 1, SIZE - 1)
    assert resident_bytes(descriptor, SIZE - window, SIZE) == window


def test_a_broken_file_is_an_error(mounts: SlowMounts, descriptor: int) -> None:
    mounts.break_bytes("file", 2 * MIB, 2 * MIB + 1)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        fetch(descriptor, 0, 4 * MIB, np.empty(MIB, np.uint8))


def test_a_file_that_ends_early_is_an_error(descriptor: int) -> None:
    with pytest.raises(StorageError, match=f"ends at byte {SIZE}, but bytes up to {SIZE + 1}"):
        fetch(descriptor, 0, SIZE + 1, np.empty(MIB, np.uint8))


def test_a_device_that_says_nothing_has_the_kernels_default() -> None:
    assert pagecache._read_ahead_of("0:99999999") == 128 * 1024  # noqa: SLF001 - no such device can be made
