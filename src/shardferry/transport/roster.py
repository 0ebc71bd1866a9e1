"""What the hub knows of the ranks, and what follows from it. No sockets, no threads, no clock.

Every method takes something that happened and returns the frames to send. The rules:

- The group is complete when every rank has joined. A rank that has not, `timeout_s` after the first did, never called.
- A step is complete when every rank has sent its result; then all get all results. Every rank must name the same step.
- The first failure is the verdict, sent to everyone at once, also to ranks that are still working or come later.
- A rank whose connection ends without a goodbye has ended. One that is silent for `timeout_s` is lost. A rank that
  works for long is neither: its signs of life come from a thread beside the work.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardferry.transport.frames import (
    Frame,
    Kind,
    Verdict,
    decode_result,
    encode_answer,
    encode_json,
    encode_verdict,
)
from shardferry.transport.host import Host, host_identities

if TYPE_CHECKING:
    from collections.abc import Iterable

UNKNOWN_HOST = Host("unknown", "")


class Send(NamedTuple):
    """A frame and the ranks that shall have it."""

    ranks: tuple[int, ...]
    frame: bytes


@dataclass(slots=True)
class _Member:
    host: Host
    heard_at: float
    left: bool = False


class Roster:
    """The state of one group at its hub."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.verdict: Verdict | None = None
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._members: dict[int, _Member] = {}
        self._first_joined_at = 0.0
        self._step: str | None = None
        self._last_step = "connecting"
        self._entered: set[int] = set()
        self._results: dict[int, bytes] = {}

    def expects(self, rank: int) -> bool:
        """Return whether `rank` may join."""
        return 0 <= rank < self._world_size and rank not in self._members

    def join(self, rank: int, host: Host, now: float) -> list[Send]:
        """Add a rank; the last one completes the group."""
        if not self._members:
            self._first_joined_at = now
        self._members[rank] = _Member(host, heard_at=now)
        if self.verdict is not None:
            return [Send((rank,), encode_verdict(self.verdict))]
        if len(self._members) < self._world_size:
            return []
        hosts = [self._members[member].host for member in range(self._world_size)]
        return [Send(tuple(self._members), encode_json(Kind.WELCOME, host_identities(hosts)))]

    def hear(self, rank: int, now: float) -> None:
        """Take note that bytes came from a member, be it part of a frame."""
        self._members[rank].heard_at = now

    def receive(self, rank: int, frame: Frame) -> list[Send]:
        """Take a frame that a member sent."""
        if self.verdict is not None:
            return []
        match frame.kind:
            case Kind.BEAT:
                return []
            case Kind.ENTER:
                return self._enter(rank, frame.body.decode())
            case Kind.RESULT:
                return self._result(rank, *decode_result(frame.body))
            case Kind.ERROR:
                step, cause = _decode_error(frame.body)
                return self._condemn(rank, cause, step=step)
            case Kind.GOODBYE:
                return self._leave(rank)
            case _:
                raise ValueError(f"a {frame.kind.name} frame from rank {rank}")

    def disconnect(self, rank: int) -> list[Send]:
        """Take note that a member's connection has ended."""
        if self._members[rank].left:
            return []
        self._members[rank].left = True
        return self._condemn(rank, "the process ended: its connection closed without a goodbye")

    def judge(self, now: float) -> list[Send]:
        """Look for ranks that have been silent, or absent, for too long; call it now and then."""
        for rank, member in self._members.items():
            if not member.left and now - member.heard_at > self._timeout_s:
                return self._condemn(
                    rank,
                    f"no sign of life for {self._timeout_s:g} s: its process is stopped, or its machine unreachable",
                )
        missing = self._world_size - len(self._members)
        if missing and self._members and now - self._first_joined_at > self._timeout_s:
            return self._condemn_absent()
        return []

    def is_lost(self, rank: int, now: float) -> bool:
        """Return whether a member has been silent for too long."""
        return now - self._members[rank].heard_at > self._timeout_s

    def _enter(self, rank: int, step: str) -> list[Send]:
        if self._step is None:
            self._step = step
        if step != self._step:
            others = name_ranks(self._entered)
            return self._condemn(
                rank,
                f'it is in "{step}" while {others} {"are" if len(self._entered) > 1 else "is"} in "{self._step}": '
                "all ranks must make the same calls in the same order",
            )
        self._entered.add(rank)
        return self._condemn_leavers()

    def _result(self, rank: int, step: str, payload: bytes) -> list[Send]:
        sends = self._enter(rank, step)
        if rank in self._results and not sends:
            return self._condemn(rank, "it went on with the group after an interrupted exchange")
        self._results[rank] = payload
        if self.verdict is not None or len(self._results) < self._world_size:
            return sends
        answer = encode_answer([self._results[member] for member in range(self._world_size)])
        self._last_step = step
        self._step = None
        self._entered = set()
        self._results = {}
        return [Send(tuple(self._members), answer)]

    def _leave(self, rank: int) -> list[Send]:
        self._members[rank].left = True
        return self._condemn_leavers()

    def _condemn_leavers(self) -> list[Send]:
        """A step that some rank has entered needs the ranks that have left."""
        leavers = [rank for rank, member in self._members.items() if member.left]
        if not leavers or not self._entered:
            return []
        waiting = name_ranks(self._entered)
        return self._condemn(min(leavers), f'it left the group while {waiting} entered "{self._step}"')

    def _condemn_absent(self) -> list[Send]:
        absent = [rank for rank in range(self._world_size) if rank not in self._members]
        names = name_ranks(absent)
        return self._condemn(
            absent[0],
            f"{names} did not make this call within {self._timeout_s:g} s of the first rank: "
            "it must be made on every rank of the process group",
        )

    def _condemn(self, rank: int, cause: str, *, step: str | None = None) -> list[Send]:
        if self.verdict is not None:
            return []
        member = self._members.get(rank)
        where = step or self._step or (f"work after {self._last_step}" if self._is_complete() else "connecting")
        host = member.host if member else UNKNOWN_HOST
        self.verdict = Verdict(where, rank, host.name, cause)
        return [Send(tuple(self._members), encode_verdict(self.verdict))]

    def _is_complete(self) -> bool:
        return len(self._members) == self._world_size


def name_ranks(ranks: Iterable[int]) -> str:
    """Return the ranks in words, runs of them shortened.

    Examples:
        >>> name_ranks([3]), name_ranks([0, 2]), name_ranks([7, 0, 1, 2, 3])
        ('rank 3', 'ranks 0 and 2', 'ranks 0-3 and 7')
    """
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    if len(words) > 1:
        words = [", ".join(words[:-1]) + " and " + words[-1]]
    plural = len(runs) > 1 or runs[0][0] != runs[0][1]
    return f"{'ranks' if plural else 'rank'} {words[0]}"


def _decode_error(body: bytes) -> tuple[str, str]:
    step, cause = json.loads(body)
    return step, cause
