"""Real processes fail together: whatever happens to one rank, every rank names it, and soon."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from shardferry.errors import RankFailedError
from shardferry.testing.groups import GroupTests
from shardferry.torch.group import open_group
from shardferry.transport.together import together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardferry.transport.base import Group

    from .pool import Outcome, RankPool

PATIENT_S = 30.0
IMPATIENT_S = 1.0


class UnprintableError(Exception):
    """Cannot be turned into text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class UnpicklableError(Exception):
    """Holds something that cannot leave the process."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


ERRORS: dict[str, Callable[[], BaseException]] = {
    "error": lambda: ValueError("3 is odd"),
    "interrupt": KeyboardInterrupt,
    "exit": lambda: SystemExit(3),
    "memory": MemoryError,
    "empty": lambda: RuntimeError(""),
    "unpicklable": UnpicklableError,
    "unprintable": UnprintableError,
}


@dataclass(frozen=True)
class Seen:
    """What one rank saw: the error it raised, if any, when, and when it went into the step."""

    error_type: str
    rank_named: int | None
    text: str
    began_at: float
    ended_at: float


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("error", "ValueError: 3 is odd"),
        ("interrupt", "KeyboardInterrupt"),
        ("exit", "SystemExit: 3"),
        ("memory", "MemoryError"),
        ("empty", "RuntimeError"),
        ("unpicklable", "UnpicklableError: holds a lock"),
        ("unprintable", "UnprintableError: (no message: its __str__ raised RuntimeError)"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all_within_a_second(ranks: RankPool, kind: str, cause: str) -> None:
    seen = ranks(4).run(fail_on_one_rank, 2, kind)

    assert seen[2].error_type == type(ERRORS[kind]()).__name__
    assert_all_name(2, [seen[0], seen[1], seen[3]], within_s=1.0, of=seen[2].began_at)
    assert all(text.endswith(cause) for text in (seen[0].text, seen[1].text, seen[3].text))


def test_an_error_on_rank_0_with_a_store_over_tcp_is_raised_on_all_within_a_second(ranks: RankPool) -> None:
    seen = ranks(4, store="tcp").run(fail_on_one_rank, 0, "error")

    assert seen[0].error_type == "ValueError"
    assert_all_name(0, seen[1:], within_s=1.0, of=seen[0].began_at)


def test_a_signal_reaches_a_rank_that_waits_and_is_told_to_all(ranks: RankPool) -> None:
    seen = ranks(3).run(interrupt_rank_1_while_it_waits)

    assert seen[1].error_type == "KeyboardInterrupt"
    assert_all_name(1, [seen[0], seen[2]], within_s=1.0, of=seen[0].began_at)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_within_two_seconds(ranks: RankPool, victim: int) -> None:
    outcomes = ranks(4).outcomes(end_one_rank, victim, signal.SIGKILL, PATIENT_S)

    assert outcomes[victim].status == "died"
    assert_all_name(victim, survivors(outcomes, victim), within_s=2.0, of=outcomes[victim].ended_at)


def test_a_killed_rank_0_is_said_to_be_inferred(ranks: RankPool) -> None:
    outcomes = ranks(2).outcomes(end_one_rank, 0, signal.SIGKILL, PATIENT_S)

    [seen] = survivors(outcomes, 0)
    assert "inferred" in seen.text


@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_rank_is_named_at_the_time_out(ranks: RankPool, victim: int) -> None:
    outcomes = ranks(4).outcomes(end_one_rank, victim, signal.SIGSTOP, IMPATIENT_S)

    assert outcomes[victim].status == "stopped"
    seen = survivors(outcomes, victim)
    assert_all_name(victim, seen, within_s=IMPATIENT_S + 2.0, of=seen[0].began_at)
    assert all(each.ended_at - each.began_at > IMPATIENT_S / 2 for each in seen)


def test_a_killed_rank_is_named_while_a_child_it_forked_lives_on(ranks: RankPool) -> None:
    outcomes = ranks(2).outcomes(fork_on_rank_1_and_be_killed)

    assert outcomes[1].status == "died"
    [seen] = survivors(outcomes, 1)
    assert_all_name(1, [seen], within_s=2.0, of=seen.began_at)


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_calls_is_named_at_the_time_out(ranks: RankPool, absent: int) -> None:
    seen = ranks(4).run(call_on_all_but, absent)

    others = [each for rank, each in enumerate(seen) if rank != absent]
    assert_all_name(absent, others, within_s=IMPATIENT_S + 1.5, of=others[0].began_at)
    assert all("did not make this call within 1 s" in each.text for each in others)


def test_a_rank_may_work_longer_than_every_time_out(ranks: RankPool) -> None:
    answers = ranks(2, gloo_timeout_s=IMPATIENT_S).run(work_on_rank_1_for, 2 * IMPATIENT_S)

    assert answers == [(b"", b"done")] * 2


def test_ranks_in_different_calls_all_name_both_steps(ranks: RankPool) -> None:
    seen = ranks(4).run(save_on_rank_3_while_others_load)

    assert {each.error_type for each in seen} == {"RankFailedError"}
    assert len({each.text for each in seen}) == 1
    assert '"read headers"' in seen[0].text
    assert '"write files"' in seen[0].text


def test_calls_after_a_failed_one_pair_up_again(ranks: RankPool) -> None:
    assert ranks(4).run(fail_then_succeed) == [(b"0", b"1", b"2", b"3")] * 4


def test_fifty_calls_leave_no_descriptor_and_no_thread_behind(ranks: RankPool) -> None:
    for before, after in ranks(2).run(count_around_fifty_calls):
        assert after == before


def test_a_process_without_a_group_works_alone() -> None:
    assert call(lambda: b"mine", PATIENT_S) == (b"mine",)


class TestProcessGroup(GroupTests):
    """The conformance suite on processes that meet through a store of torch's."""

    @pytest.fixture(autouse=True)
    def take_ranks(self, ranks: RankPool) -> None:
        self.ranks = ranks

    def outcomes(self, world_size: int, function: Callable[[Group], object]) -> Sequence[object]:
        return self.ranks(world_size).run(returned_or_raised, function)


