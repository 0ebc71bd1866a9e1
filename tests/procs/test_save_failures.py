"""A save that fails on one rank fails on all, publishes nothing, and the next one works."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardferry.torch as sf
from shardferry.errors import RankFailedError, ShardferryError

if TYPE_CHECKING:
    from pathlib import Path

    from .pool import RankPool

ROWS = 64
# A dead rank is named within 2 s; a loaded machine may take longer. The time-out of the save is 600 s.
TOLD_WITHIN_S = 20


def state(dim: int = 0, value: float = 1.0) -> dict[str, torch.Tensor]:
    """Return a tensor cut over all ranks along `dim`; along 1 it is saved through an exchange of many boxes."""
    size = dist.get_world_size()
    local = torch.full((ROWS // size, 128) if dim == 0 else (ROWS * 128, 512 // size), value)
    mesh = init_device_mesh("cpu", (size,))
    return {"w": DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)}


def save(folder: str, value: float = 1.0) -> str:
    sf.save_state_dict(state(value=value), folder, on_existing="replace")
    return "saved"


def save_and(folder: str, what: str, dim: int) -> str:
    """Save; rank 2 does something else when it has written its first bytes."""

    def progress(step: sf.Progress) -> None:
        if step.rank != 2 or not step.bytes_done:
            return
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "sleep":
            time.sleep(4)
        if what == "fail":
            raise OSError(5, "Input/output error")

    try:
        sf.save_state_dict(state(dim), folder, on_progress=progress, on_existing="replace", budget_bytes=8 << 20)
    except RankFailedError as error:
        return f"rank {error.rank}"
    except OSError as error:
        return f"own {error.errno}"
    return "saved"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint that is to be replaced."""
    out = tmp_path / "out"
    out.mkdir()
    save_file({"w": torch.zeros(3)}, out / "model.safetensors")
    return out


@pytest.mark.parametrize("dim", [0, 1], ids=["direct", "exchange"])
def test_a_killed_rank_is_named_the_old_checkpoint_stays_and_the_next_save_works(
    ranks: RankPool, tmp_path: Path, old: Path, dim: int
) -> None:
    outcomes = ranks(4).outcomes(save_and, str(old), "die", dim)
    assert outcomes[2].status == "died", outcomes
    assert [outcomes[rank].value for rank in (0, 1, 3)] == ["rank 2"] * 3
    assert all(outcomes[rank].ended_at < outcomes[2].ended_at + TOLD_WITHIN_S for rank in (0, 1, 3))
    assert load_file(old / "model.safetensors")["w"].tolist() == [0, 0, 0]
    assert ranks(4).run(save, str(old)) == ["saved"] * 4
    assert load_file(old / "model.safetensors")["w"].shape == (ROWS, 128)
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing is left of the save that failed"


@pytest.mark.parametrize("dim", [0, 1], ids=["direct", "exchange"])
def test_an_error_on_one_rank_is_told_to_all_and_nothing_is_left(
    ranks: RankPool, tmp_path: Path, old: Path, dim: int
) -> None:
    told = ranks(4).run(save_and, str(old), "fail", dim)
    assert told == ["rank 2", "rank 2", "own 5", "rank 2"]
    assert load_file(old / "model.safetensors")["w"].tolist() == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_rank_slower_than_the_process_groups_time_limit_is_no_failure(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(4, gloo_timeout_s=2).run(save_and, str(tmp_path / "out"), "sleep", 0) == ["saved"] * 4


def save_on_rank_zero_only(folder: str) -> str:
    tensors = state()
    if dist.get_rank():
        time.sleep(3)
        return "not called"
    try:
        sf.save_state_dict(tensors, folder, timeout_s=1)
    except RankFailedError as error:
        return str(error)
    return "saved"


def test_a_save_that_only_rank_zero_calls_ends_naming_the_others(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks(2).run(save_on_rank_zero_only, str(tmp_path / "out"))
    assert "rank 1" in told[0]
    assert list(tmp_path.iterdir()) == []


def save_racing(folder: str) -> str:
    """Each rank saves by itself, to one path, at about the same time."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    try:
        sf.save_state_dict({"w": torch.full((200_000,), float(rank))}, folder)
    except ShardferryError as error:
        return type(error).__name__
    finally:
        store = dist.HashStore()  # type: ignore[attr-defined]  # re-exported without __all__
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)  # for the pool to take down
    return "saved"


def test_of_saves_that_race_for_one_path_one_wins_whole(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks(4).run(save_racing, str(tmp_path / "out"))
    assert told.count("saved") == 1
    assert set(told) <= {"saved", "StorageError", "CheckpointExistsError"}
    saved = load_file(tmp_path / "out/model.safetensors")["w"]
    assert saved.unique().tolist() == [float(told.index("saved"))]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
