"""One object that is sent in parts while it is made; nobody sees any of it until it is completed.

A thread feeds obstore's multipart upload from a queue. obstore sends a part from the very memory it is given, so each
part has memory of its own, which is free again when the part has arrived. Giving up aborts the upload: no parts stay.

obstore looks at how its requests went only before it begins the next one while as many are under way as it may have,
and when the upload is completed. So an upload is sent in one of two ways. *Sliding*: a part goes as soon as another has
arrived, and a refusal may come to light only at the end. *Confirmed*: several parts go together, the next ones when all
of these have arrived, and nothing is left to come to light when everything is sent.
"""

from __future__ import annotations

import threading
import time
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from shardferry.errors import StorageError
from shardferry.storage.client import e_tag_of, failures, status_of, translate
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from obstore.store import ObjectStore as Client

    from shardferry.storage.base import Bytes

# S3 takes parts of 5 MiB to 5 GiB, the last may be smaller, and 10,000 of them:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
MIN_PART_BYTES = 5 * MIB
MAX_PARTS = 10_000
# At least, but for small objects: large enough that requests cost little, small enough for several within the budget.
PART_BYTES = 8 * MIB
# Parts under way at most; more gained nothing against a local server, and it is what obstore does.
MAX_PARALLEL = 12
POLL_S = 0.05
# An upload that could not be begun is begun again, which obstore does not do if the answer broke off.
BEGINNINGS, PAUSE_S = 4, 0.5
# Taken by obstore as a part of no bytes: before it does, it waits for what it must have room for.
NOTHING = np.empty(0, np.uint8)


class _AbandonedError(Exception):
    """Makes obstore abort the upload; never leaves this module."""


