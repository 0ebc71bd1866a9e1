"""One object that is sent in parts while it is made; nobody sees any of it until it is completed.

A thread feeds obstore's multipart upload from a queue. obstore sends a part from the very memory it is given, so each
part has memory of its own, which is free again when the part has arrived. Giving up aborts the upload: no parts stay.
"""

from __future__ import annotations

import threading
import time
import weakref
from queue import Full, Queue
from typing import TYPE_CHECKING

import numpy as np

from shardferry.errors import StorageError
from shardferry.storage.client import failures, status_of, translate
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


class Upload:
    """An object on its way."""

    def __init__(
        self, client: Client, name: str, where: str, *, size: int, parallel: int, count: Callable[[int], None]
    ) -> None:
        """Begin to send.

        Args:
            client: Writes below the checkpoint's root, and tries again by itself.
            name: Of the object, relative to that.
            where: Its URL, as errors name it.
            size: Bytes it will have.
            parallel: Parts under way at the same time.
            count: Called with the bytes of memory taken, negative when they are free again.
        """
        self.where = where
        self.size = size
        self._client, self._name, self._parallel, self._count = client, name, parallel, count
        self._part_bytes = part_bytes_of(size)
        self._queue: Queue[Bytes | Exception | None] = Queue(maxsize=1)
        self._part: Bytes | None = None
        self._filled = self._written = self._held = 0
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._has_begun = False
        self._thread = threading.Thread(target=self._send, name=f"upload {name}", daemon=True)
        self._thread.start()

    @property
    def position(self) -> int:
        """Bytes that have been given to it: where in the object the next ones go."""
        return self._written

    def write(self, data: Bytes, check: Callable[[], None]) -> None:
        """Append contiguous bytes; returns when they are copied, waits while too many parts are under way.

        Args:
            data: What comes next.
            check: Called while waiting; may raise to stop.

        Raises:
            StorageError: If the store has refused a part.
        """
        while len(data):
            if self._part is None:
                self._part = self._new_part()
            count = min(len(data), len(self._part) - self._filled)
            self._part[self._filled : self._filled + count] = data[:count]
            self._filled += count
            self._written += count
            data = data[count:]
            if self._filled == len(self._part):
                self._hand_over(check)

    def settle(self, check: Callable[[], None]) -> None:
        """Wait until everything has been sent that can be sent before the object is completed.

        Raises:
            StorageError: If the store has refused a part.
        """
        assert self._written == self.size, f"{self._written} of {self.size} bytes of {self.where}"
        if self._filled:
            self._hand_over(check)
        tail = self._written % self._part_bytes
        while self._held > tail:
            self._thread.join(POLL_S)
            self._raise_if_failed()
            check()

    def complete(self) -> None:
        """Make the object visible.

        Raises:
            StorageError: If the store does not confirm it.
        """
        self._end(None)
        if self._error is not None:
            raise translate(self._error, self.where) from None

    def abort(self) -> None:
        """Give up: the parts that have been sent are removed."""
        self._end(_AbandonedError())

    def _new_part(self) -> Bytes:
        left = self.size - self._written
        part = np.empty(min(self._part_bytes, left), np.uint8)
        self._take(part.nbytes)
        weakref.finalize(part, self._take, -part.nbytes).atexit = False
        return part

    def _take(self, num_bytes: int) -> None:
        with self._lock:
            self._held += num_bytes
        self._count(num_bytes)

    def _hand_over(self, check: Callable[[], None]) -> None:
        part, self._part, self._filled = self._part, None, 0
        while True:
            self._raise_if_failed()
            try:
                self._queue.put(part, timeout=POLL_S)
            except Full:
                check()
            else:
                return

    def _raise_if_failed(self) -> None:
        if self._thread.is_alive():
            return
        if self._error is not None:
            raise translate(self._error, self.where) from None
        raise StorageError(f"{self.where}: the upload ended early")

    def _end(self, last: Exception | None) -> None:
        while self._thread.is_alive():
            try:
                self._queue.put(last, timeout=POLL_S)
            except Full:
                continue
            break
        self._thread.join()
        self._part = None

    def _send(self) -> None:
        from obstore import put  # noqa: PLC0415 - an extra

        for _ in range(BEGINNINGS):
            try:
                put(
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
                time.sleep(PAUSE_S)
            else:
                self._error = None
                return

    def _parts(self) -> Iterator[Bytes]:
        while True:
            part = self._queue.get()
            self._has_begun = True
            if part is None:
                return
            if isinstance(part, Exception):
                raise part
            yield part
            del part  # else the last part sent would be held until the next one comes
