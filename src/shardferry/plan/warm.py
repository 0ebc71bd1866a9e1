"""Plan a warm-up: which bytes of which files a node has to bring into its page cache, and who of it reads them.

Ranks of a node share a page cache, so the node is planned as one: the union of what its ranks will read, each byte
once. Per file the cheapest way is taken: the wanted spans, the same with holes bridged where reading the hole costs
less than one more request (data sieving), or the whole file. What is left is cut over the node's ranks by bytes.

Pure: names of files and integers. What the page cache holds already, and how much more it can take, are arguments.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from shardferry.convert.ops import Expression, Stored
from shardferry.geometry.region import Region
from shardferry.geometry.spans import merge_spans, union_spans
from shardferry.plan.load import Copy, TensorPlan, Wanted, plan_load
from shardferry.plan.target import region_of
from shardferry.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardferry.format.index import CheckpointIndex
    from shardferry.geometry.region import Interval, Intervals
    from shardferry.geometry.spans import Collapsed
    from shardferry.plan.catalogue import Held

    Spans = NDArray[np.int64]

Strategy = Literal["spans", "bridged", "whole"]

# Two ranks that share a page would both fetch it; the largest page in use that a cache counts in.
CUT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class FileReads:
    """What a node reads of one file.

    Attributes:
        file: Name relative to the checkpoint's root.
        strategy: `"spans"`: what is wanted and nothing else; `"bridged"`: with small holes; `"whole"`: all of it.
        spans: Shape (num_spans, 2): disjoint [start, stop) in bytes of the file, ascending.
        bytes_wanted: Bytes that ranks of the node will read, each counted once.
        why: The costs that decided, in words.
    """

    file: str
    strategy: Strategy
    spans: Spans
    bytes_wanted: int
    why: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the spans."""
        return _num_bytes(self.spans)


class Share(NamedTuple):
    """What one rank reads of one file: spans as in `FileReads`."""

    file: str
    spans: Spans


def reading_cost(num_bytes: int, num_spans: int, seek_bytes: int) -> int:
    """Return what reading spans costs, in bytes that one long read would bring in the same time."""
    return num_bytes + num_spans * seek_bytes


def reads_whole(num_bytes: int, num_spans: int, *, whole_bytes: int, seek_bytes: int) -> bool:
    """Return whether reading everything is no dearer than reading the spans.

    Args:
        num_bytes: Bytes of the spans.
        num_spans: Requests they take at least.
        whole_bytes: Bytes of everything, read in one go.
        seek_bytes: What one more request costs, in bytes; see `CostModel`.

    Examples:
        >>> mib = 1 << 20
        >>> reads_whole(128 * mib, 2, whole_bytes=128 * mib, seek_bytes=12 * mib)
        True
        >>> reads_whole(128 * mib, 2, whole_bytes=256 * mib, seek_bytes=12 * mib)
        False
    """
    return reading_cost(num_bytes, num_spans, seek_bytes) >= whole_bytes


def node_wants(job: Mapping[str, Held], sources: Mapping[str, Expression], ranks: Collection[int]) -> Iterator[Wanted]:
    """Yield what the ranks of a node together hold of every tensor, in few regions, which may overlap.

    Args:
        job: Every tensor of the job and who holds it.
        sources: How tensors are made of stored ones, by name; a name not listed is stored under itself.
        ranks: The ranks of the node.
    """
    known: dict[Hashable, tuple[Region, ...]] = {}  # a model has few patterns and many names
    for name, held in job.items():
        key = (id(held.layout), held.shape, held.ranks)
        if key not in known:
            known[key] = _regions(held, ranks)
        if known[key]:
            source = sources[name] if name in sources else Stored(name, held.shape)
            yield from (Wanted(name, source, region) for region in known[key])