def part_bytes_of(size: int) -> int:
    """Return how large the parts of an object are.

    Equal parts, but for a last one of few bytes: that is sent only when the object is completed, and is held till then.

    Examples:
        >>> part_bytes_of(1000), part_bytes_of(3 * PART_BYTES + 5) - PART_BYTES
        (1000, 1)
    """
    return max(1, size // max(1, min(size // PART_BYTES, MAX_PARTS - 1)))


class Room:
    """Memory for the parts of all uploads of a rank: those that are filled, wait, and are under way."""

    def __init__(self, num_bytes: int, count: Callable[[int], None]) -> None:
        """Give out `num_bytes` at a time; `count` is called with bytes taken, negative when they are free again."""
        self.num_bytes = num_bytes
        self._count = count
        self._held = 0
        self._changed = threading.Condition()  # its lock may be taken again: memory can be freed at any moment

    def take(self, num_bytes: int, check: Callable[[], None]) -> Bytes:
        """Return memory as soon as there is room for it, or nothing else is held; dropping it frees it.

        Args:
            num_bytes: How much.
            check: Called while waiting; may raise to stop.
        """
        with self._changed:
            while self._held and self._held + num_bytes > self.num_bytes:
                self._changed.wait(POLL_S)
                check()
            self._add(num_bytes)
        memory = np.empty(num_bytes, np.uint8)
        weakref.finalize(memory, self._add, -num_bytes).atexit = False
        return memory

    def _add(self, num_bytes: int) -> None:
        with self._changed:
            self._held += num_bytes
            self._changed.notify_all()
        self._count(num_bytes)


class Upload:
    """An object on its way.

    Attributes:
        where: Its URL, as errors name it.
        size: Bytes it will have.
        e_tag: What the store calls its content; empty until it is completed.
    """

    def __init__(
        self, client: Client, name: str, where: str, *, size: int, room: Room, is_confirmed: bool, retry_s: float
    ) -> None:
        """Begin to send.

        Args:
            client: Writes below the checkpoint's root, and tries again by itself.
            name: Of the object, relative to that.
            where: Its URL, as errors name it.
            size: Bytes it will have.
            room: Where the memory of parts comes from.
            is_confirmed: Whether it must be known that parts have arrived before the object is completed.
            retry_s: For how long it is begun again if it cannot be begun.
        """
        self.where = where
        self.size = size
        self.e_tag = ""
        self._client, self._name, self._room = client, name, room
        self._part_bytes = part_bytes_of(size)
        # Confirmed parts fill half of the room, while the next ones are made in the other half.
        together = max(1, min(MAX_PARALLEL, room.num_bytes // 2 // self._part_bytes)) if is_confirmed else 1
        self._buffer_bytes = together * self._part_bytes
        self._parallel = 1 if is_confirmed else MAX_PARALLEL
        self._queue: SimpleQueue[Bytes | None] = SimpleQueue()
        self._buffer: Bytes | None = None
        self._sent: list[weakref.ref[Bytes]] = []
        self._filled = self._written = 0
        self._error: Exception | None = None
        self._has_begun = self._is_done = False
        self._retry_s = retry_s
        self._abandoned = threading.Event()
        self._all_taken = threading.Event()
        self._thread = threading.Thread(target=self._send, name=f"upload {name}", daemon=True)
        self._thread.start()

    @property
    def position(self) -> int:
        """Bytes that have been given to it: where in the object the next ones go."""
        return self._written

    def write(self, data: Bytes, check: Callable[[], None]) -> None:
        """Append contiguous bytes; returns when they are copied, waits while there is no room.

        Args:
            data: What comes next.
            check: Called while waiting; raises if this or another upload has failed.

        Raises:
            StorageError: If the store has refused a part.
        """
        while len(data):
            if self._buffer is None:
                self._buffer = self._new_buffer(check)
            count = min(len(data), len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + count] = data[:count]
            self._filled += count
            self._written += count
            data = data[count:]
            if self._filled == len(self._buffer):
                self._hand_over()

    def settle(self, check: Callable[[], None]) -> None:
        """Wait until everything has been sent that can be sent before the object is completed.

        If the upload is confirmed it has arrived too.

        Args:
            check: Called while waiting; raises if this or another upload has failed.
        """
        assert self._written == self.size, f"{self._written} of {self.size} bytes of {self.where}"
        self._queue.put(NOTHING)
        while not self._all_taken.is_set() or any(memory() is not None for memory in self._sent):
            self._thread.join(POLL_S)
            check()

    def raise_if_failed(self) -> None:
        """Raise if it has ended without being completed.

        Raises:
            StorageError: If the store has refused a part.
        """
        if self._thread.is_alive() or self._is_done:
            return
        if self._error is not None:
            raise translate(self._error, self.where) from None
        raise StorageError(f"{self.where}: the upload ended early")

    def complete(self) -> None:
        """Make the object visible.

        Raises:
            StorageError: If the store does not confirm it.
        """
        self._end()
        self.raise_if_failed()

    def abandon(self) -> None:
        """Begin to give up; `abort` waits until that is done."""
        self._abandoned.set()
        self._queue.put(None)

    def abort(self) -> None:
        """Give up: the parts that have been sent are removed."""
        self.abandon()
        self._end()

    def _new_buffer(self, check: Callable[[], None]) -> Bytes:
        whole_parts = (self.size - self._written) // self._part_bytes * self._part_bytes
        if not whole_parts:  # fewer than MAX_PARTS bytes, held until the object is completed: no room may wait for them
            return np.empty(self.size - self._written, np.uint8)
        buffer = self._room.take(min(self._buffer_bytes, whole_parts), check)
        self._sent = [memory for memory in self._sent if memory() is not None]
        self._sent.append(weakref.ref(buffer))
        return buffer

    def _hand_over(self) -> None:
        assert self._buffer is not None
        self.raise_if_failed()
        self._queue.put(self._buffer)
        self._buffer, self._filled = None, 0

    def _end(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._buffer = None

    def _send(self) -> None:
        from obstore import put  # noqa: PLC0415 - an extra

        last_beginning = time.monotonic() + self._retry_s
        for _ in range(BEGINNINGS):
            try:
                made = put(
                    self._client,
                    self._name,
                    self._parts(),  # type: ignore[arg-type] # obstore takes NumPy arrays as what they are, buffers
                    use_multipart=True,
                    chunk_size=self._part_bytes,
                    max_concurrency=self._parallel,
                )
            except _AbandonedError:
                return
            except failures() as error:
                self._error = error
                if self._has_begun or status_of(error) is not None:
                    return
                if self._abandoned.wait(PAUSE_S) or time.monotonic() > last_beginning:
                    return
            else:
                self.e_tag = e_tag_of(made)
                self._is_done = True
                return

    def _parts(self) -> Iterator[Bytes]:
        while True:
            parts = self._queue.get()
            self._has_begun = True
            if self._abandoned.is_set():
                raise _AbandonedError
            if parts is None:
                return
            yield parts
            if parts is NOTHING:
                self._all_taken.set()
            del parts  # else the last ones sent would be held until the next ones come
