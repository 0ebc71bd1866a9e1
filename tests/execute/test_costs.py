"""Which cost model a path gets, whatever is in the cache of what was measured."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shardferry.errors import InvalidInputError, StorageError
from shardferry.execute.costs import MAX_AGE_S, cost_model_for, mount_below, named_cost_model, remember
from shardferry.plan.costmodel import PRESETS, cost_model_to_json
from shardferry.storage.filesystem import Mount

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.tools.mounts import MakeMounts

MEASURED = replace(PRESETS["network_mount"], seek_bytes=12345, source="measured by a test")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_without_a_measurement_the_filesystem_decides(make_mounts: MakeMounts, tmp_path: Path) -> None:
    assert cost_model_for(Path("/dev/shm")) == PRESETS["memory"]  # noqa: S108 - memory on every Linux
    with make_mounts(tmp_path) as mounts:
        assert cost_model_for(mounts.paths[0]) == PRESETS["network_mount"]


def test_what_was_measured_counts_for_its_mount_alone(tmp_path: Path, cache: Path) -> None:
    file = remember(mount_below(tmp_path), MEASURED)
    assert file.is_relative_to(cache / "shardferry")
    assert list(file.parent.iterdir()) == [file]  # no temporary file is left
    (tmp_path / "below").mkdir()
    for path in (tmp_path, tmp_path / "below"):
        assert cost_model_for(path) == MEASURED
    assert cost_model_for("/proc") == PRESETS["local"]
    remember(mount_below(tmp_path), replace(MEASURED, seek_bytes=1))
    assert cost_model_for(tmp_path).seek_bytes == 1


def test_each_part_of_a_mounts_identity_counts(tmp_path: Path) -> None:
    here = mount_below(tmp_path)
    others = [here._replace(**{name: "other"}) for name in Mount._fields]
    files = {remember(mount, MEASURED) for mount in [here, *others]}
    assert len(files) == 5


def test_a_cache_home_that_is_relative_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert remember(mount_below(tmp_path), MEASURED).is_relative_to(tmp_path / "home" / ".cache")


def _huge(file: Path) -> None:
    file.write_bytes(b" " * (1 << 20))


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _nonsense(file: Path) -> None:
    file.write_text(json.dumps({"cost_model": cost_model_to_json(MEASURED) | {"node_bandwidth": -5}}))


def _old(file: Path) -> None:
    before = time.time() - MAX_AGE_S - 60
    os.utime(file, (before, before))


def _cut(file: Path) -> None:
    os.truncate(file, 10)


@pytest.mark.parametrize("spoil", [_huge, _folder, _pipe, _nonsense, _old, _cut])
def test_a_spoilt_measurement_gives_the_preset_and_says_so(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    file = remember(mount_below(tmp_path), MEASURED)
    preset = PRESETS["local"] if not mount_below(tmp_path).is_network else PRESETS["network_mount"]
    spoil(file)
    found = cost_model_for(tmp_path)
    assert replace(found, source=preset.source) == preset
    assert found.source.startswith(f"{preset.source} (")


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        cost_model_for(tmp_path / "nowhere")


def test_a_cost_model_has_a_presets_name_or_a_files(tmp_path: Path) -> None:
    assert named_cost_model("object_store") == PRESETS["object_store"]
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"cost_model": cost_model_to_json(MEASURED)}))
    assert named_cost_model(str(file)) == MEASURED
    with pytest.raises(
        InvalidInputError, match=r"'cloud' is neither a preset \(local, memory, network_mount, object_st"
    ):
        named_cost_model("cloud")
    with pytest.raises(InvalidInputError, match="is no regular file"):
        named_cost_model(str(tmp_path))
