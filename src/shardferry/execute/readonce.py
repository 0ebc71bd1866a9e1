"""Carry out a read-once plan: rounds in which every rank of a group reads its share and gives it to the others.

While a round is exchanged, a thread reads the next. What is read and received lies in reused buffers, from where it
is put into the tensors as any other copy is.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import accumulate, cycle, product
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import numpy as np

from shardferry.execute.load import POLL_S, execute_load
from shardferry.geometry.region import positions
from shardferry.geometry.spans import BITS_PER_BYTE, collapse
from shardferry.plan.cost import choose_access
from shardferry.plan.costmodel import PRESETS
from shardferry.plan.load import Copy, LoadPlan, TensorPlan, split_copy
from shardferry.plan.readonce import narrow_copy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardferry.execute.load import Destination, Settings, Staging
    from shardferry.execute.meter import Buffers
    from shardferry.format.index import FileInfo
    from shardferry.geometry.region import Intervals, Region
    from shardferry.plan.demand import Units
    from shardferry.plan.readonce import Piece, ReadOncePlan, Stream
    from shardferry.storage.base import Bytes, Store
    from shardferry.transport.bulk import Mover

Item = TypeVar("Item")

# Holes are not read: another rank reads what is in them.
_NO_HOLES = 1


class Rounds(NamedTuple):
    """What one rank's rounds are about.

    Attributes:
        plan: What is exchanged.
        units: Everything stored.
        rank: This rank.
        world_size: Ranks of the job.
        store: Where the files are.
        files: What each file was when the job agreed to read it.
    """

    plan: ReadOncePlan
    units: Units
    rank: int
    world_size: int
    store: Store
    files: Mapping[str, FileInfo]


class Moved(NamedTuple):
    """Bytes a rank has sent to others and received from them."""

    sent: int
    received: int


def execute_rounds(
    rounds: Rounds,
    destinations: Mapping[str, Destination],
    settings: Settings,
    buffers: Buffers,
    mover: Mover | None,
) -> Moved:
    """Read and exchange everything that streams bring this rank.

    Args:
        rounds: What to do.
        destinations: The memory of every tensor, by name.
        settings: Threads, staging and callbacks, as for reading by itself.
        buffers: Where memory for what is read, sent and received comes from.
        mover: Moves bytes between ranks; open on all ranks, None if no rank of the job has any to move.

    Raises:
        StorageError: If a read fails or ends early.
        CheckpointChangedError: If a file has another size than was agreed.
    """
    turns = [(stream, number) for stream in rounds.plan.streams for number in range(stream.num_rounds)]
    sent = received = 0
    placer = _Placer(rounds.plan, destinations, settings)
    with _Ahead(rounds, settings, buffers) as ahead:
        for stream, pieces, data in ahead.read(turns):
            turn = _Turn(rounds, stream, pieces, data, buffers)
            moved = turn.gather(mover, placer) if stream.is_common else turn.scatter(mover, placer)
            sent, received = sent + moved.sent, received + moved.received
    placer.finish()
    return Moved(sent, received)


class _Ahead:
    """Reads one round ahead of the caller, in a thread of its own."""

    def __init__(self, rounds: Rounds, settings: Settings, buffers: Buffers) -> None:
        self._rounds = rounds
        self._check = settings.check
        self._settings = settings._replace(
            staging=tuple,
            on_bytes=lambda _, read, requests: settings.on_bytes(0, read, requests),
            check=self._raise_if_stopped,
        )
        self._buffers = buffers
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def read(self, turns: Sequence[tuple[Stream, int]]) -> Iterator[tuple[Stream, list[list[Piece]], Bytes]]:
        """Yield, for each round of a stream, what every rank of the group reads, and this rank's own bytes."""
        ahead = self._start(turns, 0) if turns else None
        for at, (stream, _) in enumerate(turns):
            assert ahead is not None
            pieces, data, done = ahead
            while not wait([done], POLL_S).done:
                self._check()
            done.result()
            ahead = self._start(turns, at + 1) if at + 1 < len(turns) else None
            yield stream, pieces, data

    def _start(self, turns: Sequence[tuple[Stream, int]], at: int) -> tuple[list[list[Piece]], Bytes, Future[None]]:
        stream, number = turns[at]
        pieces = [list(stream.pieces(member, number)) for member in range(len(stream.ranks))]
        mine = pieces[stream.ranks.index(self._rounds.rank)]
        data = self._buffers.get(f"read {at % 2}", sum(map(_num_bytes, mine)))
        return pieces, data, self._pool.submit(self._read, mine, data)

    def _read(self, pieces: Sequence[Piece], data: Bytes) -> None:
        tensors, carriers = [], {}
        done = 0
        for at, piece in enumerate(pieces):
            name = str(at)
            copy = _carried(piece, self._rounds.units)
            tensors.append(TensorPlan(name, piece.region.shape, (copy,)))
            carriers[name] = _Carrier(data[done : done + copy.num_bytes], piece)
            done += copy.num_bytes
        plan = LoadPlan(tuple(tensors), done, _NO_HOLES)
        execute_load(plan, carriers, self._rounds.store, self._rounds.files, self._settings)

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise _StoppedError


