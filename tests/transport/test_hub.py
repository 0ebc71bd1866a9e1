"""The hub against peers that speak its messages by hand, and against peers that do not."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

import pytest

from shardferry.transport.frames import (
    HEADER,
    Frame,
    FrameReader,
    Hello,
    Kind,
    Verdict,
    decode_verdict,
    encode,
    encode_json,
    max_answer_bytes,
)
from shardferry.transport.hub import Hub

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOPBACK = "127.0.0.1"
TOKEN = "the token"  # noqa: S105 - of a hub that lives for one test
WITHIN_S = 10.0


class Peer:
    """A socket to the hub, and the frames that came from it."""

    def __init__(self, hub: Hub) -> None:
        self.socket = socket.create_connection((LOOPBACK, hub.port), timeout=WITHIN_S)
        self._reader = FrameReader(max_answer_bytes(1))
        self._frames: list[Frame] = []

    def say_hello(self, rank: int, token: str = TOKEN) -> None:
        self.socket.sendall(encode_json(Kind.HELLO, Hello(token, rank, f"host-{rank}", "kernel")))

    def next_frame(self) -> Frame | None:
        """Return the next frame that is no sign of life, or None at the end of the connection."""
        while True:
            while self._frames:
                frame = self._frames.pop(0)
                if frame.kind is not Kind.BEAT:
                    return frame
            try:
                data = self.socket.recv(4096)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self._frames = self._reader.feed(data)

    def next_verdict(self) -> Verdict:
        frame = self.next_frame()
        assert frame is not None
        assert frame.kind is Kind.VERDICT
        return decode_verdict(frame.body)


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub of two ranks that is patient."""
    with contextlib.closing(Hub(LOOPBACK, world_size=2, token=TOKEN, timeout_s=30.0)) as hub:
        yield hub


@contextlib.contextmanager
def peers(hub: Hub, count: int) -> Iterator[list[Peer]]:
    found = [Peer(hub) for _ in range(count)]
    yield found
    for peer in found:
        peer.socket.close()


def test_two_ranks_are_welcomed(hub: Hub) -> None:
    with peers(hub, 2) as (first, second):
        first.say_hello(0)
        second.say_hello(1)

        frames = [first.next_frame(), second.next_frame()]

    assert [frame.kind for frame in frames if frame] == [Kind.WELCOME, Kind.WELCOME]


def test_a_rank_whose_connection_ends_without_a_goodbye_has_ended(hub: Hub) -> None:
    with peers(hub, 2) as (first, second):
        first.say_hello(0)
        second.say_hello(1)
        assert second.next_frame() is not None

        second.socket.close()

        assert first.next_frame() is not None
        assert first.next_verdict()[1:3] == (1, "host-1")


def test_a_silent_rank_is_lost_and_told_so_itself() -> None:
    with (
        contextlib.closing(Hub(LOOPBACK, world_size=2, token=TOKEN, timeout_s=0.4)) as hub,
        peers(hub, 2) as (first, second),
    ):
        first.say_hello(0)
        second.say_hello(1)
        assert first.next_frame() is not None
        assert second.next_frame() is not None
        first.socket.settimeout(0.02)
        verdict = None
        while verdict is None:  # rank 0 gives signs of life, rank 1 does not
            first.socket.sendall(encode(Kind.BEAT))
            with contextlib.suppress(TimeoutError):
                verdict = first.next_verdict()

        assert verdict.rank == 1
        assert "no sign of life for 0.4 s" in verdict.cause
        assert second.next_verdict() == verdict


def test_missing_ranks_are_named_to_the_ranks_that_came() -> None:
    with contextlib.closing(Hub(LOOPBACK, world_size=3, token=TOKEN, timeout_s=0.2)) as hub, peers(hub, 1) as [only]:
        only.say_hello(0)

        # Silent itself, it may be the one that is named; what matters is that the wait ends.
        assert only.next_verdict().rank in {0, 1}


@pytest.mark.parametrize(
    "words",
    [
        encode_json(Kind.HELLO, Hello("another token", 1, "h", "k")),
        encode_json(Kind.HELLO, Hello(TOKEN, 2, "h", "k")),
        encode_json(Kind.HELLO, Hello(TOKEN, 0, "h", "k")),
        encode_json(Kind.HELLO, [TOKEN, 1]),
        encode_json(Kind.HELLO, {"token": TOKEN}),
        encode(Kind.HELLO, b"[" * 4000),
        encode(Kind.HELLO, b"\xff\xfe"),
        encode(Kind.RESULT, b"\x00\x01step"),
        HEADER.pack(1 << 40, Kind.HELLO),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["token", "rank", "twice", "incomplete", "mapping", "nested", "no-text", "no-hello", "endless", "http"],
)
def test_a_stranger_is_turned_away_and_the_group_goes_on(hub: Hub, words: bytes) -> None:
    with peers(hub, 3) as (first, stranger, second):
        first.say_hello(0)
        stranger.socket.sendall(words)

        assert stranger.next_frame() is None
        second.say_hello(1)
        frame = first.next_frame()

    assert frame is not None
    assert frame.kind is Kind.WELCOME


def test_closing_the_hub_delivers_what_was_said_and_a_goodbye() -> None:
    hub = Hub(LOOPBACK, world_size=2, token=TOKEN, timeout_s=30.0)
    with peers(hub, 2) as (first, second):
        first.say_hello(0)
        second.say_hello(1)
        assert first.next_frame() is not None
        assert second.next_frame() is not None
        first.socket.sendall(encode_json(Kind.ERROR, ["read tensors", "ValueError: odd"]))
        assert first.next_verdict().rank == 0
        first.socket.close()
        second.socket.shutdown(socket.SHUT_WR)

        hub.close()

        assert second.next_verdict().cause == "ValueError: odd"
