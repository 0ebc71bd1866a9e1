"""Bulk bytes between processes as collectives that XLA compiles.

Bytes travel as unsigned integers, because XLA on the CPU changes NaNs of narrow floats on the way, in carriers of a
few sizes, because every size is a program. A carrier is new memory every time: JAX takes it over without a copy, so it
must not be written to again. On the CPU one device of each process takes part, as every device more would send bytes
through the network to its neighbour; on accelerators all do, each over links of its own.

A process that waits in a collective for one that has failed cannot be called back, and what the other sends next, be
it the user's, would be taken for what was waited for. So nobody starts before all that take part have said that they
will, through the key-value store; after that only a process that ends can fail the others. That is seen because the
collective runs in a thread of its own, which the caller leaves behind when the group has a verdict.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardferry.jax.group import rendezvous_of_call
from shardferry.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardferry.storage.base import Bytes
    from shardferry.transport.base import Rendezvous

# Bytes a rank sends per collective: mostly the largest, the rest of a transfer in smaller ones, padded up to the last.
CARRIER_BYTES = (16 * MIB, 2 * MIB, 256 * KIB)
POLL_S = 0.0005
# How often somebody who waits for the others looks whether one has failed.
MEET_S = 0.05
_CARRIER = np.dtype(np.uint32)
# The group names a dead process within milliseconds.
VERDICT_WITHIN_S = 2.0


class JaxMover:
    """Moves bytes between processes of the job."""

    def __init__(self, rendezvous: Rendezvous, check: Callable[[], None]) -> None:
        """Move bytes; processes meet at `rendezvous`, `check` raises when another process has failed."""
        self._rendezvous = rendezvous
        self._check = check
        self._num_transfers: Counter[tuple[int, ...]] = Counter()

    def all_to_all(self, send: Bytes, send_sizes: Sequence[int], receive: Bytes, receive_sizes: Sequence[int]) -> None:
        """Send a part of `send` to every process, and fill `receive` with what every process sends here.

        Pairs of processes exchange in one order of all pairs, so that none waits for one that waits for it.
        """
        mine = jax.process_index()
        send_ends, receive_ends = list(accumulate(send_sizes)), list(accumulate(receive_sizes))
        outgoing = [send[end - size : end] for end, size in zip(send_ends, send_sizes, strict=True)]
        incoming = [receive[end - size : end] for end, size in zip(receive_ends, receive_sizes, strict=True)]
        np.copyto(incoming[mine], outgoing[mine])
        others = [rank for rank in range(len(send_sizes)) if rank != mine and send_sizes[rank] + receive_sizes[rank]]
        for rank in sorted(others, key=lambda other: (min(other, mine), max(other, mine))):
            pair = sorted((rank, mine))
            sizes = [0 if of == mine else len(incoming[rank]) for of in pair]
            self.all_gather(pair, outgoing[rank], incoming[rank], sizes)

    def all_gather(self, ranks: Sequence[int], send: Bytes, receive: Bytes, receive_sizes: Sequence[int]) -> None:
        """Send all of `send` to some processes, and fill `receive` with what each of them sends so."""
        self._meet(tuple(ranks))
        place = list(ranks).index(jax.process_index())
        ends = list(accumulate(receive_sizes))
        parts = [receive[end - size : end] for end, size in zip(ends, receive_sizes, strict=True)]
        start = 0
        for size in _carriers(max(len(send), *receive_sizes)):
            gathered = self._gather(tuple(ranks), place, send[start : start + size], size)
            for at, part in enumerate(parts):
                here = part[start : start + size]
                if at != place and len(here):
                    np.copyto(here, gathered[at, : len(here)])
            start += size

    def _meet(self, ranks: tuple[int, ...]) -> None:
        """Wait until all of some processes are about to start their next transfer among them."""
        mine, among = jax.process_index(), "-".join(map(str, ranks))
        step = self._num_transfers[ranks] = self._num_transfers[ranks] + 1
        self._rendezvous.set(f"{among}/{step}/{mine}", b"here")
        for rank in ranks:
            if rank != mine:
                self._wait_for(f"{among}/{step}/{rank}")
        # Whoever is here has seen all keys of the step before.
        self._rendezvous.delete(f"{among}/{step - 1}/{mine}")

    def _wait_for(self, key: str) -> None:
        while True:
            self._check()
            try:
                self._rendezvous.get(key, MEET_S)
            except TimeoutError:
                continue
            return

    def _gather(self, ranks: tuple[int, ...], place: int, data: Bytes, size: int) -> Bytes:
        """Return a carrier of every rank, shape (ranks, size), given this one's content."""
        carrier = np.empty((1, _lanes(ranks).shape[1], size // _lanes(ranks).shape[1] // _CARRIER.itemsize), _CARRIER)
        carrier.reshape(-1).view(np.uint8)[: len(data)] = data
        out: list[Bytes] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                out.append(_collect(ranks, place, carrier))
            except Exception as error:  # noqa: BLE001 - raised again by the caller
                failed.append(error)

        thread = threading.Thread(target=run, name="shardferry-collective", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
            self._check()
        if failed:
            self._wait_for_verdict()
            raise failed[0]
        return out[0]

    def _wait_for_verdict(self) -> None:
        """Raise what the group says of a collective that has failed, if it says so soon."""
        deadline = time.monotonic() + VERDICT_WITHIN_S
        while time.monotonic() < deadline:
            self._check()
            time.sleep(POLL_S)


@contextmanager
def open_mover(check: Callable[[], None]) -> Iterator[JaxMover]:
    """Give what moves bytes between the processes of the group opened last; one per group. Collective."""
    yield JaxMover(rendezvous_of_call("mover"), check)


def _carriers(num_bytes: int) -> Iterator[int]:
    """Yield the sizes of the carriers that take so many bytes."""
    while num_bytes > 0:
        size = next((size for size in CARRIER_BYTES if size <= num_bytes), CARRIER_BYTES[-1])
        yield size
        num_bytes -= size


@lru_cache(maxsize=256)
def _lanes(ranks: tuple[int, ...]) -> NDArray[np.object_]:
    """Return the devices that carry, shape (ranks, lanes)."""
    devices = {rank: [device for device in jax.devices() if device.process_index == rank] for rank in ranks}
    width = 1 if jax.devices()[0].platform == "cpu" else min(map(len, devices.values()))
    while CARRIER_BYTES[-1] // _CARRIER.itemsize % width:
        width -= 1
    lanes = np.empty((len(ranks), width), np.object_)
    for at, rank in enumerate(ranks):
        lanes[at] = devices[rank][:width]
    return lanes


@lru_cache(maxsize=256)
def _program(ranks: tuple[int, ...]) -> tuple[NamedSharding, Any]:
    """Return how carriers of all ranks are cut before the collective, and the collective."""
    mesh = Mesh(_lanes(ranks), ("rank", "lane"))
    program = jax.jit(lambda carriers: carriers, out_shardings=NamedSharding(mesh, PartitionSpec(None, "lane")))
    return NamedSharding(mesh, PartitionSpec("rank", "lane")), program


def _collect(ranks: tuple[int, ...], place: int, carrier: NDArray[np.uint32]) -> Bytes:
    """Return the carriers of all ranks, shape (ranks, bytes), given this one's by lane, shape (1, lanes, elements)."""
    sharding, program = _program(ranks)
    lanes = _lanes(ranks)[place]
    sent = [jax.device_put(carrier[:, at : at + 1], device) for at, device in enumerate(lanes)]
    shape = (len(ranks), *carrier.shape[1:])
    gathered = program(jax.make_array_from_single_device_arrays(shape, sharding, sent))
    if len(lanes) == 1:
        return np.asarray(gathered.addressable_data(0)).reshape(len(ranks), -1).view(np.uint8)
    received = {shard.device: np.asarray(shard.data) for shard in gathered.addressable_shards}
    by_lane = np.concatenate([received[device] for device in lanes], axis=1)
    return by_lane.reshape(len(ranks), -1).view(np.uint8)
