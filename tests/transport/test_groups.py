"""Ranks that are threads form a group that keeps the contract of groups."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shardferry.errors import RankFailedError
from shardferry.testing.groups import GroupTests, rank_outcomes, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardferry.transport.base import Group


class TestThreadGroup(GroupTests):
    """The conformance suite on thread ranks."""

    def outcomes(self, world_size: int, function: Callable[[Group], object]) -> Sequence[object]:
        return rank_outcomes(world_size, function)


def test_fifty_groups_leave_no_descriptor_and_no_thread_behind() -> None:
    run_ranks(3, _three_steps)
    num_descriptors, num_threads = _num_descriptors(), threading.active_count()

    for _ in range(50):
        run_ranks(3, _three_steps)

    assert _num_descriptors() == num_descriptors
    assert threading.active_count() == num_threads


def test_run_ranks_prefers_the_error_of_the_rank_that_failed() -> None:
    def fail_on_rank_1(group: Group) -> None:
        if group.rank == 1:
            raise KeyError("own error")
        group.exchange("wait", b"")

    with pytest.raises(KeyError, match="own error"):
        run_ranks(3, fail_on_rank_1)


def test_of_several_failures_one_is_told_and_each_failing_rank_raises_its_own() -> None:
    both_there = threading.Barrier(2)

    def fail_on_ranks_1_and_2(group: Group) -> None:
        if group.rank > 0:
            both_there.wait(timeout=10)
            raise ValueError(f"rank {group.rank}'s own")
        group.exchange("wait", b"")

    told, first, second = rank_outcomes(3, fail_on_ranks_1_and_2)

    assert isinstance(told, RankFailedError)
    assert told.cause == f"ValueError: rank {told.rank}'s own"
    assert [str(first), str(second)] == ["rank 1's own", "rank 2's own"]


def test_sixty_four_ranks_meet() -> None:
    assert run_ranks(64, _three_steps) == [[b"%d" % rank for rank in range(64)]] * 64


def _three_steps(group: Group) -> list[bytes]:
    group.exchange("first", b"")
    group.exchange("second", b"")
    return list(group.exchange("third", b"%d" % group.rank))


def _num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