def survivors(outcomes: Sequence[Outcome], victim: int) -> list[Seen]:
    others = [outcome for outcome in outcomes if outcome.rank != victim]
    assert all(outcome.status == "returned" for outcome in others), others
    return [outcome.value for outcome in others]


def assert_all_name(rank: int, seen: Sequence[Seen], *, within_s: float, of: float) -> None:
    for each in seen:
        assert each.error_type == "RankFailedError", each
        assert each.rank_named == rank, each
        assert each.ended_at - of < within_s, each


# What follows runs on the ranks.


def watch(work: Callable[[], object]) -> Seen:
    """Run `work` and return what it raised."""
    began_at = time.monotonic()
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - the tests raise all kinds on purpose
        ended_at = time.monotonic()
        named = error.rank if isinstance(error, RankFailedError) else None
        text = str(error) if named is not None else ""
        return Seen(type(error).__name__, named, text, began_at, ended_at)
    return Seen("", None, "", began_at, time.monotonic())


def call(work: Callable[[], bytes], timeout_s: float, step: str = "read tensors") -> tuple[bytes, ...]:
    """Do what a load or a save does: open a group, and run a step in it."""
    with open_group(timeout_s) as group:
        return together(group, step, work)


def returned_or_raised(function: Callable[[Group], object]) -> object:
    try:
        with open_group(PATIENT_S) as group:
            return function(group)
    except Exception as error:  # noqa: BLE001 - it is the outcome
        return error


def fail_on_one_rank(victim: int, kind: str) -> Seen:
    def work() -> bytes:
        if dist.get_rank() == victim:
            error = ERRORS[kind]()
            raise error
        return b""

    return watch(lambda: call(work, PATIENT_S))


def interrupt_rank_1_while_it_waits() -> Seen:
    def wait_for_rank_0() -> None:
        with open_group(PATIENT_S) as group:
            pids = group.exchange("pids", b"%d" % os.getpid())
            together(group, "read tensors", partial(interrupt, group, int(pids[1])) if group.rank == 0 else bytes)

    return watch(wait_for_rank_0)


def interrupt(group: Group, pid: int) -> bytes:
    """Send SIGINT to `pid` once it waits, then work until that is known."""
    waits_in = Path(f"/proc/{pid}/wchan")
    deadline = time.monotonic() + 10
    while "futex" not in waits_in.read_text():
        assert time.monotonic() < deadline
    os.kill(pid, signal.SIGINT)
    while time.monotonic() < deadline:
        group.check()
    return b""


def end_one_rank(victim: int, number: int, timeout_s: float) -> Seen:
    def work() -> bytes:
        if dist.get_rank() == victim:
            os.kill(os.getpid(), number)
        return b""

    return watch(lambda: call(work, timeout_s))


def fork_on_rank_1_and_be_killed() -> Seen:
    def work() -> bytes:
        if dist.get_rank() == 1:
            parent_lives, held_by_parent = os.pipe()
            if os.fork() == 0:
                os.close(held_by_parent)
                select.select([parent_lives], [], [], 10)
                time.sleep(2.5)  # outlives the limit by which the other rank must have named this one
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        return b""

    return watch(lambda: call(work, PATIENT_S))


def call_on_all_but(absent: int) -> Seen:
    seen = watch(lambda: open_group(IMPATIENT_S).close() if dist.get_rank() != absent else None)
    dist.barrier()  # the absent rank stays alive until all others have seen
    return seen


def work_on_rank_1_for(seconds: float) -> tuple[bytes, ...]:
    def work() -> bytes:
        time.sleep(seconds if dist.get_rank() == 1 else 0)  # stands for a slow disk
        return b"done" if dist.get_rank() == 1 else b""

    return call(work, IMPATIENT_S)


def save_on_rank_3_while_others_load() -> Seen:
    step = "write files" if dist.get_rank() == 3 else "read headers"

    return watch(lambda: call(bytes, PATIENT_S, step))


def fail_then_succeed() -> tuple[bytes, ...]:
    for victim in (1, 0, 3):
        fail_on_one_rank(victim, "error")
    return call(lambda: b"%d" % dist.get_rank(), PATIENT_S)


def count_around_fifty_calls() -> tuple[tuple[int, int], tuple[int, int]]:
    def count() -> tuple[int, int]:
        call(bytes, PATIENT_S)
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    counts = [count() for _ in range(50)]
    return counts[0], counts[-1]
