"""Groups of ranks that are threads, for tests, and the tests that every kind of group must pass.

    def test_all_ranks_learn_the_sum() -> None:
        def work(group: Group) -> int:
            return sum(map(int, group.exchange("add", b"%d" % group.rank)))

        assert run_ranks(4, work) == [6, 6, 6, 6]

The ranks meet over real sockets on the loopback interface; only the rendezvous is in memory.
"""

# ruff: noqa: D102, PLR2004 - the names of the tests say it, and small numbers of ranks are what they are about

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

from shardferry.errors import RankFailedError
from shardferry.transport.connect import LOOPBACK, connect
from shardferry.transport.host import Host
from shardferry.transport.memory import MemoryRendezvous
from shardferry.transport.solo import SoloGroup
from shardferry.transport.together import together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardferry.transport.base import Group

Result = TypeVar("Result")


def run_ranks(
    world_size: int, function: Callable[[Group], Result], *, timeout_s: float = 30.0, limit_s: float = 60.0
) -> list[Result]:
    """Return what `function(group)` returned on each rank, in rank order.

    Args:
        world_size: Number of ranks.
        function: Runs on every rank, each with its own view of one group.
        timeout_s: After which silence or absence makes a rank count as lost.
        limit_s: After which the test is given up.

    Raises:
        BaseException: What a rank raised; its own error is preferred to a report of another rank's.
        TimeoutError: If a rank is not done after `limit_s`.
    """
    outcomes = rank_outcomes(world_size, function, timeout_s=timeout_s, limit_s=limit_s)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, RankFailedError)):
        raise error
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def rank_outcomes(
    world_size: int, function: Callable[[Group], Result], *, timeout_s: float = 30.0, limit_s: float = 60.0
) -> list[Result | BaseException]:
    """Return what `function(group)` returned or raised on each rank, in rank order. Arguments as for `run_ranks`."""
    rendezvous = MemoryRendezvous()
    outcomes: dict[int, Result | BaseException] = {}

    def run(rank: int) -> None:
        try:
            with _open_group(rendezvous, rank, world_size, timeout_s) as group:
                outcomes[rank] = function(group)
        except BaseException as error:  # noqa: BLE001 - whatever a rank raises is its outcome
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        thread.join(limit_s)
        if thread.is_alive():
            raise TimeoutError(f"rank {rank} of {world_size} is not done after {limit_s:g} s")
    return [outcomes[rank] for rank in range(world_size)]


def _open_group(rendezvous: MemoryRendezvous, rank: int, world_size: int, timeout_s: float) -> Group:
    if world_size == 1:
        return SoloGroup()
    host = Host("localhost", "threads")
    return connect(rendezvous, rank, world_size, host=host, bind_address=lambda: LOOPBACK, timeout_s=timeout_s)


