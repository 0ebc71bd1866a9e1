"""The failing filesystem itself: it is an ordinary one but for what it is told to fail."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from shardferry.storage.renames import LocalFilesystem

from .failing_fs import FailingMount, failing_mount
from .mounts import why_no_mounts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FailingMount]:
    if reason := why_no_mounts():
        pytest.skip(reason)
    (tmp_path / "root").mkdir()
    (tmp_path / "mount").mkdir()
    with failing_mount(tmp_path / "root", tmp_path / "mount") as mounted:
        yield mounted


def test_changes_go_through(mount: FailingMount, tmp_path: Path) -> None:
    content = os.urandom(20_000)
    (mount.path / "a").mkdir()
    (mount.path / "a/file").write_bytes(content)
    (mount.path / "b").mkdir()
    (mount.path / "b/other").write_bytes(b"other")
    LocalFilesystem().exchange(str(mount.path / "a"), str(mount.path / "b"))
    LocalFilesystem().link(str(mount.path / "b/file"), str(mount.path / "b/second"))
    (mount.path / "b/second").rename(mount.path / "third")
    os.truncate(mount.path / "a/other", 2)
    (mount.path / "b/file").unlink()
    (mount.path / "b").rmdir()
    (mount.path / "a").chmod(0o700)
    for folder in (mount.path, tmp_path / "root"):
        assert sorted(path.name for path in folder.rglob("*")) == ["a", "other", "third"]
        assert (folder / "a/other").read_bytes() == b"ot"
        assert (folder / "third").read_bytes() == content
        assert (folder / "a").stat().st_mode & 0o777 == 0o700


def test_one_write_sync_or_rename_fails_and_later_ones_do_not(mount: FailingMount) -> None:
    mount.fail("write", "file", byte=5000)
    mount.fail("fsync", "file", number=2)
    mount.fail("rename", "file")
    with (mount.path / "file").open("wb", buffering=0) as file:
        assert os.pwrite(file.fileno(), bytes(4096), 0) == 4096
        with pytest.raises(OSError, match="Input/output error"):
            os.pwrite(file.fileno(), bytes(4096), 4096)
        assert os.pwrite(file.fileno(), bytes(4096), 4096) == 4096
        os.fsync(file.fileno())
        with pytest.raises(OSError, match="Input/output error"):
            os.fsync(file.fileno())
        os.fsync(file.fileno())
    with pytest.raises(OSError, match="Input/output error"):
        (mount.path / "file").rename(mount.path / "new")
    (mount.path / "file").rename(mount.path / "new")
    assert mount.num_failed() == 3
