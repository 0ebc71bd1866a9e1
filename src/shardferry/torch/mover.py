"""Bulk bytes between ranks over a gloo group of our own."""

from __future__ import annotations

import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardferry.storage.base import Bytes

# A transfer is given up by the group's verdict, not by gloo: its own limit only has to be out of the way.
GLOO_TIMEOUT = timedelta(days=1)
POLL_S = 0.0005
# The group names a dead rank within milliseconds.
VERDICT_WITHIN_S = 2.0


class GlooMover:
    """Moves bytes as unsigned integers, the one type that every backend leaves alone."""

    def __init__(self, group: dist.ProcessGroup, check: Callable[[], None]) -> None:
        """Move between the ranks of `group`; `check` raises when another rank has failed."""
        self._group = group
        self._check = check

    def all_to_all(self, send: Bytes, send_sizes: Sequence[int], receive: Bytes, receive_sizes: Sequence[int]) -> None:
        """Send a part of `send` to every rank, and fill `receive` with what every rank sends here. Collective."""
        work = dist.all_to_all_single(
            torch.from_numpy(receive),
            torch.from_numpy(send),
            list(receive_sizes),
            list(send_sizes),
            group=self._group,
            async_op=True,
        )
        while not work.is_completed():
            self._check()
            time.sleep(POLL_S)
        try:
            work.wait()
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
    try:
        yield GlooMover(group, check)
    finally:
        dist.destroy_process_group(group)
