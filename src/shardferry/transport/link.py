"""A rank's connection to the hub, looked after by a thread of its own.

The thread sends what the rank queues, sends signs of life however long the rank works, and notes what the hub says, so
that asking for the verdict is a look at a field. Nothing but the thread touches the socket: a signal that interrupts
the rank's own thread can never leave half a frame behind.
"""

from __future__ import annotations

import json
import logging
import selectors
import threading
from collections import deque
from typing import TYPE_CHECKING

from shardferry.transport.connection import AwakeClock, Connection, Wake, beat_interval_s
from shardferry.transport.frames import (
    Frame,
    Kind,
    Verdict,
    decode_answer,
    decode_verdict,
    encode,
    max_answer_bytes,
)
from shardferry.transport.hub import LINGER_S

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class Link:
    """What the hub has said, and a way to answer.

    Attributes:
        hosts: The machine of each rank; empty until all ranks are there.
        answer: The payloads of the step in progress; set to None by the rank before it sends its own.
        verdict: What ended the group, if something did. Its step is empty where this rank inferred it from silence.
        has_ended: Whether nothing more will come: the hub has said goodbye, or is gone.
    """

    def __init__(self, sock: socket.socket, *, world_size: int, hub_host: str, timeout_s: float) -> None:
        self.hosts: tuple[str, ...] = ()
        self.answer: tuple[bytes, ...] | None = None
        self.verdict: Verdict | None = None
        self.has_ended = False
        self._hub_host = hub_host
        self._timeout_s = timeout_s
        self._interval_s = beat_interval_s(timeout_s)
        self._connection = Connection(sock, max_body_bytes=max_answer_bytes(world_size))
        self._wake = Wake()
        self._outgoing: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._hub_left = False
        self._thread = threading.Thread(target=self._run, name="shardferry-link", daemon=True)
        self._thread.start()

    def send(self, frame: bytes) -> None:
        """Queue a frame and return."""
        self._outgoing.append(frame)
        self._wake.ring()

    def wait(self, is_there: Callable[[], bool], *, limit_s: float | None) -> None:
        """Return when `is_there()`, or when it will not come: a verdict has, the link has ended, `limit_s` is over."""
        with self._changed:
            self._changed.wait_for(lambda: is_there() or self.verdict is not None or self.has_ended, timeout=limit_s)

    def close(self) -> None:
        """Send what is queued and a goodbye, and end the thread; takes at most `LINGER_S`. May be called again."""
        if not self._closing:
            self._outgoing.append(encode(Kind.GOODBYE))
            self._closing = True
            self._wake.ring()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._serve(AwakeClock(max_step_s=2 * self._interval_s))
        except Exception:
            logger.exception("the link to the hub failed")
            self._infer("this rank's link to it failed; the log of this rank has the traceback")
        finally:
            self._connection.close()
            self._wake.close()
            with self._changed:
                self.has_ended = True
                self._changed.notify_all()

    def _serve(self, clock: AwakeClock) -> None:
        heard_at = clock.read()
        beat_at = heard_at
        close_at: float | None = None
        with selectors.PollSelector() as selector:
            selector.register(self._wake.reader, selectors.EVENT_READ)
            selector.register(self._connection.socket, selectors.EVENT_READ)
            while not self._connection.ended:
                closing = self._turn(selector)
                now = clock.read()
                if self._hear():
                    heard_at = now
                elif now - heard_at > self._timeout_s + 2 * self._interval_s:
                    self._infer(
                        f"no sign of life for {self._timeout_s:g} s from this rank, which connects the others "
                        "(inferred: its process is stopped, or its machine unreachable)"
                    )
                    return
                if closing:
                    close_at = close_at or now + LINGER_S
                    self._connection.end_sending()
                    if now > close_at:
                        return
                elif now >= beat_at:
                    beat_at = now + self._interval_s
                    self.send(encode(Kind.BEAT))
        if not self._hub_left and not self._closing:
            self._infer(
                "the connection to this rank, which connects the others, was lost (inferred: its process ended)"
            )

    def _turn(self, selector: selectors.BaseSelector) -> bool:
        """Wait for something to happen, send what is queued, and return whether the goodbye was part of it."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._connection.has_outgoing else 0)
        selector.modify(self._connection.socket, events)
        selector.select(min(self._interval_s, LINGER_S / 20) if self._closing else self._interval_s)
        self._wake.clear()
        closing = self._closing  # set after the goodbye was queued, so looked at before the queue is emptied
        while self._outgoing:
            self._connection.send(self._outgoing.popleft())
        self._connection.flush()
        return closing

    def _hear(self) -> bool:
        """Note what has arrived, and return whether anything has, be it part of a frame."""
        num_received = self._connection.num_received
        for frame in self._connection.receive():
            self._note(frame)
        return self._connection.num_received > num_received

    def _note(self, frame: Frame) -> None:
        with self._changed:
            match frame.kind:
                case Kind.WELCOME:
                    self.hosts = tuple(json.loads(frame.body))
                case Kind.ANSWER:
                    self.answer = decode_answer(frame.body)
                case Kind.VERDICT:
                    self.verdict = decode_verdict(frame.body)
                case Kind.GOODBYE:
                    self._hub_left = True
                case _:
                    return
            self._changed.notify_all()

    def _infer(self, cause: str) -> None:
        with self._changed:
            self.verdict = self.verdict or Verdict("", 0, self._hub_host, cause)
            self._changed.notify_all()