class _StoppedError(Exception):
    """Ends the reading thread because the load has failed; never leaves this module."""


class _Carrier:
    """A part of a buffer that is filled with a piece."""

    def __init__(self, memory: Bytes, piece: Piece) -> None:
        self._memory = memory
        self._shape = piece.region.shape
        self._bits = piece.segment.bits

    def direct(self, copy: Copy) -> Bytes | None:
        """Return where a part of the piece lies; parts are cut so that each is contiguous."""
        first = 0
        for size, (start, _) in zip(self._shape, copy.target, strict=True):
            first = first * size + start
        start = first * self._bits // BITS_PER_BYTE
        return self._memory[start : start + copy.num_bytes]

    def store(self, copy: Copy, staged: Bytes) -> None:
        """Never called: everything is read directly."""
        raise AssertionError(copy, len(staged))


class _Placer:
    """Puts bytes that lie in buffers into the tensors that want them."""

    def __init__(self, plan: ReadOncePlan, destinations: Mapping[str, Destination], settings: Settings) -> None:
        self._places = plan.places
        self._destinations = destinations
        self._settings = settings
        self._ring: Sequence[Staging] = ()
        self._turns: Iterator[Staging] = iter(())

    def place(self, piece: Piece, wanted: Region, data: Bytes, held: Region) -> None:
        """Take `wanted`, a part of a piece, out of `data`, which has the elements of `held` in order."""
        bits = piece.segment.bits
        for name, copy in self._places[piece.unit, piece.segment.shape]:
            destination = self._destinations[name]
            for part in narrow_copy(copy, wanted):
                memory = destination.direct(part)
                if memory is None:
                    self._stage(destination, part, data, held)
                else:
                    _take(memory, part.region, data, held, bits)
                self._settings.on_bytes(part.num_bytes, 0, 0)

    def finish(self) -> None:
        """Wait until everything stored has arrived."""
        for staging in self._ring:
            staging.wait()

    def _stage(self, destination: Destination, copy: Copy, data: Bytes, held: Region) -> None:
        if not self._ring:
            self._ring = self._settings.staging()
            self._turns = cycle(self._ring)
        bits = data.size * BITS_PER_BYTE // held.num_elements
        for part in split_copy(copy, self._settings.piece_bytes):
            staging = next(self._turns)
            memory = staging.memory(part.num_bytes)
            _take(memory, part.region, data, held, bits)
            with staging.transfer():
                destination.store(part, memory)


