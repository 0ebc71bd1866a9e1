"""Carry out all of a load plan: what is copied from files, then zeros, then what is computed.

What is computed is done in batches of a bounded size: the operands of a batch are read into scratch memory, by all
threads; then each of its parts is computed and stored. So memory stays within the budget however large a tensor is.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import cycle
from threading import local
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from shardferry.execute.load import TakesValues, execute_load
from shardferry.execute.memory import HostMemory, Scratch, as_words
from shardferry.format.dtypes import BITS
from shardferry.geometry.spans import BITS_PER_BYTE
from shardferry.plan.load import Computation, LoadPlan, TensorPlan, split_copy
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardferry.convert.values import Values
    from shardferry.execute.load import Destination, Settings, Staging
    from shardferry.format.index import FileInfo
    from shardferry.plan.load import Copy
    from shardferry.storage.base import Bytes, ReadableFile, Store


# Computed at a time where values are handed over as pieces, so that they take little memory.
COMPUTED_BYTES = 4 * MIB
# Operands that a thread's share of a batch has: still in a cache when they are computed with.
OPERAND_BYTES = 4 * MIB
# Kept open between batches: the operands of a batch lie in one or two files, mostly.
MAX_OPEN_FILES = 4


class _Job(NamedTuple):
    """A part to compute and where it goes."""

    computation: Computation
    destination: Destination


class _Files(NamedTuple):
    """Where stored bytes come from."""

    store: Store
    infos: Mapping[str, FileInfo]
    seek_bytes: int


def execute_plan(
    plan: LoadPlan,
    destinations: Mapping[str, Destination],
    store: Store,
    files: Mapping[str, FileInfo],
    settings: Settings,
) -> None:
    """Fill the destinations with everything a plan names; see `execute_load`."""
    execute_load(plan, destinations, store, files, settings)
    execute_computations(plan, destinations, store, files, settings)


def execute_computations(
    plan: LoadPlan,
    destinations: Mapping[str, Destination],
    store: Store,
    files: Mapping[str, FileInfo],
    settings: Settings,
) -> None:
    """Fill what a plan does not copy: zeros, and what is computed from stored tensors.

    Raises:
        StorageError: If a read fails or ends early.
        CheckpointChangedError: If a file has another size than was agreed.
    """
    jobs = [_Job(made, destinations[tensor.name]) for tensor in plan.tensors for made in tensor.computations]
    zeros = [(copy, destinations[tensor.name]) for tensor in plan.tensors for copy in tensor.zeros]
    if not jobs and not zeros:
        return
    with _Storer(settings) as storer, OpenFiles(store) as opened:
        for copy, destination in zeros:
            for piece in split_copy(copy, settings.piece_bytes):
                storer.put(destination, piece, np.zeros(piece.num_bytes, np.uint8))
        for batch in _batches(jobs, min(OPERAND_BYTES, settings.piece_bytes) * settings.num_threads):
            settings.check()
            operands = _read_operands(batch, _Files(opened, files, plan.seek_bytes), settings)
            storer.store_all(batch, operands)


def _batches(jobs: Iterable[_Job], max_bytes: int) -> Iterator[list[_Job]]:
    """Yield parts whose operands, and results that come at once, have at most `max_bytes` together, or a single one."""
    batch: list[_Job] = []
    num_bytes = 0
    for job in jobs:
        made = job.computation
        size = sum(wanted.bytes_read for wanted in made.inputs)
        if made.source.function.whole:
            size += made.result.num_bytes
        if batch and num_bytes + size > max_bytes:
            yield batch
            batch, num_bytes = [], 0
        batch.append(job)
        num_bytes += size
    if batch:
        yield batch


def _read_operands(batch: Sequence[_Job], files: _Files, settings: Settings) -> list[list[NDArray[np.generic]]]:
    """Return the operands of every part of a batch, as arrays of numbers as wide as their dtype."""
    plans: list[TensorPlan] = []
    memories: dict[str, HostMemory] = {}
    operands: list[list[NDArray[np.generic]]] = []
    for at, (computation, _) in enumerate(batch):
        operands.append([])
        for number, (wanted, dtype) in enumerate(zip(computation.inputs, computation.source.dtypes, strict=True)):
            name = f"{wanted.name} {at} {number}"
            out = np.empty(int(np.prod(wanted.local_shape, dtype=np.int64)) * BITS[dtype] // BITS_PER_BYTE, np.uint8)
            plans.append(TensorPlan(name, wanted.local_shape, wanted.copies, wanted.zeros, wanted.computations))
            memories[name] = HostMemory(out, wanted.local_shape, BITS[dtype])
            operands[-1].append(as_words(out, wanted.local_shape, dtype))
    plan = LoadPlan(tuple(plans), sum(wanted.bytes_read for wanted in plans), files.seek_bytes)
    execute_plan(plan, memories, files.store, files.infos, settings._replace(staging=lambda: [Scratch()]))
    return operands


class OpenFiles:
    """The files of a store, kept open from one batch to the next: as many as were used last."""

    def __init__(self, store: Store) -> None:
        """Open nothing yet."""
        self._store = store
        self._opened: dict[str, tuple[ReadableFile, ExitStack]] = {}

    @contextmanager
    def open(self, name: str) -> Iterator[ReadableFile]:
        """Give a file; it may stay open when the context ends."""
        if name not in self._opened:
            if len(self._opened) >= MAX_OPEN_FILES:
                self._opened.pop(next(iter(self._opened)))[1].close()
            closing = ExitStack()
            self._opened[name] = closing.enter_context(self._store.open(name)), closing
        self._opened[name] = self._opened.pop(name)  # used last
        yield self._opened[name][0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._opened:
            self._opened.popitem()[1][1].close()


class _Storer:
    """Threads that compute parts and hand them over, each with a staging ring of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pool = ThreadPoolExecutor(settings.num_threads) if settings.num_threads > 1 else None
        self._local = local()
        self._rings: list[Sequence[Staging]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        for ring in self._rings:
            for staging in ring:
                staging.wait()

    def store_all(self, batch: Sequence[_Job], operands: Sequence[Sequence[NDArray[np.generic]]]) -> None:
        """Compute every part of a batch and store it; returns when all are handed over."""
        if self._pool is None:
            for job, arrays in zip(batch, operands, strict=True):
                self._compute(job, arrays)
            return
        for _ in self._pool.map(self._compute, batch, operands):
            self._settings.check()

    def put(self, destination: Destination, copy: Copy, data: Bytes) -> None:
        """Store bytes by way of this thread's next staging buffer."""
        staging = self._next()
        memory = staging.hold(data)
        with staging.transfer():
            destination.store(copy, memory)

    def _compute(self, job: _Job, operands: Sequence[NDArray[np.generic]]) -> None:
        source, region, result = job.computation.source, job.computation.region, job.computation.result
        shapes = [operand.shape for operand in source.operands]
        values = source.function.compute(operands, shapes, region)
        if not (isinstance(job.destination, TakesValues) and job.destination.take(result, values)):
            self._put_values(job.destination, result, values)

    def _put_values(self, destination: Destination, result: Copy, values: Values) -> None:
        """Put values by pieces, each of which is a run of elements in the order of the region."""
        columns = values.shape[1]
        start, held = 0, (0, 0)
        flat: NDArray[np.generic] = np.empty(0)
        for piece in split_copy(result, min(COMPUTED_BYTES, self._settings.piece_bytes)):
            stop = start + piece.region.num_elements
            needed = start // columns, -(-stop // columns)
            if needed != held:  # several pieces may be of one row
                held, flat = needed, values.rows(*needed).reshape(-1)
            first = held[0] * columns
            self.put(destination, piece, flat[start - first : stop - first].view(np.uint8))
            start = stop

    def _next(self) -> Staging:
        if not hasattr(self._local, "ring"):
            ring = self._settings.staging()
            self._rings.append(ring)
            self._local.ring = cycle(ring)
        staging: Staging = next(self._local.ring)
        return staging
