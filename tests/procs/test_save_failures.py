"""A save that fails on one rank fails on all, publishes nothing, and the next one works."""

from __future__ import annotations

import errno
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests.tools.failing_fs import FailingMount, failing_mount
from tests.tools.mounts import why_no_mounts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardferry.torch as sf
from shardferry.errors import RankFailedError, ShardferryError, StorageError
from shardferry.storage.renames import LocalFilesystem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .pool import RankPool

ROWS = 64
# A dead rank is named within 2 s; a loaded machine may take longer. The time-out of the save is 600 s.
TOLD_WITHIN_S = 20


def state(dims: tuple[int, ...] = (0,), value: float = 1.0) -> dict[str, torch.Tensor]:
    """Return a tensor for each of `dims`, cut over all ranks along it; "w" is the first.

    One that is cut along 1 is saved through an exchange of many boxes, which follows all others.
    """
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    locals_ = [torch.full((ROWS // size, 128) if dim == 0 else (ROWS * 128, 512 // size), value) for dim in dims]
    return {
        name: DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
        for name, local, dim in zip("wx", locals_, dims, strict=False)
    }


def save(folder: str, value: float = 1.0) -> str:
    sf.save_state_dict(state(value=value), folder, on_existing="replace")
    return "saved"


def save_and(folder: str, what: str, dims: tuple[int, ...]) -> str:
    """Save; rank 2 does something else when it has written its first bytes."""

    def progress(step: sf.Progress) -> None:
        if step.rank != 2 or not step.bytes_done:
            return
        if len(dims) > 1:
            time.sleep(0.3)  # until the others wait for it to begin the exchange
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "sleep":
            time.sleep(4)
        if what == "fail":
            raise OSError(5, "Input/output error")

    try:
        sf.save_state_dict(state(dims), folder, on_progress=progress, on_existing="replace", budget_bytes=8 << 20)
    except RankFailedError as error:
        return f"rank {error.rank}"
    except OSError as error:
        return f"own {error.errno}"
    return "saved"


def fail_and_save(folder: str, dims: tuple[int, ...]) -> str:
    """Save so that it fails on rank 2; then again, beside it, in the same processes and the same process group."""
    told = save_and(folder, "fail", dims)
    sf.save_state_dict(state(dims), f"{folder}-again")
    return told


# How a model is cut, and so when rank 2 has written its first bytes.
CUTS = pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)], ids=["direct", "exchange", "before the exchange"])


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint that is to be replaced."""
    out = tmp_path / "out"
    out.mkdir()
    save_file({"w": torch.zeros(3)}, out / "model.safetensors")
    return out


@CUTS
def test_a_killed_rank_is_named_the_old_checkpoint_stays_and_the_next_save_works(
    ranks: RankPool, tmp_path: Path, old: Path, dims: tuple[int, ...]
) -> None:
    outcomes = ranks(4).outcomes(save_and, str(old), "die", dims)
    assert outcomes[2].status == "died", outcomes
    assert [outcomes[rank].value for rank in (0, 1, 3)] == ["rank 2"] * 3
    assert all(outcomes[rank].ended_at < outcomes[2].ended_at + TOLD_WITHIN_S for rank in (0, 1, 3))
    assert load_file(old / "model.safetensors")["w"].tolist() == [0, 0, 0]
    assert ranks(4).run(save, str(old)) == ["saved"] * 4
    assert load_file(old / "model.safetensors")["w"].shape == (ROWS, 128)
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing is left of the save that failed"


@CUTS
def test_an_error_on_one_rank_is_told_to_all_and_nothing_is_left(
    ranks: RankPool, tmp_path: Path, old: Path, dims: tuple[int, ...]
) -> None:
    told = ranks(4).run(fail_and_save, str(old), dims)
    assert told == ["rank 2", "rank 2", "own 5", "rank 2"]
    assert load_file(old / "model.safetensors")["w"].tolist() == [0, 0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out-again"]
    assert load_file(tmp_path / "out-again/model.safetensors")["w"].unique().tolist() == [1]


class Fault(NamedTuple):
    """A call that fails on one rank."""

    rank: int
    owner: object
    call: str
    fits: Callable[..., bool]


def in_staging(path: str, *_: object) -> bool:
    return path.endswith(".staging")


def of_header(_: int, data: memoryview, start: int) -> bool:
    return start == 0 and bytes(data[8:10]) == b'{"'


def of_tensors(_: int, __: memoryview, start: int) -> bool:
    return start > 0


def of_index(path: str, _: bytes) -> bool:
    return path.endswith("index.json")


FAULTS = {
    "mkdir": Fault(0, os, "mkdir", in_staging),
    "header": Fault(0, os, "pwrite", of_header),
    "write": Fault(2, os, "pwrite", of_tensors),
    "fsync": Fault(2, os, "fsync", lambda _: True),
    "index": Fault(0, LocalFilesystem, "write_file", of_index),
    "rename": Fault(0, LocalFilesystem, "exchange", in_staging),
}


def save_telling(folder: str) -> tuple[str, float]:
    """Save two files in place of the old checkpoint; return what failed on which rank, and the seconds it took."""
    start = time.monotonic()
    told = "saved"
    try:
        sf.save_state_dict(state((0, 1)), folder, on_existing="replace", max_shard_size=1)
    except RankFailedError as error:
        told = f"rank {error.rank}: {error.cause}"
    except StorageError as error:
        told = f"rank {dist.get_rank()}: StorageError: {error}"
    return told, time.monotonic() - start


def save_where(step: str, folder: str) -> tuple[str, float]:
    """Save; on one rank the step's call fails, and works again afterwards."""
    fault = FAULTS[step]
    real = getattr(fault.owner, fault.call)

    def failing(*arguments: Any) -> Any:  # noqa: ANN401 - whatever the real one takes and returns
        bound = arguments[1:] if isinstance(fault.owner, type) else arguments
        if fault.fits(*bound):
            raise OSError(errno.EIO, os.strerror(errno.EIO), "here")
        return real(*arguments)

    if dist.get_rank() == fault.rank:
        setattr(fault.owner, fault.call, failing)
    try:
        return save_telling(folder)
    finally:
        setattr(fault.owner, fault.call, real)


