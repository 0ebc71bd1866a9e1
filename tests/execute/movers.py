"""Moves bytes between ranks that are threads, through queues."""

from __future__ import annotations

import queue
from collections import defaultdict
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

    Queues = dict[tuple[int, int], queue.SimpleQueue[np.ndarray]]


class Wires:
    """What the ranks of one test share: a queue from each rank to each."""

    def __init__(self) -> None:
        self._queues: Queues = defaultdict(queue.SimpleQueue)
        self.num_opened = 0

    @contextmanager
    def open(self, rank: int, check: Callable[[], None]) -> Iterator[QueueMover]:
        self.num_opened += 1
        yield QueueMover(self._queues, rank, check)


class QueueMover:
    """One rank's view of the wires; fails where two ranks do not agree on how many bytes go between them."""

    def __init__(self, queues: Queues, rank: int, check: Callable[[], None]) -> None:
        self._queues, self._rank, self._check = queues, rank, check

    def all_to_all(
        self, send: np.ndarray, send_sizes: Sequence[int], receive: np.ndarray, receive_sizes: Sequence[int]
    ) -> None:
        for rank, part in enumerate(cut(send, send_sizes)):
            if len(part):
                self._queues[self._rank, rank].put(part.copy())
        for rank, part in enumerate(cut(receive, receive_sizes)):
            if len(part):
                self._take(rank, part)

    def all_gather(
        self, ranks: Sequence[int], send: np.ndarray, receive: np.ndarray, receive_sizes: Sequence[int]
    ) -> None:
        assert receive_sizes[list(ranks).index(self._rank)] == 0
        for rank in ranks:
            if rank != self._rank and len(send):
                self._queues[self._rank, rank].put(send.copy())
        for rank, part in zip(ranks, cut(receive, receive_sizes), strict=True):
            if len(part):
                self._take(rank, part)

    def _take(self, rank: int, out: np.ndarray) -> None:
        while True:
            try:
                data = self._queues[rank, self._rank].get(timeout=0.02)
            except queue.Empty:
                self._check()
            else:
                assert len(data) == len(out)
                out[:] = data
                return


def cut(data: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    assert sum(sizes) == len(data)
    return [data[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
