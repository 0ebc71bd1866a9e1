"""Bulk bytes between ranks over a gloo group of our own.

Bytes go from point to point, so that ranks which have nothing for each other need not meet. Gloo can say of such a
transfer only that it is done, by blocking: a thread waits for it, while the caller looks out for failures of others.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardferry.storage.base import Bytes

# A transfer is given up by the group's verdict, not by gloo: its own limit only has to be out of the way.
GLOO_TIMEOUT = timedelta(days=1)
POLL_S = 0.05
# The group names a dead rank within milliseconds.
VERDICT_WITHIN_S = 2.0


class GlooMover:
    """Moves bytes as unsigned integers, the one type that every backend leaves alone."""

    def __init__(self, group: dist.ProcessGroup, check: Callable[[], None]) -> None:
        """Move between the ranks of `group`, all ranks; `check` raises when another rank has failed."""
        self._group = group
        self._rank = dist.get_rank(group)
        self._check = check
        self._waiter = ThreadPoolExecutor(1)

    def all_to_all(self, send: Bytes, send_sizes: Sequence[int], receive: Bytes, receive_sizes: Sequence[int]) -> None:
        """Send a part of `send` to every rank, and fill `receive` with what every rank sends here."""
        sends, receives = dict(enumerate(_cut(send, send_sizes))), dict(enumerate(_cut(receive, receive_sizes)))
        np.copyto(receives.pop(self._rank), sends.pop(self._rank))
        self._move(sends, receives)

    def all_gather(self, ranks: Sequence[int], send: Bytes, receive: Bytes, receive_sizes: Sequence[int]) -> None:
        """Send all of `send` to some ranks, and fill `receive` with what each of them sends so."""
        receives = dict(zip(ranks, _cut(receive, receive_sizes), strict=True))
        del receives[self._rank]
        self._move(dict.fromkeys(receives, send), receives)

    def close(self) -> None:
        """End the thread that waits for transfers; none may be under way."""
        self._waiter.shutdown()

    def _move(self, sends: dict[int, Bytes], receives: dict[int, Bytes]) -> None:
        works = [
            cast("dist.Work", operation(torch.from_numpy(data), rank, group=self._group))
            for operation, transfers in ((dist.irecv, receives), (dist.isend, sends))
            for rank, data in transfers.items()
            if len(data)
        ]
        moved = self._waiter.submit(_wait_for, works)
        try:
            while not wait([moved], POLL_S).done:
                self._check()
        except BaseException:
            # What another rank has failed to send never comes. A limit that is over makes gloo give all up.
            with contextlib.suppress(RuntimeError):
                _wait_for(works, timedelta(milliseconds=1))
            raise
        try:
            moved.result()
        except RuntimeError:
            self._wait_for_verdict()
            raise

    def _wait_for_verdict(self) -> None:
        """Raise what the group says of it, if it says so soon: gloo knows that a rank is gone, but not which."""
        deadline = time.monotonic() + VERDICT_WITHIN_S
        while time.monotonic() < deadline:
            self._check()
            time.sleep(POLL_S)


@contextmanager
def open_mover(check: Callable[[], None]) -> Iterator[GlooMover]:
    """Make a group of all ranks for the context, and drop it at the end, also after a failure. Collective."""
    group = dist.new_group(backend="gloo", timeout=GLOO_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    mover = GlooMover(group, check)
    try:
        yield mover
    finally:
        mover.close()
        dist.destroy_process_group(group)


def _cut(data: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    return [data[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _wait_for(works: Sequence[dist.Work], limit: timedelta = GLOO_TIMEOUT) -> None:
    for work in works:
        work.wait(limit)
