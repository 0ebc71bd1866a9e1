"""`shardferry probe` on a real mount, slow in a known way: here because it needs the machine for itself."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.tools.slow_http import slow_web

from shardferry.cli.main import main
from shardferry.execute.costs import cost_model_for
from shardferry.plan.costmodel import PRESETS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.tools.mounts import MakeMounts

MIB = 1 << 20
FRACTION = 1 / 8


def probed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    with pytest.raises(SystemExit) as ended:
        main(["probe", "--json", *words])
    assert ended.value.code == 0
    told: dict[str, object] = json.loads(capsys.readouterr().out)
    return told


def test_a_slow_mount_is_measured_within_its_bounds_and_remembered(
    make_mounts: MakeMounts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = tmp_path / "files"
    files.mkdir()
    (files / "model.safetensors").write_bytes(os.urandom(MIB) * 256)
    latency_s, rate, streams = 0.005, 200e6, 4
    with make_mounts(files, latency_ms=latency_s * 1e3, rate_mb=rate / 1e6) as mounts:
        told = probed(capsys, "--streams", str(streams), str(mounts.paths[0]))
        counts = mounts.counts()
        model = cost_model_for(mounts.paths[0])
    assert told["why_preset"] == ""
    assert isinstance(told["seconds"], float)
    assert told["seconds"] < 2
    assert counts["read_bytes"] < 200e6
    # Requests wait side by side; a part of a file in spans takes as long as all of it where (span / rate) / FRACTION is
    # one request's share of the latency.
    expected = FRACTION * latency_s * rate / streams
    assert 0.5 < FRACTION * model.seek_bytes / expected < 2
    assert model.node_bandwidth == pytest.approx(rate, rel=0.4)
    assert model.has_page_cache
    assert model.source.startswith("measured")


def test_a_mount_without_a_page_cache_is_remembered_as_such(
    make_mounts: MakeMounts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model.safetensors").write_bytes(os.urandom(MIB) * 128)
    with make_mounts(tmp_path, latency_ms=5, rate_mb=200, direct_io=True) as mounts:
        probed(capsys, "--streams", "4", str(mounts.paths[0] / "model.safetensors"))
        assert not cost_model_for(mounts.paths[0]).has_page_cache


def test_a_web_server_is_measured_and_remembered_by_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    latency_s, rate, streams = 0.02, 200e6, 16
    save_file({"weight": np.ones(192 * MIB, np.uint8)}, tmp_path / "model.safetensors")
    with slow_web(tmp_path, latency_ms=latency_s * 1e3, rate_mb=rate / 1e6) as url:
        told = probed(capsys, "--streams", str(streams), f"{url}/model.safetensors")
        model = cost_model_for(f"{url}/another.safetensors")
    assert told["why_preset"] == ""
    expected = FRACTION * latency_s * rate / streams
    assert 0.5 < FRACTION * model.seek_bytes / expected < 2
    assert not model.has_page_cache
    assert model.source.startswith("measured")
    assert cost_model_for("http://other.invalid/model.safetensors") == PRESETS["object_store"]
