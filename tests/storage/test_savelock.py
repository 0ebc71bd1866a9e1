"""Whether another save to the same path is running."""

from __future__ import annotations

import contextlib
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from shardferry.errors import StorageError
from shardferry.storage.savelock import QUIET_S, is_held, myself, take_lock

if TYPE_CHECKING:
    from pathlib import Path

ME = myself()
OTHER_HOST = ME._replace(host="gpu-7", boot="another")
OTHER_CONTAINER = ME._replace(pids="pid:[7]")
GONE = ME._replace(started="1")


@pytest.mark.parametrize("owner", [ME, OTHER_HOST, OTHER_CONTAINER, GONE])
def test_the_kernels_word_is_enough_where_it_knows_of_all_locks(tmp_path: Path, owner: object) -> None:
    assert isinstance(owner, type(ME))
    assert not is_held(owner, ME, locked=True, one_kernel=True, quiet_s=0)
    lock = tmp_path / "lock"
    take_lock(str(lock), ()).close()
    take_lock(str(lock), (str(tmp_path),)).release()
    assert not lock.exists()


@pytest.mark.parametrize(("owner", "held"), [(ME, True), (GONE, False)])
def test_without_locks_the_process_that_is_named_is_looked_for(owner: object, *, held: bool) -> None:
    assert isinstance(owner, type(ME))
    assert is_held(owner, ME, locked=None, one_kernel=True, quiet_s=0) is held


@pytest.mark.parametrize("owner", [OTHER_HOST, OTHER_CONTAINER])
@pytest.mark.parametrize("locked", [True, None])
@pytest.mark.parametrize("quiet_s", [0.0, QUIET_S + 1.0])
def test_what_another_kernel_may_know_counts_until_nothing_has_changed_for_long(
    owner: object, quiet_s: float, *, locked: bool | None
) -> None:
    assert isinstance(owner, type(ME))
    assert is_held(owner, ME, locked=locked, one_kernel=False, quiet_s=quiet_s) is (quiet_s < QUIET_S)


def test_a_held_lock_is_refused_with_its_holder_and_file(tmp_path: Path) -> None:
    held = take_lock(str(tmp_path / "lock"), ())
    with pytest.raises(StorageError, match=rf"by process {os.getpid()} on .*'{tmp_path}/lock'"):
        take_lock(str(tmp_path / "lock"), ())
    held.release()


def test_what_is_no_lock_file_of_ours_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"{")
    take_lock(str(tmp_path / "lock"), ()).release()


def test_of_many_that_want_it_one_has_it(tmp_path: Path) -> None:
    """A lock file that its holder removes while others open it makes no second holder."""
    holders: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            with contextlib.suppress(StorageError):
                lock = take_lock(str(tmp_path / "lock"), ())
                holders.append(number)
                most.append(len(holders))
                holders.remove(number)
                lock.release()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4), timeout=60))
    assert max(most) == 1


def test_a_lock_that_cannot_be_written_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        take_lock(str(tmp_path / "lock"), ())
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    take_lock(str(tmp_path / "lock"), ()).release()