@pytest.mark.parametrize("step", FAULTS)
def test_whatever_step_fails_on_one_rank_all_ranks_hear_the_same_and_nothing_is_left(
    ranks: RankPool, tmp_path: Path, old: Path, step: str
) -> None:
    outcomes = ranks(4).run(save_where, step, str(old))
    check_failed(outcomes, old, FAULTS[step].rank)
    assert names_in(tmp_path) == ["out"]


def check_failed(outcomes: list[tuple[str, float]], old: Path, rank: int | None) -> None:
    """All ranks were told the same in time, and the old checkpoint is all there is."""
    told = {text for text, _ in outcomes}
    assert len(told) == 1, told
    message = told.pop()
    assert "StorageError: " in message
    assert "Input/output error" in message
    assert rank is None or message.startswith(f"rank {rank}: ")
    assert max(seconds for _, seconds in outcomes) < TOLD_WITHIN_S
    assert names_in(old) == ["model.safetensors"]
    assert load_file(old / "model.safetensors")["w"].tolist() == [0, 0, 0]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FailingMount]:
    """A disk that fails when it is told to; what is on it is in "root"."""
    if reason := why_no_mounts():
        pytest.skip(reason)
    (tmp_path / "root").mkdir()
    (tmp_path / "disk").mkdir()
    with failing_mount(tmp_path / "root", tmp_path / "disk") as mounted:
        yield mounted


@pytest.mark.parametrize("operation", ["write", "fsync", "rename"])
def test_a_disk_that_fails_under_one_rank_publishes_nothing_and_can_be_saved_to_again(
    ranks: RankPool, tmp_path: Path, disk: FailingMount, operation: Literal["write", "fsync", "rename"]
) -> None:
    """The kernel itself says EIO: to rank 2 in the middle of its rows, to one that syncs, to rank 0 as it publishes."""
    out = disk.path / "out"
    out.mkdir()
    save_file({"w": torch.zeros(3)}, out / "model.safetensors")
    first_file = "model-00001-of-00002.safetensors"
    if operation == "write":
        disk.fail("write", first_file, byte=20_000)
    if operation == "fsync":
        disk.fail("fsync", first_file, number=2)  # the first is made by who creates the file
    if operation == "rename":
        disk.fail("rename", ".staging")
    outcomes = ranks(4).run(save_telling, str(out))
    check_failed(outcomes, out, {"write": 2, "fsync": None, "rename": 0}[operation])
    assert disk.num_failed() == 1
    assert names_in(tmp_path / "root") == ["out"]
    assert [told for told, _ in ranks(4).run(save_telling, str(out))] == ["saved"] * 4
    assert load_file(out / first_file)["w"].shape == (ROWS, 128)
    assert names_in(tmp_path / "root") == ["out"]


def test_a_rank_slower_than_the_process_groups_time_limit_is_no_failure(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(4, gloo_timeout_s=2).run(save_and, str(tmp_path / "out"), "sleep", (0,)) == ["saved"] * 4


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
