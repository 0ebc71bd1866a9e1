"""The tests that every place of files must pass, for pytest. Subclass `StoreTests` in a test module.

    class TestMemory(StoreTests):
        def place(self, contents: Mapping[str, bytes]) -> Held:
            return Held(MemoryFiles(contents), lambda files: MemoryStore(contents))

The places are those of `shardferry.storage`.
"""

# ruff: noqa: D102 - the names of the tests say it, and small sizes are what they are about

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from shardferry.errors import CheckpointNotFoundError, ShardferryError, StorageError
from shardferry.format.index import FileInfo
from shardferry.storage.base import Place, Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from shardferry.format.files import Files
    from shardferry.storage.base import ReadableFile, Store

SIZE = 3_000_001
CONTENT = bytes(np.random.default_rng(7).integers(0, 256, SIZE, np.uint8))


class Held(NamedTuple):
    """A place under test.

    Attributes:
        files: Reads headers.
        open_store: Makes what reads tensors.
    """

    files: Files
    open_store: Callable[[Mapping[str, FileInfo]], Store]

    def open(self, name: str) -> AbstractContextManager[ReadableFile]:
        """Open a file as a job does that has read its header."""
        info = FileInfo(self.files.size(name), 8, "", self.files.version(name))
        return self.open_store({name: info}).open(name)


class StoreTests(ABC):
    """What every place of files must do."""

    @abstractmethod
    def place(self, contents: Mapping[str, bytes]) -> Held:
        """Return a place that holds these files, some of them in folders."""

    @pytest.fixture
    def held(self) -> Held:
        return self.place({"a.safetensors": CONTENT, "sub/b.safetensors": b"12345678", "empty.safetensors": b""})

    def test_sizes_are_those_of_the_files(self, held: Held) -> None:
        sizes = [held.files.size(name) for name in ("a.safetensors", "sub/b.safetensors", "empty.safetensors")]

        assert sizes == [SIZE, 8, 0]

    @pytest.mark.parametrize(("start", "stop"), [(0, 8), (0, SIZE), (5, 140_000), (SIZE - 1, SIZE)])
    def test_a_range_of_a_header_is_read_exactly(self, held: Held, start: int, stop: int) -> None:
        assert held.files.read("a.safetensors", start, stop) == CONTENT[start:stop]
        assert held.files.read("a.safetensors", start, stop) == CONTENT[start:stop]

    def test_a_missing_file_is_said_to_be_missing(self, held: Held) -> None:
        with pytest.raises(CheckpointNotFoundError, match=r"c\.safetensors"):
            held.files.size("c.safetensors")

    @pytest.mark.parametrize(("start", "count"), [(0, SIZE), (17, 1), (1_000_003, 1_999_998)])
    def test_memory_is_filled_with_the_bytes_from_an_offset_on(self, held: Held, start: int, count: int) -> None:
        out = np.zeros(count, np.uint8)
        read: list[int] = []

        with held.open("a.safetensors") as file:
            assert file.size == SIZE
            file.read_into(out, start, lambda num_bytes, _: read.append(num_bytes))

        assert out.tobytes() == CONTENT[start : start + count]
        assert sum(read) == count

    def test_several_memories_are_filled_and_the_holes_between_them_dropped(self, held: Held) -> None:
        spans = [(3, 10), (10, 11), (500, 1_500_000), (1_500_100, SIZE)]
        places = [Place(start, np.zeros(stop - start, np.uint8)) for start, stop in spans]

        with held.open("a.safetensors") as file:
            file.read_scattered(places, _ignore)

        assert [place.memory.tobytes() for place in places] == [CONTENT[start:stop] for start, stop in spans]

    def test_wanted_columns_of_rows_are_read(self, held: Held) -> None:
        out = np.zeros((900, 30), np.uint8)

        with held.open("a.safetensors") as file:
            file.read_rows(out, Rows(41, 3000, ((100, 110), (2900, 2920))), _ignore)

        table = np.frombuffer(CONTENT, np.uint8)[41 : 41 + 900 * 3000].reshape(900, 3000)
        assert np.array_equal(out, np.concatenate([table[:, 100:110], table[:, 2900:2920]], axis=1))

    def test_several_threads_may_read_one_file(self, held: Held) -> None:
        out = np.zeros(SIZE, np.uint8)
        step = 100_000

        with held.open("a.safetensors") as file, ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda at: file.read_into(out[at : at + step], at, _ignore), range(0, SIZE, step)))

        assert out.tobytes() == CONTENT

    def test_reading_past_the_end_is_an_error_that_names_the_file(self, held: Held) -> None:
        with held.open("sub/b.safetensors") as file, pytest.raises(ShardferryError, match=r"b\.safetensors"):
            file.read_into(np.zeros(9, np.uint8), 0, _ignore)

    def test_what_a_callback_raises_ends_the_read(self, held: Held) -> None:
        def stop(*_: int) -> None:
            raise StorageError("enough")

        with held.open("a.safetensors") as file, pytest.raises(StorageError, match="enough"):
            file.read_into(np.zeros(SIZE, np.uint8), 0, stop)


def _ignore(num_bytes: int, num_requests: int) -> None:
    pass