class GroupTests(ABC):
    """What every group must do. Subclass it in a test module, with a way to run a function on all ranks."""

    @abstractmethod
    def outcomes(self, world_size: int, function: Callable[[Group], object]) -> Sequence[object]:
        """Run `function(group)` on every rank and return, per rank, what it returned or the error it raised."""

    def test_every_rank_gets_all_payloads_in_rank_order(self) -> None:
        expected = (b"payload 0", b"payload 1", b"payload 2", b"payload 3")

        assert list(self.outcomes(4, _exchange_one)) == [expected] * 4

    def test_steps_follow_each_other_without_mixing(self) -> None:
        sizes = [(step, 3 << 20 if step == 1 else 0, step) for step in range(3)]

        assert list(self.outcomes(3, _exchange_sizes)) == [sizes] * 3

    def test_a_group_of_one_works_alone(self) -> None:
        assert list(self.outcomes(1, _exchange_one)) == [(b"payload 0",)]

    def test_every_rank_knows_the_hosts_of_all(self) -> None:
        first, *others = self.outcomes(3, _list_hosts)

        assert isinstance(first, tuple)
        assert len(first) == 3
        assert others == [first, first]

    def test_the_failing_rank_raises_its_own_error_and_all_others_name_it(self) -> None:
        outcomes = self.outcomes(4, _fail_on_rank_2)

        assert isinstance(outcomes[2], ValueError)
        assert_named([outcomes[0], outcomes[1], outcomes[3]], rank=2, step="read tensors", cause="ValueError: 3 is odd")

    def test_a_rank_at_work_sees_a_failure_when_it_checks(self) -> None:
        _, outcome = self.outcomes(2, _work_until_rank_0_fails)

        assert_named([outcome], rank=0, step="read tensors", cause="ValueError: 3 is odd")

    def test_an_error_between_two_steps_is_raised_on_every_rank(self) -> None:
        outcomes = self.outcomes(3, _fail_between_steps_on_rank_1)

        assert isinstance(outcomes[1], ValueError)
        assert_named([outcomes[0], outcomes[2]], rank=1, step="work after plan", cause="ValueError: 3 is odd")

    def test_ranks_in_different_steps_all_raise_the_same_error_with_both_steps(self) -> None:
        outcomes = self.outcomes(3, _read_on_rank_1_while_others_write)

        assert all(isinstance(outcome, RankFailedError) for outcome in outcomes)
        assert len({str(outcome) for outcome in outcomes}) == 1
        assert '"read tensors"' in str(outcomes[0])
        assert '"write files"' in str(outcomes[0])

    def test_a_rank_that_leaves_early_is_named(self) -> None:
        outcomes = self.outcomes(3, _leave_early_on_rank_1)

        assert outcomes[1] is None
        assert_named([outcomes[0], outcomes[2]], rank=1, step="write files", cause="left the group")

    def test_after_a_failure_every_further_step_raises_it_again(self) -> None:
        outcomes = self.outcomes(2, _go_on_after_a_failure)

        assert_named(outcomes, rank=1, step="read tensors", cause="ValueError: 3 is odd")

    def test_rank_0_can_wait_for_ranks_that_still_work_after_a_failure(self) -> None:
        outcomes = self.outcomes(3, _wait_on_rank_0_after_a_failure)

        assert outcomes[0] == [False, True]


def assert_named(outcomes: Sequence[object], *, rank: int, step: str, cause: str) -> None:
    """Assert that each outcome is a `RankFailedError` of `rank` in `step`, with `cause` part of its cause."""
    for outcome in outcomes:
        assert isinstance(outcome, RankFailedError), f"{outcome!r} is no RankFailedError"
        assert (outcome.rank, outcome.step) == (rank, step)
        assert cause in outcome.cause


# The functions below run on ranks that may be other processes, which find them by name.


def _exchange_one(group: Group) -> tuple[bytes, ...]:
    return group.exchange("exchange", b"payload %d" % group.rank)


def _exchange_sizes(group: Group) -> list[tuple[int, int, int]]:
    sizes = []
    for step in range(3):
        large = b"x" * (3 << 20) if step == 1 else b""
        payloads = group.exchange(f"step {step}", (large, b"", bytes(step))[group.rank])
        sizes.append((step, len(payloads[0]), len(payloads[2])))
    return sizes


def _list_hosts(group: Group) -> tuple[str, ...]:
    return group.hosts


def _fail() -> bytes:
    raise ValueError("3 is odd")


def _fail_on_rank_2(group: Group) -> None:
    together(group, "read tensors", _fail if group.rank == 2 else bytes)


def _work_until_rank_0_fails(group: Group) -> None:
    def work() -> bytes:
        stop_at = time.monotonic() + 10
        while time.monotonic() < stop_at:
            group.check()
        return b""

    together(group, "read tensors", _fail if group.rank == 0 else work)


def _fail_between_steps_on_rank_1(group: Group) -> None:
    together(group, "plan", bytes)
    if group.rank == 1:
        _fail()
    # An error outside of a step has no step to be told in, so a rank that goes on learns of it in the next.
    while True:
        group.check()


def _read_on_rank_1_while_others_write(group: Group) -> None:
    together(group, "read tensors" if group.rank == 1 else "write files", bytes)


def _leave_early_on_rank_1(group: Group) -> None:
    if group.rank != 1:
        together(group, "write files", bytes)


def _wait_on_rank_0_after_a_failure(group: Group) -> list[bool]:
    try:
        together(group, "write files", _fail if group.rank == 1 else bytes)
    except RankFailedError:
        if group.rank == 0:
            return [group.wait_until_left(0.05), group.wait_until_left(10.0)]
        time.sleep(0.3)  # in the middle of a piece
    return []


def _go_on_after_a_failure(group: Group) -> None:
    with contextlib.suppress(ValueError, RankFailedError):
        together(group, "read tensors", _fail if group.rank == 1 else bytes)
    together(group, "write files", bytes)
