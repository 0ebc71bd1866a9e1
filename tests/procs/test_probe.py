"""`shardferry probe` of real storage, slow in a known way: here because it needs the machine for itself.

What it tells is compared with real time, so a machine that something else keeps busy gets three attempts.
"""

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
from shardferry.plan.costmodel import PRESETS, CostModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.tools.mounts import MakeMounts

MIB = 1 << 20
FRACTION = 1 / 8
ATTEMPTS = 3


def probed(
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    loaded: str,
    good: Callable[[dict[str, object], CostModel], bool],
    before: Callable[[], object] = bool,
) -> tuple[dict[str, object], CostModel]:
    """Probe until it is good.

    Args:
        capsys: Takes what the probe prints.
        words: Its arguments.
        loaded: A path whose loads are to know of it.
        good: Whether what the probe told, and what loads reckon with, is right.
        before: Called before each attempt.

    Returns:
        What was good.
    """
    tried = []
    for _ in range(ATTEMPTS):
        before()
        with pytest.raises(SystemExit) as ended:
            main(["probe", "--json", *words])
        assert ended.value.code == 0
        tried.append((json.loads(capsys.readouterr().out), cost_model_for(loaded)))
        if good(*tried[-1]):
            return tried[-1]
    pytest.fail(f"no attempt was good: {tried}")


def foretells(model: CostModel, *, latency_s: float, rate: float, streams: int) -> bool:
    """Return whether a model tells the break-even span within 2x.

    Requests wait side by side; a part of a file in spans takes as long as all of it where (span / rate) / FRACTION is
    one request's share of the latency.
    """
    expected = FRACTION * latency_s * rate / streams
    return 0.5 < FRACTION * model.seek_bytes / expected < 2


def test_a_slow_mount_is_measured_within_its_bounds_and_remembered(
    make_mounts: MakeMounts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = tmp_path / "files"
    files.mkdir()
    (files / "model.safetensors").write_bytes(os.urandom(MIB) * 256)
    latency_s, rate, streams = 0.005, 200e6, 4

    def good(told: dict[str, object], model: CostModel) -> bool:
        assert isinstance(told["seconds"], float)
        in_bounds = told["seconds"] < 2 and 0.6 < model.node_bandwidth / rate < 1.4
        return in_bounds and foretells(model, latency_s=latency_s, rate=rate, streams=streams)

    with make_mounts(files, latency_ms=latency_s * 1e3, rate_mb=rate / 1e6) as mounts:

        def forget() -> None:
            mounts.drop("model.safetensors")
            mounts.reset()

        root = str(mounts.paths[0])
        told, model = probed(capsys, ["--streams", str(streams), root], root, good, forget)
        assert mounts.counts()["read_bytes"] < 200e6
    assert told["why_preset"] == ""
    assert model.has_page_cache
    assert model.source.startswith("measured")


def test_a_mount_without_a_page_cache_is_remembered_as_such(
    make_mounts: MakeMounts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model.safetensors").write_bytes(os.urandom(MIB) * 128)
    with make_mounts(tmp_path, latency_ms=5, rate_mb=200, direct_io=True) as mounts:
        file = str(mounts.paths[0] / "model.safetensors")
        _, model = probed(capsys, ["--streams", "4", file], file, lambda told, _: not told["why_preset"])
    assert not model.has_page_cache


def test_a_web_server_is_measured_and_remembered_by_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    latency_s, rate, streams = 0.02, 200e6, 16
    save_file({"weight": np.ones(192 * MIB, np.uint8)}, tmp_path / "model.safetensors")

    def good(_: dict[str, object], model: CostModel) -> bool:
        return foretells(model, latency_s=latency_s, rate=rate, streams=streams)

    with slow_web(tmp_path, latency_ms=latency_s * 1e3, rate_mb=rate / 1e6) as url:
        words = ["--streams", str(streams), f"{url}/model.safetensors"]
        told, model = probed(capsys, words, f"{url}/another.safetensors", good)
    assert told["why_preset"] == ""
    assert not model.has_page_cache
    assert model.source.startswith("measured")
    assert cost_model_for("http://other.invalid/model.safetensors") == PRESETS["object_store"]
