"""`shardferry repack`: the same tensors in other files, another dtype, or under other names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import Tensor, expected, file_of, stored, write_files
from tests.checkpoints import tensor as tensor_of
from torch.distributed.checkpoint.state_dict_saver import save

import shardferry
from shardferry.cli.main import main
from shardferry.format.dtypes import BITS

if TYPE_CHECKING:
    from pathlib import Path

STATE = {
    "layer2.w": torch.arange(35.0).reshape(7, 5),
    "layer10.w": torch.arange(24, dtype=torch.int32).reshape(2, 3, 4),
    "s": torch.tensor(2.5),
    "none": torch.zeros(0, 3),
    "q": torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(STATE, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "x"}')
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["repack", *arguments])
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def read(folder: Path) -> dict[str, torch.Tensor]:
    index = shardferry.open_checkpoint(folder)
    return {name: tensor for file in index.files for name, tensor in load_file(folder / file).items()}


def test_one_file_becomes_several_and_one_again(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, str(source), str(tmp_path / "many"), "--max-shard-size", "100", "--json")
    assert code == 0
    assert len(json.loads(out)["files"]) > 1
    for name, tensor in read(tmp_path / "many").items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), STATE[name].reshape(-1).view(torch.uint8)), name
    assert run(capsys, str(tmp_path / "many"), str(tmp_path / "one"))[0] == 0
    assert (tmp_path / "one/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert (tmp_path / "one/config.json").read_text() == '{"model_type": "x"}'


def test_floats_are_cast_and_names_changed(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = ["--rename", r"^layer(\d+)\.=blocks.\1.", "--rename", "^s$=scale"]
    assert run(capsys, str(source), str(tmp_path / "out"), "--dtype", "BF16", *rules)[0] == 0
    saved = read(tmp_path / "out")
    assert set(saved) == {"blocks.2.w", "blocks.10.w", "scale", "none", "q"}
    assert torch.equal(saved["blocks.2.w"], STATE["layer2.w"].bfloat16())
    assert saved["blocks.10.w"].dtype == torch.int32
    assert saved["q"].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("x", "REGEX=REPL"),
        ("(=y", "--rename ("),
        ("absent=y", "changes no name"),
        (r"^layer\d+\.w=w", "the same name w"),
    ],
)
def test_a_rename_that_cannot_be_meant_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rule: str, words: str
) -> None:
    code, _, err = run(capsys, str(source), str(tmp_path / "out"), "--rename", rule)
    assert code == 1
    assert words in err
    assert not (tmp_path / "out").exists()


def test_an_existing_checkpoint_is_refused_unless_it_is_to_be_replaced(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert run(capsys, str(source), out)[0] == 0
    code, _, err = run(capsys, str(source), out)
    assert code == 1
    assert "already holds a checkpoint" in err
    assert run(capsys, str(source), out, "--on-existing", "replace")[0] == 0


def test_torchs_rank_files_become_a_standard_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank, (part, offset) in enumerate([(whole[:, :3], [0, 0]), (whole[:, 3:], [0, 3])], 1):
        info = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": offset}}), "DCP_VERSION": "1.0", "format": "pt"}
        save_file({"w": part.contiguous()}, folder / f"shard-0000{rank}-model-00001-of-00001.safetensors", info)
    assert run(capsys, str(folder), str(tmp_path / "out"))[0] == 0
    assert torch.equal(read(tmp_path / "out")["w"], whole)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_torchs_own_checkpoint_becomes_a_standard_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save({**STATE, "step": 7}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    code, _, err = run(capsys, str(tmp_path / "dcp"), str(tmp_path / "out"), "--max-shard-size", "100")
    assert (code, "1 entries are no tensors and are left out: step" in err) == (0, True)
    saved = read(tmp_path / "out")
    assert set(saved) == set(STATE)
    for name, tensor in saved.items():
        assert tensor.dtype == STATE[name].dtype
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), STATE[name].reshape(-1).view(torch.uint8)), name


RULES = """
[[rules]]
convert = ["layer{n}.w{x*}"]
to = ["blocks.{n}.weight{x*}"]
steps = [{ step = "transpose" }]

