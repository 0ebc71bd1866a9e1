"""Real loads fail together: a rank or the file goes away in the middle, and every rank says so."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardferry.torch as sf
from shardferry.errors import RankFailedError, ShardferryError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .pool import RankPool

ROWS, COLUMNS, TENSORS = 1024, 1024, 24


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """24 tensors of 4 MiB in one file."""
    save_file({f"w{i}": torch.full((ROWS, COLUMNS), float(i)) for i in range(TENSORS)}, tmp_path / "model.safetensors")
    return str(tmp_path)


def load(path: str, dim: int, on_progress: Callable[[sf.Progress], None]) -> str:
    """Load all tensors, cut over the ranks along `dim`, and return the error."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shape = [ROWS, COLUMNS]
    shape[dim] //= dist.get_world_size()
    state: dict[str, torch.Tensor] = {
        f"w{i}": DTensor.from_local(torch.zeros(shape), mesh, [Shard(dim)], run_check=False) for i in range(TENSORS)
    }
    with pytest.raises(ShardferryError) as caught:
        sf.load_state_dict(state, path, on_progress=on_progress)
    return f"{type(caught.value).__name__}: {caught.value}"


def on_rank_2_after_a_third(act: Callable[[], None], progress: sf.Progress) -> None:
    if dist.get_rank() == 2 and progress.bytes_done > progress.bytes_total // 3:
        act()


def load_and_be_killed(path: str) -> str:
    return load(path, 0, partial(on_rank_2_after_a_third, partial(os.kill, os.getpid(), signal.SIGKILL)))


def test_a_rank_killed_while_it_reads_is_named_by_all(ranks: RankPool, checkpoint: str) -> None:
    outcomes = ranks(4).outcomes(load_and_be_killed, checkpoint)
    assert outcomes[2].status == "died"
    said = [outcome.value for outcome in outcomes if outcome.rank != 2]
    assert all(f"{RankFailedError.__name__}: " in text and "failed on rank 2 of 4" in text for text in said), said


def load_and_truncate(path: str, dim: int) -> str:
    return load(path, dim, partial(on_rank_2_after_a_third, partial(os.truncate, f"{path}/model.safetensors", 10_000)))


@pytest.mark.parametrize("dim", [0, 1], ids=["whole runs", "thin rows"])
def test_a_file_truncated_while_four_ranks_read_it_is_an_error_on_all(
    ranks: RankPool, checkpoint: str, dim: int
) -> None:
    """Thin rows come out of a mapping, from which a page that is gone would be SIGBUS."""
    said = ranks(4).run(load_and_truncate, checkpoint, dim)
    assert all("model.safetensors" in text and "10000 bytes" in text for text in said), said


def load_with_a_wrong_timeout_on_rank_1(path: str) -> tuple[str, float]:
    """Load wrongly, then rightly; return the error and a value."""
    state = {"w0": torch.zeros(ROWS, COLUMNS)}
    wrong = {"timeout_s": "soon"} if dist.get_rank() else {}
    with pytest.raises(ShardferryError) as caught:
        sf.load_state_dict(state, path, strict=False, **wrong)  # type: ignore[arg-type]  # on purpose
    state["w1"] = torch.zeros(ROWS, COLUMNS)
    sf.load_state_dict(state, path, strict=False)
    return str(caught.value), float(state["w1"][0, 0])


def test_a_wrong_option_on_one_rank_is_told_to_all_and_does_not_unpair_their_calls(
    ranks: RankPool, checkpoint: str
) -> None:
    for text, value in ranks(2).run(load_with_a_wrong_timeout_on_rank_1, checkpoint):
        assert "timeout_s is 'soon'; it must be a positive number of seconds" in text
        assert value == 1


def load_after_rank_1_has_left_a_load_out(path: str, out: str) -> str:
    state = {"w0": torch.zeros(ROWS, COLUMNS)}
    call = partial(sf.save_state_dict, state, out) if dist.get_rank() else partial(sf.load_state_dict, state, path)
    with pytest.raises(ShardferryError) as caught:
        call()
    return str(caught.value)


def test_a_rank_that_has_left_a_call_out_is_told_what_the_others_call(
    ranks: RankPool, checkpoint: str, tmp_path: Path
) -> None:
    said = ranks(2).run(load_after_rank_1_has_left_a_load_out, checkpoint, str(tmp_path / "out"))
    assert all('"compare what to save"' in text and '"open checkpoint"' in text for text in said), said
    assert all("must make the same calls in the same order" in text for text in said), said
