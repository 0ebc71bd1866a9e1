"""Bulk bytes between ranks over gloo connections of our own.

Bytes go from point to point, so that ranks which have nothing for each other need not meet. Gloo can say of such a
transfer only that it is done, by blocking: a thread waits for it, while the caller looks out for failures of others.

Connecting blocks too, until all ranks do it, and a rank that has failed before never will. So nobody begins before all
have said that they are there; should one end just then, the thread that connects is left behind. The connections are no
process group that torch knows of: those are found by counting them, and ranks that fail at different places would count
differently ever after.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from shardferry.torch.group import forget_connection, store_of_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]  # re-exported without __all__

    from shardferry.storage.base import Bytes

# A transfer is given up by the group's verdict, not by gloo: its own limit only has to be out of the way.
GLOO_TIMEOUT = timedelta(days=1)
# How long a thread that was left behind still tries to connect; a guess, far above what thousands of ranks take.
CONNECTED_WITHIN = timedelta(minutes=10)
POLL_S = 0.05
# Looks for the other ranks come quickly at first; all of them are guesses.
FIRST_LOOK_S = 0.001
# The group names a dead rank within milliseconds.
VERDICT_WITHIN_S = 2.0
# A guess: gloo gives up at once, if it does.
GIVEN_UP_WITHIN_S = 1.0


class GlooMover:
    """Moves bytes as unsigned integers, the one type that every backend leaves alone."""

    def __init__(self, connections: ProcessGroupGloo, check: Callable[[], None]) -> None:
        """Move between all ranks; `check` raises when another rank has failed."""
        self._connections = connections
        self._rank: int = connections.rank()
        self._check = check

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

    def _move(self, sends: dict[int, Bytes], receives: dict[int, Bytes]) -> None:
        receive = self._connections.recv  # type: ignore[attr-defined]  # missing in torch's stubs
        send = self._connections.send  # type: ignore[attr-defined]
        try:
            self._wait_for(
                [
                    operation([torch.from_numpy(data)], rank, 0)
                    for operation, transfers in ((receive, receives), (send, sends))
                    for rank, data in transfers.items()
                    if len(data)
                ]
            )
        except RuntimeError:
            _wait_for_verdict(self._check)
            raise

    def _wait_for(self, works: Sequence[dist.Work]) -> None:
        moved: Future[None] = Future()
        # Not one that the end of the process waits for: see _give_up.
        threading.Thread(target=_wait_for, args=(works, moved), name="shardferry-transfer", daemon=True).start()
        try:
            while not wait([moved], POLL_S).done:
                self._check()
        except BaseException:
            _give_up(works, moved)
            raise
        moved.result()


@contextmanager
def open_mover(check: Callable[[], None]) -> Iterator[GlooMover]:
    """Connect all ranks for the context. Collective; `check` raises when another rank has failed."""
    store = store_of_call()
    try:
        _meet(store, check)
        connections = _connect(store, check)
    except RuntimeError:
        _wait_for_verdict(check)
        raise
    yield GlooMover(connections, check)


def _meet(store: Store, check: Callable[[], None]) -> None:
    """Return when all ranks have come here."""
    if store.add("met", 1) == dist.get_world_size():
        store.set("all", "")
    pause_s = FIRST_LOOK_S
    while not store.check(["all"]):
        check()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S)


def _connect(store: Store, check: Callable[[], None]) -> ProcessGroupGloo:
    made: list[ProcessGroupGloo | RuntimeError] = []

    def connect() -> None:
        try:
            made.append(dist.ProcessGroupGloo(store, dist.get_rank(), dist.get_world_size(), CONNECTED_WITHIN))
        except RuntimeError as error:
            made.append(error)

    thread = threading.Thread(target=connect, name="shardferry-connect", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            check()
            thread.join(POLL_S)
    except BaseException:
        forget_connection()  # the thread may keep it busy
        raise
    if isinstance(made[0], RuntimeError):
        raise made[0]
    return made[0]


def _wait_for_verdict(check: Callable[[], None]) -> None:
    """Raise what the group says of a failure, if it says so soon: gloo knows that a rank is gone, but not which."""
    deadline = time.monotonic() + VERDICT_WITHIN_S
    while time.monotonic() < deadline:
        check()
        time.sleep(POLL_S)


def _cut(data: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    return [data[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _wait_for(works: Sequence[dist.Work], moved: Future[None]) -> None:
    try:
        for work in works:
            work.wait(GLOO_TIMEOUT)
    except BaseException as error:  # noqa: BLE001 - whoever waits for the future raises it
        moved.set_exception(error)
    else:
        moved.set_result(None)


def _give_up(works: Sequence[dist.Work], moved: Future[None]) -> None:
    """Stop waiting for what another rank has failed to send and never will.

    A limit that is over makes gloo give up all that is under way. That does not always reach a thread that just began
    to wait, so it is done again; a thread that stays is left behind, with the memory it waits for.
    """
    deadline = time.monotonic() + GIVEN_UP_WITHIN_S
    while not moved.done() and time.monotonic() < deadline:
        for work in works:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(milliseconds=1))
        wait([moved], FIRST_LOOK_S)
