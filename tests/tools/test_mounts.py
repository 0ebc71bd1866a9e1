"""The slow mounts themselves: other tests believe their counts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.tools.mounts import MakeMounts

SIZE = 3 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    content = os.urandom(SIZE)
    (tmp_path / "file").write_bytes(content)
    return content


def test_every_byte_comes_once_per_node_and_then_from_its_page_cache(
    make_mounts: MakeMounts, tmp_path: Path, content: bytes
) -> None:
    with make_mounts(tmp_path, nodes=2) as mounts:
        for _ in range(2):
            assert (mounts.paths[0] / "file").read_bytes() == content
        assert mounts.counts()["read_bytes"] == mounts.counts()["read_bytes:file"] == SIZE
        assert mounts.counts(1)["read_bytes"] == 0
        mounts.drop("file")
        mounts.reset()
        assert (mounts.paths[0] / "file").read_bytes() == content
        assert mounts.counts()["read_bytes"] == SIZE


def test_direct_io_has_no_page_cache(make_mounts: MakeMounts, tmp_path: Path, content: bytes) -> None:
    with make_mounts(tmp_path, direct_io=True) as mounts:
        for _ in range(2):
            assert (mounts.paths[0] / "file").read_bytes() == content
        assert mounts.counts()["read_bytes"] == 2 * SIZE


@pytest.mark.usefixtures("content")
def test_broken_bytes_fail_until_they_are_mended(make_mounts: MakeMounts, tmp_path: Path) -> None:
    with make_mounts(tmp_path, direct_io=True) as mounts, (mounts.paths[0] / "file").open("rb", buffering=0) as file:
        mounts.break_bytes("file", PAGE, PAGE + 1)
        assert len(os.pread(file.fileno(), PAGE, 0)) == PAGE
        with pytest.raises(OSError, match="Input/output error"):
            os.pread(file.fileno(), PAGE, PAGE)
        mounts.mend()
        assert len(os.pread(file.fileno(), PAGE, PAGE)) == PAGE
