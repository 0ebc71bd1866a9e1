"""One TCP connection that speaks in frames and never blocks, and what a thread needs to look after some of them."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING

from shardferry.transport.frames import FrameReader

if TYPE_CHECKING:
    from shardferry.transport.frames import Frame

# A guess: several small frames, or a good part of a large one, per system call.
RECEIVE_BYTES = 1 << 18

_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Connection:
    """A connected socket, frames in, frames out. Used by one thread only.

    Attributes:
        socket: The socket, for a selector.
        reader: What cuts the bytes into frames.
        ended: Whether the peer has closed or reset the connection.
        num_received: Bytes received so far.
    """

    def __init__(self, sock: socket.socket, *, max_body_bytes: int) -> None:
        sock.setblocking(False)  # noqa: FBT003 - the standard library's signature
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_from_forks(sock)
        self.socket = sock
        self.reader = FrameReader(max_body_bytes)
        self.ended = False
        self.num_received = 0
        self._outgoing: deque[memoryview] = deque()
        self._done_sending = False

    @property
    def has_outgoing(self) -> bool:
        """Whether bytes wait for the kernel to take them."""
        return bool(self._outgoing)

    def receive(self) -> list[Frame]:
        """Return the frames that have arrived; sets `ended` when the peer has closed or reset the connection.

        Raises:
            ValueError: If the bytes are not frames.
        """
        try:
            data = self.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""  # a reset, or a network that gave up: the peer is as gone as after a close
        self.ended = not data
        self.num_received += len(data)
        return self.reader.feed(data)

    def send(self, frame: bytes) -> None:
        """Send `frame` as far as the kernel takes it now; `flush` sends the rest later."""
        self._outgoing.append(memoryview(frame))
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the kernel takes it now."""
        try:
            while self._outgoing:
                view = self._outgoing[0]
                sent = self.socket.send(view)
                if sent == len(view):
                    self._outgoing.popleft()
                else:
                    self._outgoing[0] = view[sent:]
        except BlockingIOError:
            return
        except OSError:
            self._outgoing.clear()  # nobody is there to read it; reading from the socket will tell

    def end_sending(self) -> None:
        """Tell the peer that nothing follows, once everything is sent. May be called again."""
        if self._outgoing or self._done_sending:
            return
        self._done_sending = True
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.ended = True  # no longer connected

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


class Wake:
    """Lets other threads end a thread's wait in a selector, by making `reader` readable."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        for sock in (self.reader, self._writer):
            sock.setblocking(False)  # noqa: FBT003 - the standard library's signature
            keep_from_forks(sock)

    def ring(self) -> None:
        """End the wait; after `close` this does nothing."""
        try:
            self._writer.send(b"\0")
        except OSError:
            return  # so many rings wait already that the buffer is full, or the thread has ended

    def clear(self) -> None:
        """Forget the rings so far."""
        try:
            self.reader.recv(4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close both ends."""
        self.reader.close()
        self._writer.close()


class AwakeClock:
    """A clock that stands still while this process does.

    After a stop (SIGSTOP, a suspended machine, a call that kept the interpreter) a thread would find every peer silent
    for too long, though nobody had a chance to be heard. So one reading never adds more than `max_step_s`.
    """

    def __init__(self, max_step_s: float) -> None:
        self._max_step_s = max_step_s
        self._time_s = 0.0
        self._read_at = time.monotonic()

    def read(self) -> float:
        """Return the seconds since the start while this process was awake; call it more often than `max_step_s`."""
        now = time.monotonic()
        self._time_s += min(now - self._read_at, self._max_step_s)
        self._read_at = now
        return self._time_s


def beat_interval_s(timeout_s: float) -> float:
    """Return how often to send a sign of life: four times in `timeout_s`, and no less than once a second."""
    return min(1.0, timeout_s / 4)


def keep_from_forks(sock: socket.socket) -> None:
    """Close `sock` in children that this process forks.

    A child that holds it (a data loader's worker, say) would keep the connection open after this process was killed,
    and the other ranks would wait for the time-out instead of seeing the end.
    """
    _open_sockets.add(sock)


def _close_in_child() -> None:
    for sock in list(_open_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_in_child)
