"""Several processes repack together, and the result is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

if TYPE_CHECKING:
    from pathlib import Path

    from .pool import RankPool


RULES = """
[[rules]]
convert = ["w"]
to = ["w.0", "w.1"]
steps = [{ step = "transpose" }, { step = "split", dim = 1, sizes = [70, 7] }]
"""


def repack(*arguments: str) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardferry.cli", "repack", *arguments]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=100)


def test_two_processes_write_what_one_writes(tmp_path: Path) -> None:
    state = {"w": torch.arange(1001.0).reshape(77, 13), "s": torch.tensor(1.5), "v": torch.arange(5)}
    (tmp_path / "source").mkdir()
    save_file(state, tmp_path / "source/model.safetensors", {"format": "pt"})
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    how = ["--max-shard-size", "2KB", "--rules", str(rules)]
    repack(str(tmp_path / "source"), str(tmp_path / "one"), *how)
    repack(str(tmp_path / "source"), str(tmp_path / "two"), *how, "--ranks", "2")
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / side).iterdir()} for side in ("one", "two"))
    assert one == two
    saved = {
        name: value for path in (tmp_path / "one").glob("*.safetensors") for name, value in load_file(path).items()
    }
    assert torch.equal(torch.cat([saved["w.0"], saved["w.1"]], 1), state["w"].t())


def save_with_torch(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    state = {
        "rows": distribute_tensor(torch.arange(70.0).reshape(10, 7), mesh, [Shard(0), Shard(1)]),
        "copies": distribute_tensor(torch.arange(6).bfloat16(), mesh, [Replicate(), Shard(0)]),
        "plain": torch.arange(4),
    }
    save(state, checkpoint_id=folder)


def test_what_ranks_saved_with_torch_two_processes_repack(ranks: RankPool, tmp_path: Path) -> None:
    ranks(4).run(save_with_torch, str(tmp_path / "dcp"))
    repack(str(tmp_path / "dcp"), str(tmp_path / "out"), "--ranks", "2")
    saved = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(saved["rows"], torch.arange(70.0).reshape(10, 7))
    assert torch.equal(saved["copies"], torch.arange(6).bfloat16())
    assert torch.equal(saved["plain"], torch.arange(4))
