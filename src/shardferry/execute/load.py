"""Carry out a load plan: bytes of files into the memory of tensors, within a budget.

Two ways, decided by the memory and not by policy. Where a copy's bytes lie in the destination as they lie in the
file (CPU, same dtype, in order), they are read straight into it. Otherwise (another device, a cast, reordered dims,
a strided destination) they are read into a ring of reused staging buffers, and the destination stores them from
there; on an accelerator that overlaps with the next read.
"""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from itertools import cycle, groupby, product
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, cast, runtime_checkable

from shardferry.errors import CheckpointChangedError
from shardferry.plan.requests import Piece, Request, plan_requests
from shardferry.storage.base import OnRead, Place, ReadableFile, Rows, Store
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from shardferry.convert.values import Values
    from shardferry.format.index import FileInfo
    from shardferry.geometry.spans import Collapsed
    from shardferry.plan.load import Copy, LoadPlan
    from shardferry.storage.base import Bytes

# How often a rank that waits for its own threads asks whether another rank has failed.
POLL_S = 0.05
# What a thread is handed at a time: handing over costs as much as two small reads (20,000 tensors: 0.7 s of 2.5 s).
BUNDLE_BYTES = MIB
BUNDLE_REQUESTS = 64


class Staging(Protocol):
    """One reused buffer and the transfer out of it."""

    def memory(self, num_bytes: int) -> Bytes:
        """Return `num_bytes` of the buffer to read into, once the last transfer out of it has finished."""
        ...

    def hold(self, data: Bytes) -> Bytes:
        """Return bytes that transfers can be made from: `data` itself, or a copy in the buffer."""
        ...

    def transfer(self) -> AbstractContextManager[None]:
        """Give the context in which destinations take bytes out of the buffer, perhaps later than it ends."""
        ...

    def wait(self) -> None:
        """Wait until the last transfer out of the buffer has finished."""
        ...


class Destination(Protocol):
    """The memory of one local tensor."""

    def direct(self, copy: Copy) -> Bytes | None:
        """Return the contiguous memory into which `copy` can be read as it is stored, or None."""
        ...

    def store(self, copy: Copy, staged: Bytes) -> None:
        """Take what `copy` read, in the order of its region, out of staging memory."""
        ...


@runtime_checkable
class TakesValues(Protocol):
    """The memory of a local tensor into which what is computed can go at once, as it is computed."""

    def take(self, copy: Copy, values: Values) -> bool:
        """Take the values of `copy`, in the order of its region; return whether they can be taken so."""
        ...


class Settings(NamedTuple):
    """How to execute.

    Attributes:
        num_threads: Threads that read at the same time.
        piece_bytes: Copies are cut to this size before they are dealt to threads or staged.
        staging: Makes the ring of staging buffers of one thread, each of `piece_bytes`.
        on_bytes: Called with bytes wanted that have landed, bytes read and requests made; from any thread.
        check: Raises when the load must stop because another rank failed; called from the calling thread.
    """

    num_threads: int
    piece_bytes: int
    staging: Callable[[], Sequence[Staging]]
    on_bytes: Callable[[int, int, int], None]
    check: Callable[[], None]


def execute_load(
    plan: LoadPlan,
    destinations: Mapping[str, Destination],
    store: Store,
    files: Mapping[str, FileInfo],
    settings: Settings,
) -> None:
    """Read everything a plan names into its destinations.

    Args:
        plan: What to read, in file order.
        destinations: The memory of every tensor of the plan, by name.
        store: Where the files are.
        files: What each file was when the job agreed to read it.
        settings: Threads, staging and callbacks.

    Raises:
        StorageError: If a read fails or ends early.
        CheckpointChangedError: If a file has another size than was agreed.
    """
    requests = plan_requests(plan, max_bytes=settings.piece_bytes)
    with _Readers(destinations, settings) as readers:
        for name, here in groupby(requests, key=lambda request: request.file):
            with store.open(name) as file:
                _check_size(file, name, files[name])
                readers.run(file, here)
        readers.finish()


def _check_size(file: ReadableFile, name: str, agreed: FileInfo) -> None:
    if file.size != agreed.size:
        message = (
            f"{name} has {file.size} bytes here, but {agreed.size} when its header was read. Something changed the "
            "checkpoint, or this node has another copy of it"
        )
        raise CheckpointChangedError(message)


