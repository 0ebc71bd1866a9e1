"""`shardferry plan`: what it shows, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.checkpoints import file_of, tensor, write_files

from shardferry.cli.main import main
from shardferry.plan.costmodel import PRESETS, cost_model_to_json

if TYPE_CHECKING:
    from pathlib import Path

    from tests.tools.s3 import Bucket

LAYERS = [tensor(f"layers.{n}.up.weight", "BF16", (64, 16)) for n in range(4)]
NORM = tensor("norm.weight", "F32", (16,))
LAYER_BYTES, NORM_BYTES = 64 * 16 * 2, 16 * 4


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_files(tmp_path, {"model.safetensors": file_of([*LAYERS, NORM])})


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


def test_json_holds_every_strategy_by_rank_and_node(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--mesh", "dp=2,tp=2", "--shard", ".*up.*=0@tp", "--ranks-per-node", 2, "--cost", "object_store")
    code, out, _ = run(capsys, "plan", checkpoint, *words, "--json")
    shown = json.loads(out)
    wanted = 4 * LAYER_BYTES + NORM_BYTES
    assert code == 0
    assert (shown["world_size"], shown["num_nodes"], shown["node_of_rank"]) == (4, 2, [0, 0, 1, 1])
    assert shown["bytes_wanted"] == wanted
    assert shown["rank_wanted"] == [2 * LAYER_BYTES + NORM_BYTES] * 4
    assert list(shown["strategies"]) == ["independent", "whole files", "read-once per node", "read-once per job"]
    for one in shown["strategies"].values():
        assert (len(one["node_bytes"]), len(one["rank_bytes"])) == (2, 4)
        assert sum(one["node_bytes"]) == one["storage_bytes"]
    assert shown["strategies"]["read-once per job"]["storage_bytes"] == wanted
    assert shown["strategies"]["read-once per node"]["storage_bytes"] == 2 * wanted
    assert shown["egress_bytes"] == shown["strategies"][shown["chosen"]]["storage_bytes"]
    assert shown["cost"]["source"] == "preset object_store"


def test_the_table_marks_the_way_taken_and_says_why(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", checkpoint, "--mesh", "dp=4", "--cost", "local")
    assert code == 0
    assert "4 ranks on 1 node; each wants 8.06 KiB" in out
    assert [line.split()[1] for line in out.splitlines() if line.lstrip().startswith("> ")] == ["independent"]
    assert f"at most 8.06 KiB ({4 * LAYER_BYTES + NORM_BYTES} bytes) cross the storage link" in out
    assert out.splitlines()[-1].startswith("Leave read_once at auto: every rank reads for itself")


def test_many_nodes_are_drawn_in_groups(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--mesh", "fsdp=64", "--shard", ".*=0@fsdp", "--ranks-per-node", 1, "--cost", "local")
    _, out, _ = run(capsys, "plan", checkpoint, *words)
    assert sum("####" in line for line in out.splitlines()) <= 16
    assert "nodes 0-3" in out


def test_costs_may_come_from_a_file(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = {**cost_model_to_json(PRESETS["local"]), "shared_bandwidth": 1000.0, "source": "a slow server"}
    (tmp_path / "cost.json").write_text(json.dumps({"cost_model": slow}))
    words = ("--mesh", "dp=4", "--ranks-per-node", 1, "--cost", tmp_path / "cost.json")
    _, out, _ = run(capsys, "plan", checkpoint, *words)
    assert "priced for a slow server" in out
    assert "> read-once per job" in out
    assert "faster (4 times)" in out


def test_a_way_can_be_asked_for(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--mesh", "dp=2", "--cost", "object_store", "--read-once", "never", "--json")
    assert json.loads(run(capsys, "plan", checkpoint, *words)[1])["chosen"] == "independent"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--mesh", "tp"), "like fsdp=8,tp=4"),
        (("--mesh", "tp=2", "--shard", "x=0@tp"), "cuts no tensor"),
        (("--mesh", "tp=2", "--cost", "fast"), "neither a preset"),
    ],
)
def test_what_cannot_be_meant_is_our_error(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], reason: str
) -> None:
    code, out, err = run(capsys, "plan", checkpoint, *words)
    assert (code, out) == (1, "")
    assert err.startswith("InvalidInputError: ")
    assert reason in err


def test_no_framework_is_imported(checkpoint: Path) -> None:
    script = (
        "import sys; from shardferry.cli.main import main\n"
        f"try: main(['plan', {str(checkpoint)!r}, '--mesh', 'dp=2', '--cost', 'local'])\n"
        "except SystemExit as ended: assert not ended.code\n"
        "assert not {'torch', 'jax', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_a_plan_of_a_bucket_is_that_of_the_same_files_in_a_folder(
    checkpoint: Path, bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.put("ckpt/model.safetensors", (checkpoint / "model.safetensors").read_bytes())
    words = ("--mesh", "dp=2,tp=2", "--shard", ".*up.*=0@tp", "--ranks-per-node", 2, "--cost", "object_store", "--json")
    plans = []
    for path in (checkpoint, f"s3://{bucket.name}/ckpt"):
        code, out, err = run(capsys, "plan", path, *words)
        assert code == 0, err
        plans.append({name: value for name, value in json.loads(out).items() if name != "path"})
    assert plans[0] == plans[1]