class _Turn(NamedTuple):
    """One round of one stream, once this rank has read its part.

    Attributes:
        rounds: What it belongs to.
        stream: The stream.
        pieces: What every rank of the group reads in it.
        data: The bytes of this rank's pieces.
        buffers: Where memory comes from.
    """

    rounds: Rounds
    stream: Stream
    pieces: Sequence[Sequence[Piece]]
    data: Bytes
    buffers: Buffers

    @property
    def mine(self) -> Sequence[Piece]:
        """What this rank reads."""
        return self.pieces[self.stream.ranks.index(self.rounds.rank)]

    def gather(self, mover: Mover | None, placer: _Placer) -> Moved:
        """Give everything to all, and take everything from all."""
        rank, ranks = self.rounds.rank, self.stream.ranks
        sizes = [
            0 if other == rank else sum(map(_num_bytes, pieces))
            for other, pieces in zip(ranks, self.pieces, strict=True)
        ]
        received = self.buffers.get("receive", sum(sizes))
        if mover is not None and len(ranks) > 1:
            mover.all_gather(ranks, self.data, received, sizes)
        theirs = (piece for other, pieces in zip(ranks, self.pieces, strict=True) if other != rank for piece in pieces)
        for pieces, data in ((self.mine, self.data), (theirs, received)):
            for piece, part in _shared_out(data, ((piece, _num_bytes(piece)) for piece in pieces)):
                placer.place(piece, piece.region, part, piece.region)
        return Moved(len(self.data) * (len(ranks) - 1), sum(sizes))

    def scatter(self, mover: Mover | None, placer: _Placer) -> Moved:
        """Give every rank what it wants, and take what this rank wants."""
        rank = self.rounds.rank
        send_sizes, receive_sizes = [0] * self.rounds.world_size, [0] * self.rounds.world_size
        for piece in self.mine:
            for part in piece.parts:
                for other in part.holders:
                    send_sizes[other] += _bytes_of(part.region, piece) if other != rank else 0
        incoming: list[tuple[tuple[Piece, Region], int]] = []
        for other, pieces in zip(self.stream.ranks, self.pieces, strict=True):
            wanted = [(at, part.region) for at in pieces for part in at.parts if other != rank and rank in part.holders]
            for piece, region in wanted:
                incoming.append(((piece, region), _bytes_of(region, piece)))
                receive_sizes[other] += _bytes_of(region, piece)
        send = self.buffers.get("send", sum(send_sizes))
        received = self.buffers.get("receive", sum(receive_sizes))
        self._sort(send, send_sizes, placer)
        if mover is not None and len(self.stream.ranks) > 1:
            mover.all_to_all(send, send_sizes, received, receive_sizes)
        for (piece, region), data in _shared_out(received, incoming):
            placer.place(piece, region, data, region)
        return Moved(len(send), len(received))

    def _sort(self, send: Bytes, send_sizes: Sequence[int], placer: _Placer) -> None:
        """Sort what was read by who wants it; place what this rank itself wants."""
        at = [end - size for end, size in zip(accumulate(send_sizes), send_sizes, strict=True)]
        for piece, data in _shared_out(self.data, ((piece, _num_bytes(piece)) for piece in self.mine)):
            for part in piece.parts:
                size = _bytes_of(part.region, piece)
                for other in part.holders:
                    if other == self.rounds.rank:
                        placer.place(piece, part.region, data, piece.region)
                    else:
                        _take(send[at[other] : at[other] + size], part.region, data, piece.region, piece.segment.bits)
                        at[other] += size


def _carried(piece: Piece, units: Units) -> Copy:
    """Return the copy that reads a piece into a buffer."""
    unit = units.unit(piece.unit)
    collapsed = collapse(piece.region, piece.segment.shape, piece.segment.bits)
    return Copy(
        file=unit.file,
        start=unit.start,
        dtype=unit.dtype,
        shape=piece.segment.shape,
        region=piece.region,
        collapsed=collapsed,
        axes=tuple(range(len(piece.region.dims))),
        target=tuple((0, size) for size in piece.region.shape),
        access=choose_access(collapsed, PRESETS["local"].seek_bytes),
    )


def _take(out: Bytes, wanted: Region, data: Bytes, held: Region, bits: int) -> None:
    """Copy the bytes of `wanted` in order to `out`, out of those of a region that contains it."""
    if wanted == held:
        np.copyto(out, data)
        return
    target, source = out.reshape(_byte_shape(wanted, bits)), data.reshape(_byte_shape(held, bits))
    runs = [
        list(_runs(mine, theirs, bits if dim == len(held.dims) - 1 else BITS_PER_BYTE))
        for dim, (mine, theirs) in enumerate(zip(wanted.dims, held.dims, strict=True))
    ]
    for box in product(*runs):
        np.copyto(target[tuple(place for place, _ in box)], source[tuple(place for _, place in box)])


def _runs(wanted: Intervals, held: Intervals, bits: int) -> Iterator[tuple[slice, slice]]:
    """Yield the places of each run of `wanted` in its own array and in that of `held`, a dim of units of `bits`."""
    done = 0
    for start, stop in positions(wanted, held):
        ends = (done, done + stop - start, start, stop)
        first, last, begin, end = (position * bits // BITS_PER_BYTE for position in ends)
        yield slice(first, last), slice(begin, end)
        done += stop - start


def _byte_shape(region: Region, bits: int) -> tuple[int, ...]:
    *outer, inner = region.shape
    return (*outer, inner * bits // BITS_PER_BYTE)


def _shared_out(data: Bytes, items: Iterable[tuple[Item, int]]) -> Iterator[tuple[Item, Bytes]]:
    """Yield each item with its bytes, which lie one after another in `data`."""
    done = 0
    for item, size in items:
        yield item, data[done : done + size]
        done += size


def _num_bytes(piece: Piece) -> int:
    return _bytes_of(piece.region, piece)


def _bytes_of(region: Region, piece: Piece) -> int:
    return region.num_elements * piece.segment.bits // BITS_PER_BYTE
