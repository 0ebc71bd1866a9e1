"""The pool of processes does what its users rely on."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from .pool import RankError

if TYPE_CHECKING:
    from .pool import RankPool


def _sum_of_ranks(offset: int) -> int:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return int(total.item())


def _fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("only here")


def _signal_rank_1(number: int) -> int:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    return os.getpid()


@pytest.mark.parametrize("store", ["file", "tcp"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_a_gloo_group(ranks: RankPool, store: str, world_size: int) -> None:
    expected = sum(range(world_size)) + 10 * world_size

    assert ranks(world_size, store=store).run(_sum_of_ranks, 10) == [expected] * world_size  # type: ignore[arg-type]  # the parameter's values are the literals


def test_a_failing_rank_fails_the_run_with_its_traceback(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 raised.*_fail_on_rank_1.*only here"):
        ranks(2).run(_fail_on_rank_1)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, "died"), (signal.SIGSTOP, "stopped")])
def test_a_rank_that_ended_is_told_and_replaced(ranks: RankPool, number: int, status: str) -> None:
    outcomes = ranks(2).outcomes(_signal_rank_1, number)

    assert [outcome.status for outcome in outcomes] == ["returned", status]
    assert ranks(2).run(_sum_of_ranks, 0) == [1, 1]
