"""What is computed while loading: the files its operands come from."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from shardferry.execute.fill import MAX_OPEN_FILES, OpenFiles
from shardferry.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardferry.storage.base import ReadableFile


class CountingStore:
    """A store that knows which files are open, and how often each was opened."""

    def __init__(self, names: list[str]) -> None:
        self._store = MemoryStore({name: name.encode() for name in names})
        self.open_now: list[str] = []
        self.opened: list[str] = []

    @contextmanager
    def open(self, name: str) -> Iterator[ReadableFile]:
        self.opened.append(name)
        with self._store.open(name) as file:
            self.open_now.append(name)
            yield file
            self.open_now.remove(name)


def test_files_stay_open_between_batches_those_used_last_and_no_longer() -> None:
    names = [f"file {n}" for n in range(MAX_OPEN_FILES + 1)]
    store = CountingStore(names)
    with OpenFiles(store) as files:
        for name in (*names[:MAX_OPEN_FILES], names[0], names[MAX_OPEN_FILES], names[0]):
            with files.open(name) as file:
                assert file.size == len(name)
        assert store.opened == names, "each once"
        assert sorted(store.open_now) == sorted(set(names) - {names[1]}), "the one not used for longest is closed"
        with files.open(names[1]):
            assert store.opened == [*names, names[1]]
    assert not store.open_now


def test_files_are_closed_when_a_batch_fails() -> None:
    store = CountingStore(["a", "b"])

    def fail() -> None:
        with OpenFiles(store) as files:
            for name in ("a", "b"):
                with files.open(name):
                    pass
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not store.open_now
