"""Where a save can and cannot go: odd paths, and disks that fail beneath it for real."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

import shardferry.torch as sf
from shardferry.errors import InvalidInputError, ShardferryError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save(path: str | Path, value: float = 1.0, num_bytes: int = 8) -> None:
    sf.save_state_dict({"w": torch.full((num_bytes // 4,), float(value))}, path, on_existing="replace")


def saved(path: Path) -> float:
    return float(load_file(path / "model.safetensors")["w"][0])


def test_a_path_may_be_relative_and_end_with_a_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save("a/b/")
    save("./c//", 2)
    save("c/../d", 3)
    assert [saved(tmp_path / name) for name in ("a/b", "c", "d")] == [1, 2, 3]
    assert names_in(tmp_path) == ["a", "c", "d"]


def test_the_current_folder_can_be_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(".")
    assert saved(tmp_path) == 1


@pytest.mark.parametrize("path", ["file", "file/below", "file/"])
def test_a_file_in_the_way_is_named_and_kept(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ShardferryError, match="file"):
        save(f"{tmp_path}/{path}")
    assert (tmp_path / "file").read_text() == "mine"
    assert names_in(tmp_path) == ["file"]


def test_a_link_that_leads_nowhere_yet_names_the_place_to_make(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("steps/10")
    save(tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    assert saved(tmp_path / "steps/10") == 1


def test_a_link_that_leads_in_a_circle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(InvalidInputError, match="leads back to itself"):
        save(tmp_path / "one")


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 300])
def test_what_can_be_no_path_is_refused(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ShardferryError):
        save(path)
    assert names_in(tmp_path) == []


def test_permissions_of_the_target_are_kept_and_new_ones_follow_the_umask(tmp_path: Path) -> None:
    save(tmp_path / "out")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "out").chmod(0o750)
    save(tmp_path / "out", 2)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    (tmp_path / "file").touch()
    assert (tmp_path / "out/model.safetensors").stat().st_mode == (tmp_path / "file").stat().st_mode


def run(*command: str | Path) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{command[0]} needs root and its devices: {done.stderr}")


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem on a disk of 64 MiB that has room for 12: what is written beyond is taken, and lost in the sync."""
    store, disk = tmp_path / "store", tmp_path / "disk"
    store.mkdir()
    disk.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=12m", "none", store)
    try:
        with (store / "image").open("wb") as image:
            image.truncate(64 * MIB)
        run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard", store / "image")
        run("mount", "-o", "loop", store / "image", disk)
        try:
            yield disk
        finally:
            run("umount", disk)
    finally:
        run("umount", store)


def test_a_disk_that_fails_while_it_is_synced_leaves_the_old_checkpoint_and_the_path_can_be_saved_to_again(
    failing_disk: Path,
) -> None:
    save(failing_disk / "out", 1)
    before = (failing_disk / "out/model.safetensors").read_bytes()
    with pytest.raises(StorageError, match=r"syncing .* failed"):
        save(failing_disk / "out", 2, 32 * MIB)
    assert (failing_disk / "out/model.safetensors").read_bytes() == before
    run("mount", "-o", "remount,size=80m", failing_disk.with_name("store"))
    save(failing_disk / "out", 3)
    assert saved(failing_disk / "out") == 3
    assert names_in(failing_disk) == ["lost+found", "out"]


def test_a_disk_that_can_only_be_read_is_named(failing_disk: Path) -> None:
    save(failing_disk / "out", 1)
    run("mount", "-o", "remount,ro", failing_disk)
    with pytest.raises(StorageError, match="Read-only file system"):
        save(failing_disk / "out", 2)
    with pytest.raises(StorageError, match="Read-only file system"):
        save(failing_disk / "new", 2)
    assert saved(failing_disk / "out") == 1
