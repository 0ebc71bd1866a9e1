"""The garbage collector is paused while a plan is made, and afterwards as it was before."""

import gc
import sys
from collections.abc import Iterator
from threading import Barrier, Thread

import pytest

from shardferry.collector import paused_collector

WAIT_S = 30


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    """Start with a collector that runs, and leave it so."""
    gc.enable()
    yield
    gc.enable()


def test_the_collector_rests_in_a_function_and_runs_after_it_even_if_it_fails() -> None:
    """An error in a plan does not leave the process without its collector."""

    @paused_collector()
    def plan() -> None:
        seen.append(gc.isenabled())
        raise KeyError

    seen: list[bool] = []
    with pytest.raises(KeyError):
        plan()
    assert seen == [False]
    assert gc.isenabled()


def test_an_interrupt_at_the_worst_moment_does_not_leave_it_off() -> None:
    """Ctrl-C may come between any two steps, also right after the collector was stopped."""

    def interrupt(_: object, event: str, called: object) -> None:
        if event == "c_return" and called is gc.disable:
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), paused_collector():
            pass
    finally:
        sys.setprofile(before)
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    """Whoever has switched it off keeps it so, also when paused functions call each other."""
    gc.disable()
    with paused_collector(), paused_collector():
        pass
    assert not gc.isenabled()


def test_the_collector_runs_when_the_blocks_of_two_threads_have_ended_in_any_order() -> None:
    """The second to begin has found it off, and must not leave it so."""
    entered, left = Barrier(2, timeout=WAIT_S), Barrier(2, timeout=WAIT_S)

    def last() -> None:
        entered.wait()
        with paused_collector():
            entered.wait()
            left.wait()

    thread = Thread(target=last)
    thread.start()
    with paused_collector():
        entered.wait()
        entered.wait()
    left.wait()
    thread.join(WAIT_S)
    assert gc.isenabled()
