"""`shardferry verify`: everything that is wrong, and the exit code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.checkpoints import INDEX, index_of, sharded, tensor, write_files

from shardferry.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path

ONE, TWO, THREE = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))
SET = sharded({ONE: [tensor("a", "F16", (4,))], TWO: [tensor("b", "F16", (4,))], THREE: [tensor("c", "I8", (2,))]})


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


def test_a_good_checkpoint_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "verify", write_files(tmp_path, SET)) == (0, "ok (files read: 3, tensors found: 3)\n", "")


def test_everything_wrong_is_printed_not_only_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight_map = {"a": ONE, "b": TWO, "c": ONE, "d": "model-00004-of-00003.safetensors"}
    contents = SET | {ONE: SET[ONE] + b"?", TWO: b"", INDEX: index_of(weight_map), THREE: SET[THREE]}
    code, out, _ = run(capsys, "verify", write_files(tmp_path, contents))
    assert code == 1
    lines = out.splitlines()
    for words in (
        ("error:", ONE, "trailing"),
        ("error:", TWO, "empty"),
        ("error:", THREE, "not used"),
        ("error:", INDEX, "'c'", ONE),
        ("missing:", "model-00004-of-00003.safetensors"),
    ):
        assert any(all(word in line for word in words) for line in lines), words
    assert lines[-1].startswith("5 wrong")


def test_a_leftover_shard_file_fails_although_it_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(tmp_path, SET | {"model-00001-of-00002.safetensors": b""})
    assert run(capsys, "verify", tmp_path)[0] == 1
    assert run(capsys, "inspect", tmp_path)[0] == 0


def test_what_is_only_odd_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents = SET | {INDEX: index_of({"a": ONE, "b": TWO, "c": THREE}, total_size=3)}
    code, out, _ = run(capsys, "verify", write_files(tmp_path, contents))
    assert (code, out.startswith("warning: "), out.count("total_size")) == (0, True, 1)


def test_json_holds_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(tmp_path, SET)
    (tmp_path / TWO).unlink()
    code, out, _ = run(capsys, "verify", "--json", tmp_path)
    result = json.loads(out)
    assert code == 1
    assert (result["ok"], result["num_files"], result["num_tensors"]) == (False, 2, 2)
    assert [(one["severity"], one["file"]) for one in result["problems"]] == [("missing", TWO)]


def test_a_variant_can_be_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(tmp_path, {"model.fp8.safetensors": b"", "model.safetensors": SET[ONE]})
    assert run(capsys, "verify", tmp_path)[0] == 0
    assert run(capsys, "verify", "--variant", "fp8", tmp_path)[0] == 1


def test_a_path_without_anything_is_our_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "verify", tmp_path / "gone")
    assert (code, err.startswith("CheckpointNotFoundError: ")) == (1, True)
