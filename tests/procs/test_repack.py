"""Several processes repack together, and the result is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path


def repack(*arguments: str) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardferry.cli", "repack", *arguments]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=100)


def test_two_processes_write_what_one_writes(tmp_path: Path) -> None:
    state = {"w": torch.arange(1001.0).reshape(77, 13), "s": torch.tensor(1.5), "v": torch.arange(5)}
    (tmp_path / "source").mkdir()
    save_file(state, tmp_path / "source/model.safetensors", {"format": "pt"})
    repack(str(tmp_path / "source"), str(tmp_path / "one"), "--max-shard-size", "2KB")
    repack(str(tmp_path / "source"), str(tmp_path / "two"), "--max-shard-size", "2KB", "--ranks", "2")
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / side).iterdir()} for side in ("one", "two"))
    assert one == two