[[rules]]
rename = '^absent$'
to = "gone"
back = ['^gone$', "absent"]
"""


def test_a_file_of_rules_converts_and_reversed_leads_back(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    code, out, _ = run(capsys, str(source), str(tmp_path / "out"), "--rules", str(rules), "--json")
    assert code == 0
    assert json.loads(out)["unmatched_rules"] == ["rename ^absent$ -> gone"]
    saved = read(tmp_path / "out")
    assert torch.equal(saved["blocks.2.weight"], STATE["layer2.w"].T)
    assert torch.equal(saved["blocks.10.weight"], STATE["layer10.w"].transpose(0, 1))
    back = [str(tmp_path / "out"), str(tmp_path / "back"), "--rules", str(rules), "--reverse"]
    code, out, _ = run(capsys, *back)
    assert code == 0
    assert "no tensor matched: rename ^gone$ -> absent" in out
    assert (tmp_path / "back/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_rules_that_do_not_fit_write_nothing(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"rules": [{"rename": "^layer.*", "to": "w"}]}))
    code, _, err = run(capsys, str(source), str(tmp_path / "out"), "--rules", str(rules))
    assert code == 1
    assert "would both become w" in err
    rules.write_text("{}")
    code, _, err = run(capsys, str(source), str(tmp_path / "out"), "--rules", str(rules))
    assert (code, "rules.json" in err) == (1, True)
    assert run(capsys, str(source), str(tmp_path / "out"), "--reverse")[0] == 2
    assert not (tmp_path / "out").exists()


EVERY = [tensor_of(f"{dtype}.{part}", dtype, (4, 8)) for dtype in BITS if dtype != "BOOL" for part in "ab"]
EVERY += [Tensor(f"BOOL.{part}", "BOOL", (4, 8), bytes([0, 1] * 16)) for part in "ab"]
JOIN = """
[[rules]]
convert = ["{x}.a", "{x}.b"]
to = ["{x}"]
steps = [{ step = "concatenate", dim = %s }]
"""


@pytest.mark.parametrize("dim", [0, 1])
def test_tensors_of_every_dtype_are_joined_and_taken_apart_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dim: int
) -> None:
    """Also of those that NumPy and torch do not have."""
    write_files(tmp_path / "apart", {"model.safetensors": file_of(EVERY)})
    rules = tmp_path / "rules.toml"
    rules.write_text(JOIN % dim)
    apart, joined, again = (str(tmp_path / name) for name in ("apart", "joined", "again"))
    assert run(capsys, apart, joined, "--rules", str(rules), "--max-shard-size", "300")[0] == 0
    index = shardferry.open_checkpoint(joined)
    assert {name: (info.dtype, info.shape) for name, info in index.tensors.items()} == {
        dtype: (dtype, (8, 8) if dim == 0 else (4, 16)) for dtype in BITS
    }
    assert run(capsys, joined, again, "--rules", str(rules), "--reverse")[0] == 0
    contents = {path.name: path.read_bytes() for path in (tmp_path / "again").glob("*.safetensors")}
    assert stored(shardferry.open_checkpoint(again), contents) == expected(EVERY)


@pytest.mark.parametrize(
    ("dtype", "step", "words"),
    [
        ("F4", 'step = "split", dim = 1, sizes = [2, 6]', ""),
        ("F6_E2M3", 'step = "split", dim = 1, sizes = [4, 4]', ""),
        ("F4", 'step = "split", dim = 1, sizes = [3, 5]', "w.a: the region does not start and end on a byte boundary"),
        ("F6_E3M2", 'step = "split", dim = 1, sizes = [2, 6]', "w.a: the region does not start and end on a byte"),
        ("F6_E3M2", 'step = "chunk", dim = 1 }, { step = "transpose"', "F6_E3M2 packs several elements into a byte"),
    ],
)
def test_packed_elements_are_cut_at_whole_bytes_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, step: str, words: str
) -> None:
    write_files(tmp_path / "source", {"model.safetensors": file_of([tensor_of("w", dtype, (4, 8))])})
    rules = tmp_path / "rules.toml"
    rules.write_text(f'[[rules]]\nconvert = ["w"]\nto = ["w.a", "w.b"]\nsteps = [{{ {step} }}]')
    code, _, err = run(capsys, str(tmp_path / "source"), str(tmp_path / "out"), "--rules", str(rules))
    assert (code, words in err) == (int(bool(words)), True)
    assert (tmp_path / "out").exists() == (not words)
