"""`shardferry probe`: where nothing can be measured. What is measured is in tests/procs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from shardferry.cli.main import main
from shardferry.execute.costs import cost_model_for, named_cost_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


def test_a_folder_without_large_files_gets_its_preset_and_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(b"small")
    code, out, _ = run(capsys, "probe", tmp_path)
    assert code == 0
    assert "preset, not measured: " in out
    assert "kept in" not in out
    assert not (tmp_path / "cache").exists()


def test_json_is_a_file_for_a_cost_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "probe", "--json", "--streams", 3, tmp_path)
    told = json.loads(out)
    assert code == 0
    assert (told["streams"], told["samples"], told["fit"], told["kept"]) == (3, [], None, None)
    assert told["why_preset"]
    file = tmp_path / "costs.json"
    file.write_text(out)
    model = named_cost_model(str(file))
    assert told["why_preset"] in model.source
    assert model.seek_bytes == cost_model_for(tmp_path).seek_bytes


def test_a_path_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "probe", tmp_path / "nowhere")
    assert code == 1
    assert "nowhere" in err
