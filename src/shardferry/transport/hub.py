"""The place where all ranks meet: a thread on rank 0 with one connection per rank, rank 0's own too.

A star of sockets and not a store, because a connection tells at once when the process at its other end is gone. The
thread only moves frames; what they mean is decided by the roster. One selector serves any number of ranks.
"""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
import threading
from typing import TYPE_CHECKING

from shardferry.transport.connection import AwakeClock, Connection, Wake, beat_interval_s, keep_from_forks
from shardferry.transport.frames import MAX_HELLO_BYTES, MAX_PAYLOAD_BYTES, Frame, Kind, decode_hello, encode
from shardferry.transport.host import Host
from shardferry.transport.roster import Roster, Send

if TYPE_CHECKING:
    from collections.abc import Iterable

# A guess: long enough for a busy host to take a last frame, short enough not to matter to someone who waits for an
# error.
LINGER_S = 1.0
# A guess: a rank says HELLO as soon as it is connected; anything slower is no rank.
HELLO_WITHIN_S = 10.0
MAX_FRAME_BYTES = MAX_PAYLOAD_BYTES + (1 << 16) + 2  # a payload, and the name of its step

logger = logging.getLogger(__name__)


class Hub:
    """Serves one group until it is closed."""

    def __init__(self, bind_address: str, *, world_size: int, token: str, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in bind_address else socket.AF_INET
        self._listener = socket.create_server((bind_address, 0), family=family, backlog=world_size + 8)
        self._listener.setblocking(False)  # noqa: FBT003 - the standard library's signature
        keep_from_forks(self._listener)
        self.port: int = self._listener.getsockname()[1]
        self._token = token.encode()
        self._interval_s = beat_interval_s(timeout_s)
        self._clock = AwakeClock(max_step_s=2 * self._interval_s)
        self._roster = Roster(world_size, timeout_s)
        self._strangers: dict[Connection, float] = {}  # connected but not yet authenticated, and since when
        self._members: dict[int, Connection] = {}
        self._ranks: dict[Connection, int] = {}  # the other way round
        self._members_changed = threading.Condition()
        self._wake = Wake()
        self._closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake.reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="shardferry-hub", daemon=True)
        self._thread.start()

    def wait_until_left(self, limit_s: float) -> bool:
        """Return whether every rank but rank 0 has left or is gone, waiting at most `limit_s` for it."""
        with self._members_changed:
            return self._members_changed.wait_for(lambda: self._members.keys() <= {0}, limit_s)

    def close(self) -> None:
        """Send what is still to be sent, say goodbye to all ranks, and end the thread; takes at most `LINGER_S`."""
        self._closing.set()
        self._wake.ring()
        self._thread.join()

    def _serve(self) -> None:
        try:
            self._serve_until_closing()
            self._part()
        except Exception:
            # A fault of this file. The connections close below, so every rank learns that the hub is gone.
            logger.exception("the hub of the group failed")
        finally:
            for connection in (*self._strangers, *self._members.values()):
                connection.close()
            self._listener.close()
            self._selector.close()
            self._wake.close()

    def _serve_until_closing(self) -> None:
        judge_at = 0.0
        while not self._closing.is_set():
            self._turn(self._interval_s)
            now = self._clock.read()
            if now >= judge_at:
                judge_at = now + self._interval_s
                self._judge(now)

    def _part(self) -> None:
        """Say goodbye and wait until every rank has closed its side: closing first may take back what was sent."""
        self._deliver([Send(tuple(self._members), encode(Kind.GOODBYE))])
        deadline = self._clock.read() + LINGER_S
        while self._members and self._clock.read() < deadline:
            for connection in self._members.values():
                connection.end_sending()
            self._turn(LINGER_S / 20)

    def _turn(self, timeout_s: float) -> None:
        """Wait for something to happen, and handle it."""
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake.reader:
                self._wake.clear()
            elif isinstance(key.data, Connection):
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ:
                    self._read(key.data)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # the peer gave up meanwhile, or this process is out of descriptors: its time-out tells
        connection = Connection(sock, max_body_bytes=MAX_HELLO_BYTES)
        self._strangers[connection] = self._clock.read()
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _read(self, connection: Connection) -> None:
        rank = self._ranks.get(connection)
        try:
            frames = connection.receive()
            if rank is None and frames:
                rank = self._admit(connection, frames.pop(0))
        except ValueError as error:
            logger.warning("closing a connection that does not speak as a rank: %s", error)
            connection.ended = True
            frames = []
        if rank is not None:
            self._roster.hear(rank, self._clock.read())
            for frame in frames:
                self._deliver(self._roster.receive(rank, frame))
        if connection.ended:
            self._drop(connection, rank)

    def _admit(self, connection: Connection, frame: Frame) -> int:
        """Return the rank that a HELLO introduces.

        Raises:
            ValueError: If the frame is no HELLO, has another token, or names a rank that is not expected.
        """
        token, rank, host, kernel = decode_hello(frame)
        if not hmac.compare_digest(token.encode(), self._token):
            raise ValueError("it does not know the token")
        if not self._roster.expects(rank):
            raise ValueError(f"rank {rank} is not expected, or is already here")
        connection.reader.max_body_bytes = MAX_FRAME_BYTES
        del self._strangers[connection]
        with self._members_changed:
            self._members[rank] = connection
        self._ranks[connection] = rank
        self._deliver(self._roster.join(rank, Host(host, kernel), self._clock.read()))
        return rank

    def _judge(self, now: float) -> None:
        self._deliver(self._roster.judge(now))
        for connection, since in list(self._strangers.items()):
            if now - since > HELLO_WITHIN_S:
                self._drop(connection, None)
        for rank, connection in list(self._members.items()):
            if self._roster.is_lost(rank, now):
                self._drop(connection, rank)  # it was sent the verdict; nobody waits for it at the end
            elif not connection.has_outgoing:
                connection.send(encode(Kind.BEAT))

    def _deliver(self, sends: Iterable[Send]) -> None:
        for ranks, frame in sends:
            for rank in ranks:
                if rank in self._members:
                    connection = self._members[rank]
                    connection.send(frame)
                    self._watch(connection)

    def _flush(self, connection: Connection) -> None:
        connection.flush()
        self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_outgoing else 0)
        if self._selector.get_key(connection.socket).events != events:
            self._selector.modify(connection.socket, events, connection)

    def _drop(self, connection: Connection, rank: int | None) -> None:
        self._strangers.pop(connection, None)
        self._selector.unregister(connection.socket)
        connection.close()
        if rank is not None:
            del self._ranks[connection]
            with self._members_changed:
                del self._members[rank]
                self._members_changed.notify_all()
            self._deliver(self._roster.disconnect(rank))
