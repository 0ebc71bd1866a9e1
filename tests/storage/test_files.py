"""Where an index is read from: folders and memory answer alike, and say what is wrong with a name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from shardferry.errors import CheckpointChangedError, CheckpointError, CheckpointNotFoundError, StorageError
from shardferry.storage.files import LocalFiles, MemoryFiles

if TYPE_CHECKING:
    from pathlib import Path

    from shardferry.format.files import Files

CONTENTS = {"a.bin": b"0123456789", "sub/b.bin": b"xy"}


@pytest.fixture(params=["local", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    if request.param == "memory":
        return MemoryFiles(CONTENTS)
    (tmp_path / "sub").mkdir()
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    return LocalFiles(str(tmp_path))


def test_the_entries_are_those_directly_inside(files: Files) -> None:
    assert files.names() == ("a.bin", "sub")


def test_a_range_is_read_exactly(files: Files) -> None:
    assert (files.size("a.bin"), files.read("a.bin", 3, 7), files.read("sub/b.bin", 1, 1)) == (10, b"3456", b"")


def test_a_file_that_ends_early_was_changed(files: Files) -> None:
    with pytest.raises(CheckpointChangedError, match=r"a\.bin ended at byte 10 of the 11"):
        files.read("a.bin", 5, 11)


@pytest.mark.parametrize("name", ["c.bin", "a.bin/c", "nul\0"])
def test_an_absent_file_is_named(files: Files, name: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match="is missing"):
        files.size(name)


def test_a_link_without_its_target_is_named_with_it(tmp_path: Path) -> None:
    (tmp_path / "link.safetensors").symlink_to("../blobs/0123abc")
    with pytest.raises(CheckpointNotFoundError, match=r"link\.safetensors is a link to \.\./blobs/0123abc"):
        LocalFiles(str(tmp_path)).size("link.safetensors")


def test_a_folder_is_no_file_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="is a folder"):
        LocalFiles(str(tmp_path)).size("model.safetensors")


def test_a_pipe_is_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no regular file"):
        LocalFiles(str(tmp_path)).size("model.safetensors")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="gone"):
        LocalFiles(str(tmp_path / "gone")).names()


def test_what_the_file_system_refuses_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    place = LocalFiles(str(tmp_path))
    with pytest.raises(StorageError, match="loop"):
        place.size("loop")
    with pytest.raises(StorageError, match="loop"):
        place.read("loop", 0, 1)
    with pytest.raises(StorageError, match="cannot be listed"):
        LocalFiles(str(tmp_path / "loop")).names()
