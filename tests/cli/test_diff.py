"""`shardferry diff`: what it shows, and the exit code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.checkpoints import file_of, raw_file, sharded, tensor, write_files

from shardferry.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path

ONE, TWO = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
EMBED, LAYER, HEAD = tensor("embed", "F32", (2, 3)), tensor("layer.2.w", "F16", (2, 3)), tensor("head", "I8", (4,))
LATER = LAYER._replace(data=LAYER.data[:-1] + bytes([LAYER.data[-1] ^ 1]))


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return write_files(tmp_path / "a", {"model.safetensors": file_of([EMBED, LAYER, HEAD])})


@pytest.fixture
def b(tmp_path: Path) -> Path:
    """Differs from `a` in every way a checkpoint can."""
    tensors = [tensor("embed", "BF16", (3, 2)), LATER, tensor("new\x1b[2J", "I8", ())]
    return write_files(tmp_path / "b", {"model.safetensors": file_of(tensors)})


def test_the_same_tensors_in_other_files_are_the_same(
    a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_files(tmp_path / "other", sharded({ONE: [HEAD], TWO: [LAYER, EMBED]}))
    assert run(capsys, "diff", a, other) == (0, "same: 3 tensors (40 B)\n", "")


def test_every_difference_is_a_line_of_the_report(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "diff", a, b)
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        "only in A: head",
        "only in B: new\\x1b[2J",
        "dtype: embed: F32 in A, BF16 in B",
        "shape: embed: [2, 3] in A, [3, 2] in B",
        "bytes: layer.2.w: the first to differ is element 5, at [1, 2]",
        "different: 4 tensors; same: 0",
    ]


def test_json_holds_every_difference(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "diff", "--json", a, b)
    assert (code, err) == (1, "")
    assert json.loads(out) == {
        "a": str(a),
        "b": str(b),
        "equal": False,
        "num_alike": 1,
        "num_bytes": 12,
        "only_in_a": ["head"],
        "only_in_b": ["new\x1b[2J"],
        "dtypes": {"embed": ["F32", "BF16"]},
        "shapes": {"embed": [[2, 3], [3, 2]]},
        "bytes": {"layer.2.w": {"offset": 5, "position": [1, 2]}},
    }
    code, out, _ = run(capsys, "diff", "--json", a, a)
    assert (code, json.loads(out)["equal"]) == (0, True)


def test_headers_alone_do_not_tell_bytes_apart(a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_files(tmp_path / "other", {"model.safetensors": file_of([EMBED, LATER, HEAD])})
    assert run(capsys, "diff", a, other)[0] == 1
    assert run(capsys, "diff", "--headers-only", a, other) == (
        0, "same: 3 tensors (names, dtypes and shapes)\n", "",
    )  # fmt: skip


def test_strictness_can_be_switched_off(a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = write_files(tmp_path / "odd", {"model.safetensors": raw_file({"t": ["U8", [1], [0, 1]]}, b"x")})
    code, out, err = run(capsys, "diff", odd, odd)
    assert (code, out, "--no-strict" in err) == (1, "", True)
    assert run(capsys, "diff", "--no-strict", odd, odd)[0] == 0
    assert run(capsys, "diff", "--no-strict", a, odd)[0] == 1


def test_what_cannot_be_opened_is_an_error_not_a_difference(
    a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "diff", a, tmp_path / "gone")
    assert (code, out) == (1, "")
    assert err.startswith("CheckpointNotFoundError: ")


@pytest.mark.parametrize("words", [["diff"], ["diff", "a"], ["diff", "a", "b", "c"], ["diff", "--names", "a", "b"]])
def test_a_wrong_command_line_is_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out, "Usage: shardferry diff" in err) == (2, "", True)
