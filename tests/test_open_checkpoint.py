"""The public door: paths, strictness, warnings, and what importing the package costs."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import TYPE_CHECKING

import pytest
from tests.checkpoints import INDEX, expected, file_of, index_of, raw_file, sharded, stored, tensor, write_files

import shardferry
from shardferry import CheckpointError, CheckpointNotFoundError, CheckpointWarning, InvalidInputError, StorageError

if TYPE_CHECKING:
    from pathlib import Path

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
ALL = [tensor("w", "BF16", (3, 2)), tensor("b", "F32", (2,))]
SET = sharded({ONE: ALL[:1], TWO: ALL[1:]})
TWINS = raw_file('{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1,"x":2}}', b"?")


@pytest.mark.parametrize("entry", ["", INDEX])
def test_a_folder_and_its_index_open_alike(tmp_path: Path, entry: str) -> None:
    index = shardferry.open_checkpoint(write_files(tmp_path, SET) / entry)
    assert index.root == str(tmp_path)
    assert stored(index, SET) == expected(ALL)


def test_a_path_may_be_text(tmp_path: Path) -> None:
    write_files(tmp_path, {"m.safetensors": file_of(ALL)})
    assert set(shardferry.open_checkpoint(str(tmp_path / "m.safetensors")).tensors) == {"w", "b"}


def test_a_snapshot_of_links_goes_by_the_links_names(tmp_path: Path) -> None:
    write_files(tmp_path, {f"blobs/{number}": content for number, content in enumerate(SET.values())})
    (tmp_path / "snapshots").mkdir()
    for number, name in enumerate(SET):
        (tmp_path / "snapshots" / name).symlink_to(f"../blobs/{number}")
    assert stored(shardferry.open_checkpoint(tmp_path / "snapshots"), SET) == expected(ALL)
    by_file = shardferry.open_checkpoint(tmp_path / "snapshots" / ONE)
    assert list(by_file.files) == [ONE]


def test_a_link_without_target_is_named_with_it(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../../blobs/feed")
    with pytest.raises(CheckpointNotFoundError, match=r"model\.safetensors is a link to \.\./\.\./blobs/feed"):
        shardferry.open_checkpoint(tmp_path)


def test_a_folder_in_the_place_of_a_shard_file_is_named(tmp_path: Path) -> None:
    write_files(tmp_path, SET)
    (tmp_path / TWO).unlink()
    (tmp_path / TWO).mkdir()
    with pytest.raises(CheckpointError, match=rf"{TWO} is a folder"):
        shardferry.open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["gone", "gone.safetensors", "gone.json", "nul\0"])
def test_a_path_without_anything_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match="is missing"):
        shardferry.open_checkpoint(tmp_path / name)


def test_a_path_the_file_system_refuses_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be looked at"):
        shardferry.open_checkpoint(tmp_path / ("x" * 5000))


def test_one_error_lists_everything_and_the_path_as_it_was_given(tmp_path: Path) -> None:
    write_files(tmp_path, SET | {ONE: b"", TWO: b"GGUF" + bytes(20)})
    with pytest.raises(CheckpointError) as caught:
        shardferry.open_checkpoint(tmp_path)
    assert all(word in str(caught.value) for word in (str(tmp_path), ONE, "empty", TWO, "GGUF"))


def test_strictness_can_be_switched_off_and_the_choice_is_warned_about(tmp_path: Path) -> None:
    write_files(tmp_path, {"model.safetensors": TWINS})
    with pytest.raises(CheckpointError, match="strict=False"):
        shardferry.open_checkpoint(tmp_path)
    with pytest.warns(CheckpointWarning, match="duplicate"):
        index = shardferry.open_checkpoint(tmp_path, strict=False)
    assert list(index.tensors) == ["t"]
    assert len(index.warnings) == 1


def test_what_is_odd_is_warned_about_once_at_the_callers_line(tmp_path: Path) -> None:
    write_files(tmp_path, SET | {INDEX: index_of({"w": ONE, "b": TWO}, total_size=5)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        index = shardferry.open_checkpoint(tmp_path)
    assert [(str(one.message), one.filename) for one in caught] == [(index.warnings[0], __file__)]
    assert "total_size" in index.warnings[0]


def test_a_variant_is_chosen_by_name(tmp_path: Path) -> None:
    write_files(tmp_path, {"model.safetensors": b"", "model.fp16.safetensors": file_of(ALL)})
    assert list(shardferry.open_checkpoint(tmp_path, variant="fp16").files) == ["model.fp16.safetensors"]


def test_a_variant_of_a_single_file_makes_no_sense(tmp_path: Path) -> None:
    write_files(tmp_path, {"m.safetensors": file_of(ALL)})
    with pytest.raises(InvalidInputError, match="variant='fp16'"):
        shardferry.open_checkpoint(tmp_path / "m.safetensors", variant="fp16")


@pytest.mark.parametrize("name", shardferry.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(shardferry, name).__name__ == name


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'open'"):
        _ = shardferry.open  # type: ignore[attr-defined]  # the wrong name is the point


def run_python(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout


def test_importing_and_opening_brings_in_no_array_library_and_no_framework(tmp_path: Path) -> None:
    write_files(tmp_path, SET)
    heavy = {"numpy", "torch", "jax", "transformers", "safetensors", "click", "rich"}
    program = (
        f"import sys, shardferry; shardferry.open_checkpoint({str(tmp_path)!r}); print(*({heavy} & set(sys.modules)))"
    )
    assert run_python(program).strip() == ""


def test_importing_takes_less_than_150_ms() -> None:
    program = "import time; t = time.process_time(); import shardferry; print(time.process_time() - t)"
    assert min(float(run_python(program)) for _ in range(3)) < 0.15  # processor time: the machine may be busy