def plan_warm(
    index: CheckpointIndex, wanted: Iterable[Wanted], *, identities: Mapping[str, Hashable], seek_bytes: int
) -> tuple[FileReads, ...]:
    """Return what a node reads of each file it needs, in the index's order of files.

    Args:
        index: The checkpoint.
        wanted: What its ranks hold, as `node_wants` gives it.
        identities: By file, what is equal for two names of the same bytes (links); their reads are joined.
        seek_bytes: What one more request costs, in bytes; see `CostModel`.

    Raises:
        ShardingError: If a region cannot be read, e.g. because it cuts a packed byte in two; names the tensor.
    """
    first_name: dict[Hashable, str] = {}
    canonical = {file: first_name.setdefault(identities[file], file) for file in index.files if file in identities}
    stored: dict[str, dict[int, list[Collapsed]]] = defaultdict(lambda: defaultdict(list))
    for piece in _pieces(index, wanted):
        stored[canonical[piece.file]][piece.start].append(piece.collapsed)
    known: dict[tuple[Collapsed, ...], _Reads] = {}
    for regions in {tuple(regions) for tensors in stored.values() for regions in tensors.values()}:
        exact = union_spans(regions)
        # A table of thin rows is many spans: what is near is joined before they come to a file's.
        known[regions] = _Reads(_num_bytes(exact), merge_spans(exact, max(0, seek_bytes - 1)))
    return tuple(
        _plan_file(
            file,
            [(start, known[tuple(regions)]) for start, regions in stored[file].items()],
            file_bytes=index.files[file].size,
            seek_bytes=seek_bytes,
        )
        for file in index.files
        if file in stored
    )


def fit_room(files: Sequence[FileReads], missing: Sequence[int], room_bytes: int) -> tuple[tuple[FileReads, ...], int]:
    """Return the reads that a page cache has room for, first files first, and how many bytes are left out.

    Args:
        files: What is to be read.
        missing: Per file, bytes of its spans that the page cache does not hold yet.
        room_bytes: Bytes it can still take.
    """
    kept: list[FileReads] = []
    for file, num_bytes in zip(files, missing, strict=True):
        if num_bytes <= room_bytes:
            room_bytes -= num_bytes
            kept.append(file)
            continue
        # Which part is missing is not known here: nothing of it is taken to be there.
        head = _slice_spans(file.spans, 0, room_bytes)
        if len(head):
            kept.append(replace(file, spans=head))
        room_bytes = 0
    return tuple(kept), sum(file.num_bytes for file in files) - sum(file.num_bytes for file in kept)


def share_of(files: Sequence[FileReads], num_shares: int, share: int) -> tuple[Share, ...]:
    """Return one of `num_shares` parts of equal bytes, cut at page boundaries; together they are all spans once."""
    total = sum(file.num_bytes for file in files)
    start, stop = total * share // num_shares, total * (share + 1) // num_shares
    shares = []
    before = 0
    for file in files:
        spans = _slice_spans(file.spans, start - before, stop - before, align=CUT_BYTES)
        if len(spans):
            shares.append(Share(file.file, spans))
        before += file.num_bytes
    return tuple(shares)


def _regions(held: Held, ranks: Collection[int]) -> tuple[Region, ...]:
    """Return what any of the ranks hold, in as few regions as joining along one dim at a time gives."""
    members = set(held.ranks).intersection(ranks)
    found = (region_of(held.layout, held.shape, rank) for rank in sorted(members))
    products = {region.dims for region in found if region is not None and region.num_elements}
    for dim in range(len(held.shape)):
        rest: dict[tuple[Intervals, ...], list[Interval]] = defaultdict(list)
        for dims in sorted(products):
            rest[*dims[:dim], *dims[dim + 1 :]].extend(dims[dim])
        products = {(*others[:dim], _united(held_along), *others[dim:]) for others, held_along in rest.items()}
    return tuple(Region(dims) for dims in sorted(products))


