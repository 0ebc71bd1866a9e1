"""`shardferry inspect`: what it shows, and the command line's exit codes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.checkpoints import INDEX, file_of, index_of, rank_file, raw_file, sharded, tensor, write_files

from shardferry.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = [tensor(f"layers.{n}.up.weight", "BF16", (64, 16)) for n in range(12)]
SET = sharded(
    {
        "model-00001-of-00002.safetensors": [tensor("embed", "F32", (100, 16)), *LAYERS[:5]],
        "model-00002-of-00002.safetensors": [*LAYERS[5:], tensor("scale", "F32", ())],
    }
)


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


def test_the_summary_counts_repeated_layers_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", write_files(tmp_path, SET))
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert ["layers.*.up.weight", "12", "BF16", "64", "x", "16", "24.0", "KiB"] in lines
    assert ["scale", "1", "F32", "scalar", "4", "B"] in lines
    assert "14 tensors, 30.3 KiB (BF16 24.0 KiB, F32 6.25 KiB)" in out
    assert "2 files" in out


def test_every_tensor_is_listed_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "inspect", "--tensors", write_files(tmp_path, SET))
    lines = [line.split() for line in out.splitlines()]
    assert ["layers.11.up.weight", "BF16", "64", "x", "16", "2.00", "KiB", "model-00002-of-00002.safetensors"] in lines


def test_json_holds_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", "--json", write_files(tmp_path, SET))
    shown = json.loads(out)
    assert code == 0
    assert set(shown) == {"path", "num_tensors", "num_bytes", "tensors", "files", "metadata", "warnings"}
    assert (shown["num_tensors"], shown["num_bytes"]) == (14, 100 * 16 * 4 + 12 * 64 * 16 * 2 + 4)
    entry = shown["tensors"]["embed"]
    file = shown["files"][entry["file"]]
    assert (entry["dtype"], entry["shape"], entry["num_bytes"]) == ("F32", [100, 16], 6400)
    assert entry["span"] == [file["header_bytes"], file["header_bytes"] + 6400]
    assert shown["metadata"] == {"format": "pt"}


def test_boxes_of_one_tensor_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]
    box = tensor("w", "I8", (2, 3))
    write_files(tmp_path, {name: rank_file((box, (2 * rank, 0))) for rank, name in enumerate(names)})
    _, out, _ = run(capsys, "inspect", "--json", tmp_path)
    parts = json.loads(out)["tensors"]["w"]["parts"]
    assert [(part["file"], part["offsets"], part["shape"]) for part in parts] == [
        (names[0], [0, 0], [2, 3]),
        (names[1], [2, 0], [2, 3]),
    ]
    _, out, _ = run(capsys, "inspect", "--tensors", tmp_path)
    assert f"{names[0]} and 1 more" in out


def test_names_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = tensor("[red]x\x1b[2J\n", "U8", (1,))
    _, out, _ = run(capsys, "inspect", write_files(tmp_path, {"model.safetensors": file_of([one])}))
    assert "[red]x\\x1b[*J\\n" in out
    assert "\x1b" not in out


def test_warnings_go_to_the_error_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents = SET | {INDEX: index_of({"embed": "model-00001-of-00002.safetensors"}, total_size=1)}
    code, out, err = run(capsys, "inspect", "--json", write_files(tmp_path, contents))
    assert code == 0
    assert [f"warning: {text}" for text in json.loads(out)["warnings"]] == err.splitlines()


def test_strictness_can_be_switched_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(tmp_path, {"model.safetensors": raw_file({"t": ["U8", [1], [0, 1]]}, b"x")})
    code, _, err = run(capsys, "inspect", tmp_path)
    assert (code, "--no-strict" in err) == (1, True)
    assert run(capsys, "inspect", "--no-strict", tmp_path)[0] == 0


def test_a_variant_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(tmp_path, {"model.fp16.safetensors": file_of(LAYERS)})
    assert "12 tensors" in run(capsys, "inspect", "--variant", "fp16", tmp_path)[1]


def test_our_error_is_one_message_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "inspect", tmp_path / "gone")
    assert (code, out) == (1, "")
    assert err.startswith("CheckpointNotFoundError: ")
    assert "Traceback" not in err


@pytest.mark.parametrize("words", [["inspect"], ["inspekt"], ["inspect", "--frobnicate", "x"]])
def test_a_wrong_command_line_is_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *words)
    assert code == 2
    assert "Usage: shardferry" in err


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_help_lists_the_verbs_and_each_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb in run(capsys, "--help")[1]
    code, out, _ = run(capsys, verb, "--help")
    assert (code, "--json" in out) == (0, True)
