"""What follows from what happens to the ranks, without sockets or time."""

from __future__ import annotations

import json

from shardferry.transport.frames import (
    HEADER,
    Frame,
    FrameReader,
    Kind,
    Verdict,
    decode_answer,
    decode_verdict,
    encode_result,
    max_answer_bytes,
)
from shardferry.transport.host import Host
from shardferry.transport.roster import Roster, Send

TIMEOUT_S = 10.0
BEAT = Frame(Kind.BEAT, b"")
GOODBYE = Frame(Kind.GOODBYE, b"")


def test_the_last_rank_to_join_completes_the_group() -> None:
    roster = Roster(3, TIMEOUT_S)

    assert [roster.join(rank, _host(rank), now=0.0) for rank in (2, 0)] == [[], []]
    [welcome] = roster.join(1, _host(1), now=0.0)

    assert set(welcome.ranks) == {0, 1, 2}
    assert json.loads(_frame(welcome).body) == ["host-0/kernel-0", "host-1/kernel-1", "host-2/kernel-2"]


def test_a_thousand_ranks_get_one_answer_made_once() -> None:
    roster = _complete(1024)

    sends = [send for rank in range(1024) for send in roster.receive(rank, _result("plan", b"%d" % rank))]

    [answer] = sends
    assert len(answer.ranks) == 1024
    assert decode_answer(_frame(answer).body) == tuple(b"%d" % rank for rank in range(1024))


def test_an_error_is_told_at_once_to_ranks_still_at_work() -> None:
    roster = _complete(3)
    roster.receive(0, Frame(Kind.ENTER, b"read tensors"))

    [send] = roster.receive(1, Frame(Kind.ERROR, json.dumps(["read tensors", "ValueError: odd"]).encode()))

    assert set(send.ranks) == {0, 1, 2}
    assert _verdict(send) == Verdict("read tensors", 1, "host-1", "ValueError: odd")


def test_the_first_failure_is_the_verdict_and_nothing_follows_it() -> None:
    roster = _complete(3)
    roster.receive(1, Frame(Kind.ERROR, json.dumps(["read tensors", "first"]).encode()))

    assert roster.receive(2, Frame(Kind.ERROR, json.dumps(["read tensors", "second"]).encode())) == []
    assert roster.disconnect(0) == []
    assert roster.judge(now=1000.0) == []
    assert roster.verdict is not None
    assert roster.verdict.cause == "first"


def test_a_rank_that_joins_after_the_verdict_is_told() -> None:
    roster = Roster(3, TIMEOUT_S)
    roster.join(0, _host(0), now=0.0)
    roster.join(1, _host(1), now=0.0)
    roster.disconnect(1)

    [send] = roster.join(2, _host(2), now=1.0)

    assert send.ranks == (2,)
    assert _verdict(send).rank == 1


def test_an_ended_connection_names_the_rank_and_the_step_in_progress() -> None:
    roster = _complete(3)
    roster.receive(0, Frame(Kind.ENTER, b"read tensors"))

    [send] = roster.disconnect(2)

    assert _verdict(send)[:3] == ("read tensors", 2, "host-2")
    assert "the process ended" in _verdict(send).cause


def test_an_ended_connection_between_steps_names_the_step_before() -> None:
    roster = _complete(2)
    roster.receive(0, _result("plan", b""))
    roster.receive(1, _result("plan", b""))

    [send] = roster.disconnect(1)

    assert _verdict(send).step == "work after plan"


def test_a_silent_rank_is_lost_and_a_rank_that_is_heard_is_not() -> None:
    roster = _complete(3)
    roster.hear(0, now=9.0)
    roster.hear(2, now=9.0)

    assert roster.judge(now=TIMEOUT_S) == []
    [send] = roster.judge(now=TIMEOUT_S + 0.1)

    assert _verdict(send)[1] == 1
    assert "no sign of life for 10 s" in _verdict(send).cause
    assert roster.is_lost(1, now=TIMEOUT_S + 0.1)


def test_ranks_that_never_call_are_all_named() -> None:
    roster = Roster(5, TIMEOUT_S)
    roster.join(0, _host(0), now=3.0)
    roster.join(3, _host(3), now=5.0)
    for rank in (0, 3):
        roster.hear(rank, now=13.0)

    assert roster.judge(now=13.0) == []
    [send] = roster.judge(now=13.1)

    assert _verdict(send)[:3] == ("connecting", 1, "unknown")
    assert "ranks 1-2 and 4 did not make this call within 10 s" in _verdict(send).cause


def test_the_ranks_and_both_steps_are_named_when_steps_differ() -> None:
    roster = _complete(4)
    for rank in (0, 1, 3):
        roster.receive(rank, _result("read tensors", b""))

    [send] = roster.receive(2, Frame(Kind.ENTER, b"write files"))

    assert _verdict(send)[:2] == ("read tensors", 2)
    assert 'it is in "write files" while ranks 0-1 and 3 are in "read tensors"' in _verdict(send).cause


def test_a_rank_may_leave_when_nobody_needs_it() -> None:
    roster = _complete(2)

    assert roster.receive(0, GOODBYE) == []
    assert roster.disconnect(0) == []
    assert roster.judge(now=5.0) == []


def test_a_step_after_a_rank_has_left_names_that_rank() -> None:
    roster = _complete(3)
    roster.receive(1, GOODBYE)

    [send] = roster.receive(0, Frame(Kind.ENTER, b"write files"))

    assert _verdict(send)[:2] == ("write files", 1)


def test_going_on_after_an_interrupted_exchange_is_a_failure_of_that_rank() -> None:
    roster = _complete(2)
    roster.receive(1, _result("plan", b""))

    [send] = roster.receive(1, _result("plan", b""))

    assert _verdict(send).rank == 1


def test_a_rank_is_expected_once_and_in_range() -> None:
    roster = Roster(2, TIMEOUT_S)
    roster.join(0, _host(0), now=0.0)

    assert [roster.expects(rank) for rank in (-1, 0, 1, 2)] == [False, False, True, False]


def _complete(world_size: int) -> Roster:
    roster = Roster(world_size, TIMEOUT_S)
    for rank in range(world_size):
        roster.join(rank, _host(rank), now=0.0)
    return roster


def _host(rank: int) -> Host:
    return Host(f"host-{rank}", f"kernel-{rank}")


def _result(step: str, payload: bytes) -> Frame:
    return Frame(Kind.RESULT, encode_result(step, payload)[HEADER.size :])


def _frame(send: Send) -> Frame:
    [frame] = FrameReader(max_answer_bytes(1)).feed(send.frame)
    return frame


def _verdict(send: Send) -> Verdict:
    frame = _frame(send)
    assert frame.kind is Kind.VERDICT
    return decode_verdict(frame.body)