class _Readers:
    """One or several threads that work off the requests to a file, each with its own staging."""

    def __init__(self, destinations: Mapping[str, Destination], settings: Settings) -> None:
        self._destinations = destinations
        self._settings = settings
        self._stop = threading.Event()
        self._local = threading.local()
        self._rings: list[Sequence[Staging]] = []
        self._pool = ThreadPoolExecutor(settings.num_threads) if settings.num_threads > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, file: ReadableFile, requests: Iterable[Request]) -> None:
        """Read everything wanted of one file; returns when it is there, raises the first failure."""
        if self._pool is None:
            for request in requests:
                self._read(file, request, self._settings.check)
            return
        self._wait({self._pool.submit(self._read_all, file, bundle) for bundle in _bundles(requests)})

    def finish(self) -> None:
        """Wait until everything stored has arrived."""
        for ring in self._rings:
            for staging in ring:
                staging.wait()

    def _wait(self, futures: set[Future[None]]) -> None:
        try:
            while futures:
                done, futures = wait(futures, timeout=POLL_S, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                self._settings.check()
        except BaseException:
            self._stop.set()
            wait(futures)  # whoever raises closes the file, which nobody may be reading then
            raise

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise _StoppedError

    def _read_all(self, file: ReadableFile, bundle: Iterable[Request]) -> None:
        for request in bundle:
            self._read(file, request, self._raise_if_stopped)

    def _read(self, file: ReadableFile, request: Request, check: Callable[[], None]) -> None:
        def on_read(num_bytes: int, num_requests: int) -> None:
            check()
            self._settings.on_bytes(0, num_bytes, num_requests)

        memories = [self._destinations[piece.name].direct(piece.copy) for piece in request.pieces]
        if all(memory is not None for memory in memories):
            _fetch(file, request, cast("list[Bytes]", memories), on_read)
        else:
            self._stage(file, request, memories, on_read)
        self._settings.on_bytes(request.num_bytes, 0, 0)

    def _stage(self, file: ReadableFile, request: Request, memories: list[Bytes | None], on_read: OnRead) -> None:
        """Read, through one staging buffer, what cannot be read where it belongs."""
        staged = [piece for piece, memory in zip(request.pieces, memories, strict=True) if memory is None]
        staging = self._next_staging()
        rest = staging.memory(sum(piece.copy.num_bytes for piece in staged))
        stores: list[tuple[Piece, Bytes]] = []
        for piece in staged:
            stores.append((piece, rest[: piece.copy.num_bytes]))
            rest = rest[piece.copy.num_bytes :]
        buffers = iter(stores)
        _fetch(file, request, [next(buffers)[1] if memory is None else memory for memory in memories], on_read)
        with staging.transfer():
            for piece, memory in stores:
                self._destinations[piece.name].store(piece.copy, memory)

    def _next_staging(self) -> Staging:
        """Return this thread's next buffer, in turn."""
        if not hasattr(self._local, "ring"):
            ring = self._settings.staging()
            self._rings.append(ring)
            self._local.ring = cycle(ring)
        return cast("Staging", next(self._local.ring))


def _bundles(requests: Iterable[Request]) -> Iterator[list[Request]]:
    """Yield requests in groups of about `BUNDLE_BYTES`, so that a thread is not woken for every small tensor."""
    bundle: list[Request] = []
    num_bytes = 0
    for request in requests:
        bundle.append(request)
        num_bytes += request.num_bytes
        if num_bytes >= BUNDLE_BYTES or len(bundle) == BUNDLE_REQUESTS:
            yield bundle
            bundle, num_bytes = [], 0
    if bundle:
        yield bundle


def _fetch(file: ReadableFile, request: Request, memories: Sequence[Bytes], on_read: OnRead) -> None:
    """Read a request into the memory of each of its pieces."""
    if len(memories) > 1:
        places = [Place(piece.copy.first_byte, memory) for piece, memory in zip(request.pieces, memories, strict=True)]
        file.read_scattered(places, on_read)
        return
    ((_, copy),) = request.pieces
    if copy.access == "spans":
        _read_spans(file, copy, memories[0], on_read)
    else:
        _read_rows(file, copy, memories[0], on_read)


class _StoppedError(Exception):
    """Ends a reader thread because another one, or another rank, has failed; never leaves this module."""


def _read_spans(file: ReadableFile, copy: Copy, memory: Bytes, on_read: OnRead) -> None:
    """Read every contiguous piece by itself."""
    done = 0
    for offset in outer_offsets(copy.collapsed, keep=1):
        for start, stop in copy.collapsed.dims[-1]:
            file.read_into(memory[done : done + stop - start], copy.start + offset + start, on_read)
            done += stop - start


def _read_rows(file: ReadableFile, copy: Copy, memory: Bytes, on_read: OnRead) -> None:
    """Read runs of consecutive rows, keeping the wanted columns."""
    collapsed = copy.collapsed
    row_bytes, columns = collapsed.sizes[-1], collapsed.dims[-1]
    width = sum(stop - start for start, stop in columns)
    table = memory.reshape(-1, width)
    done = 0
    for offset in outer_offsets(collapsed, keep=2):
        for start, stop in collapsed.dims[-2]:
            rows = Rows(copy.start + offset + start * row_bytes, row_bytes, columns)
            file.read_rows(table[done : done + stop - start], rows, on_read)
            done += stop - start


def outer_offsets(collapsed: Collapsed, *, keep: int) -> Iterator[int]:
    """Yield the byte offset of every element of the dims outside the innermost `keep`, in file order."""
    strides = [1] * len(collapsed.sizes)
    for dim in range(len(strides) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * collapsed.sizes[dim + 1]
    outer = len(strides) - keep
    indices = ([i for a, b in collapsed.dims[dim] for i in range(a, b)] for dim in range(outer))
    for index in product(*indices):
        yield sum(i * stride for i, stride in zip(index, strides[:outer], strict=True))
