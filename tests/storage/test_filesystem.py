"""Which filesystem a file lies on."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shardferry.storage.filesystem import UNKNOWN_MOUNT, Mount, filesystem_type, mount_of

if TYPE_CHECKING:
    from tests.tools.mounts import MakeMounts


def opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY)


def test_a_mount_is_told_by_type_source_and_point(
    make_mounts: MakeMounts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with tempfile.TemporaryDirectory(prefix="a \\ b") as odd:  # short: a socket's path is at most 107 bytes
        monkeypatch.setattr(tempfile, "tempdir", odd)
        with make_mounts(tmp_path) as mounts:
            for path in (mounts.paths[0], mounts.paths[0] / "file"):
                descriptor = opened(path)
                told = mount_of(descriptor)
                os.close(descriptor)
                assert told == Mount("fuse.slow_fs", "slow_fs", "/", str(mounts.paths[0]))
                assert told.is_network


def test_memory_is_told_from_disk() -> None:
    descriptor = opened(Path("/dev/shm"))  # noqa: S108 - the one place that is memory on every Linux
    assert filesystem_type(descriptor) == "tmpfs"
    os.close(descriptor)


def test_what_has_no_mount_is_unknown() -> None:
    descriptor, other = os.pipe()
    assert mount_of(descriptor) == UNKNOWN_MOUNT
    for end in (descriptor, other):
        os.close(end)


@pytest.mark.parametrize(
    ("type_", "is_network"),
    [
        *((name, True) for name in ("nfs4", "lustre", "fuse.gcsfuse", "fuse", "9p", "beegfs", "cifs", "gpfs")),
        *((name, False) for name in ("ext4", "overlay", "zfs", "fuseblk", "fuse.fuse-overlayfs", "tmpfs", "unknown")),
    ],
)
def test_network_filesystems_are_told_by_their_type(type_: str, *, is_network: bool) -> None:
    assert Mount(type_, "", "/", "/").is_network is is_network