def _united(intervals: Sequence[Interval]) -> Intervals:
    merged = merge_spans(np.array(intervals, np.int64))
    return tuple((start, stop) for start, stop in merged.tolist())


class _Piece(NamedTuple):
    """What is read of one stored tensor, which begins at `start` of the file."""

    file: str
    start: int
    collapsed: Collapsed


class _Reads(NamedTuple):
    """Bytes wanted of one stored tensor, and spans in it to read, holes included."""

    bytes_wanted: int
    spans: Spans


def _pieces(index: CheckpointIndex, wanted: Iterable[Wanted]) -> Iterator[_Piece]:
    """Yield what is read of stored tensors; one of many that are wanted alike is planned for all."""
    known: dict[Hashable, tuple[Collapsed, ...]] = {}
    made: list[Wanted] = []
    for want in wanted:
        info = index.tensors[want.source.key] if isinstance(want.source, Stored) else None
        if info is None or info.parts:
            made.append(want)
            continue
        key = (info.dtype, want.source.shape, want.region)
        if key not in known:
            known[key] = tuple(copy.collapsed for copy in _copies(plan_load(index, (want,)).tensors))
        yield from (_Piece(info.file, info.span[0], collapsed) for collapsed in known[key])
    for copy in _copies(plan_load(index, made).tensors):
        yield _Piece(copy.file, copy.start, copy.collapsed)


def _copies(tensors: Iterable[TensorPlan]) -> Iterator[Copy]:
    """Yield everything that is read from files, also to compute with it."""
    for tensor in tensors:
        yield from tensor.copies
        for computation in tensor.computations:
            yield from _copies(computation.inputs)


def _plan_file(file: str, stored: Sequence[tuple[int, _Reads]], *, file_bytes: int, seek_bytes: int) -> FileReads:
    bytes_wanted = sum(reads.bytes_wanted for _, reads in stored)
    parts = [start + reads.spans for start, reads in stored]
    spans = merge_spans(np.concatenate(parts), max(0, seek_bytes - 1))
    num_bytes = _num_bytes(spans)
    cost = (
        f"{format_bytes(num_bytes)} in {len(spans)} spans at {format_bytes(seek_bytes)} a seek cost "
        f"{format_bytes(reading_cost(num_bytes, len(spans), seek_bytes))}, the whole file {format_bytes(file_bytes)}"
    )
    if reads_whole(num_bytes, len(spans), whole_bytes=file_bytes, seek_bytes=seek_bytes):
        return FileReads(file, "whole", np.array([[0, file_bytes]], np.int64), bytes_wanted, cost)
    return FileReads(file, "spans" if num_bytes == bytes_wanted else "bridged", spans, bytes_wanted, cost)


def _slice_spans(spans: Spans, start: int, stop: int, *, align: int = 1) -> Spans:
    """Return bytes [start, stop) of what the spans hold, counted along them.

    A cut inside a span goes back to a multiple of `align` in the file, at both ends alike, so that neighbours meet.
    """
    ends = np.cumsum(spans[:, 1] - spans[:, 0])
    total = int(ends[-1]) if len(ends) else 0
    low, high = (_position(spans, ends, min(max(at, 0), total), align) for at in (start, stop))
    clipped = np.stack([np.maximum(spans[:, 0], low), np.minimum(spans[:, 1], high)], axis=1)
    return clipped[clipped[:, 0] < clipped[:, 1]]


def _position(spans: Spans, ends: Spans, at: int, align: int) -> int:
    """Return where in the file the byte lies that has `at` bytes of the spans before it."""
    if not len(spans) or at == ends[-1]:
        return int(spans[-1, 1]) if len(spans) else 0
    row = int(np.searchsorted(ends, at, side="right"))
    position = int(spans[row, 1] - (ends[row] - at))
    return max(int(spans[row, 0]), position // align * align)


def _num_bytes(spans: Spans) -> int:
    return int((spans[:, 1] - spans[:, 0]).sum())
