"""Several processes repack together, and the result is the same."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardferry.cli.repack import BUDGET_BYTES
from shardferry.units import KIB

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


MEASURED = """
import sys, threading
from pathlib import Path
from shardferry.cli.main import main

def private():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))

done, peak, before = threading.Event(), [0], private()

def sample():
    while not done.wait(0.01):
        peak[0] = max(peak[0], private())

thread = threading.Thread(target=sample)
thread.start()
try:
    main()
finally:
    done.set()
    thread.join()
    print("grown", peak[0] - before)
"""


def test_rules_take_no_more_memory_than_the_budget_however_large_a_tensor_is(tmp_path: Path) -> None:
    """One tensor of three times the budget, transposed and cut in two; its file has no bytes on disk."""
    rows, columns = 24 * KIB, 16 * KIB
    (tmp_path / "source").mkdir()
    header = json.dumps({"w": {"dtype": "F16", "shape": [rows, columns], "data_offsets": [0, 2 * rows * columns]}})
    with (tmp_path / "source/model.safetensors").open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header.encode())
        out.truncate(8 + len(header) + 2 * rows * columns)
        out.seek(8 + len(header) + 2 * columns)  # the first element of row 1
        out.write(struct.pack("<e", 1.5))
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES.replace("[70, 7]", f"[{rows - 8}, 8]"))
    arguments = ["repack", str(tmp_path / "source"), str(tmp_path / "out"), "--rules", str(rules)]
    run = subprocess.run(
        [sys.executable, "-c", MEASURED, *arguments], check=True, capture_output=True, text=True, timeout=200
    )
    grown = int(run.stdout.splitlines()[-1].split()[-1])
    assert 2 * rows * columns == 3 * BUDGET_BYTES
    assert grown < BUDGET_BYTES
    with safe_open(tmp_path / "out/model.safetensors", "pt") as saved:
        assert saved.get_slice("w.0").get_shape() == [columns, rows - 8]
        assert saved.get_slice("w.1").get_shape() == [columns, 8]
        assert saved.get_slice("w.0")[:2, :3].tolist() == [[0.0, 1.5, 0.0], [0.0, 0.0, 0.0]]
    shutil.rmtree(tmp_path / "out")  # pytest would keep it
