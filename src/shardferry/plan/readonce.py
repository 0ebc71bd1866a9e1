"""Plan to read every byte once per storage domain, and to exchange it: the two-phase read of collective I/O.

A domain is a set of ranks for which one of them reads a byte: the ranks of a node, or of the whole job; if every rank
is a domain of its own, all read for themselves. Within a domain a stored tensor is cut into segments, each with its
group: the ranks that want a part of it. Where a tensor's atoms are long runs of bytes, each is a segment, and all of
its group want all of it. Where they are thin, as columns of a matrix are, what the domain wants of the tensor is one
segment: its rows are read whole by somebody, and every rank of the group gets its columns.

What one rank wants alone it reads directly, or as a stream of its own if it wants it twice. All segments of one group
make a stream of bytes in file order, which is cut into equal shares: one per rank of the group, at the elements nearest
to it. So readers are balanced to an element, read long runs, and it does not matter how many tensors there are, or how
small. A stream moves in rounds of bounded size. Everything follows from what all members of a group know, so all know
every size beforehand.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import combinations, pairwise, product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardferry.format.dtypes import BITS
from shardferry.geometry.atoms import Atom, atoms_of
from shardferry.geometry.pieces import intersect, run_regions, united
from shardferry.geometry.region import Region, positions, select
from shardferry.geometry.sharding import Sharding
from shardferry.geometry.spans import BITS_PER_BYTE, collapse
from shardferry.plan.demand import patterns_of, shapes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardferry.plan.demand import Demand, Pattern, Units, Wants
    from shardferry.plan.load import Copy, LoadPlan

    Numbers = NDArray[np.int64]
    View = tuple[int, tuple[int, ...]]

# Sub-byte dtypes are cut at multiples of so many elements only, which are whole bytes.
_PACKED_ELEMENTS = 4
# A request of a direct read never spans a hole: what lies in it is another rank's to read.
_NO_HOLES = 1
# Of the memory for exchanging, one part of so many is read into at a time.
PARTS_OF_MEMORY = 8
# Least bytes a rank reads in a round: the largest element, 16 bytes.
_MIN_CHUNK_BYTES = 16


class Policy(NamedTuple):
    """What decides how bytes are shared out; the same on all ranks.

    Attributes:
        domains: The domain of every rank.
        thin_bytes: Runs of fewer bytes, on average over a tensor, are read in whole rows and exchanged.
        exchange_bytes: Most bytes of memory that a rank's rounds may take.
    """

    domains: tuple[int, ...]
    thin_bytes: int
    exchange_bytes: int


class Segment(NamedTuple):
    """A part of a stored tensor that one group reads together.

    Attributes:
        shape: How the tensor is looked at.
        bits: Bits per element.
        region: What is read of it.
        parts: What each rank of the group wants of that, as atoms: disjoint, together the region.
    """

    shape: tuple[int, ...]
    bits: int
    region: Region
    parts: tuple[Atom, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group, ascending."""
        if len(self.parts) == 1:
            return self.parts[0].holders
        return tuple(sorted({rank for part in self.parts for rank in part.holders}))

    @property
    def num_bytes(self) -> int:
        """Bytes of the region."""
        return self.region.num_elements * self.bits // BITS_PER_BYTE


class Piece(NamedTuple):
    """A part of a segment that one rank reads in one round.

    Attributes:
        unit: The stored tensor.
        segment: The segment of it.
        region: Which part of the segment.
    """

    unit: int
    segment: Segment
    region: Region

    @property
    def parts(self) -> tuple[Atom, ...]:
        """What each rank wants of the piece."""
        if self.region == self.segment.region:
            return self.segment.parts
        common = ((intersect(part.region, self.region), part.holders) for part in self.segment.parts)
        return tuple(Atom(region, holders) for region, holders in common if region is not None)


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """All segments of one group, one after another.

    Attributes:
        ranks: The group, ascending.
        is_common: Whether every rank of the group wants everything.
        segments: The different segments.
        units: By position in the stream, the stored tensor; ascending.
        which: By position in the stream, the segment.
        ends: By position in the stream, bytes up to the end of the segment.
        bounds: Bytes at which the shares of the ranks begin, and the last ends.
        chunk_bytes: Most bytes a rank reads in one round, to an element.
    """

    ranks: tuple[int, ...]
    is_common: bool
    segments: tuple[Segment, ...]
    units: Numbers
    which: Numbers
    ends: Numbers
    bounds: tuple[int, ...]
    chunk_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes read by all ranks together."""
        return self.bounds[-1]

    @property
    def num_rounds(self) -> int:
        """Rounds until all is read."""
        return max(-(-(stop - start) // self.chunk_bytes) for start, stop in pairwise(self.bounds))

    def pieces(self, member: int, number: int) -> Iterator[Piece]:
        """Yield what the rank at position `member` of the group reads in round `number`, in file order."""
        first, last = self.bounds[member], self.bounds[member + 1]
        start = min(last, _cut(self, first + number * self.chunk_bytes)) if number else first
        stop = min(last, _cut(self, first + (number + 1) * self.chunk_bytes))
        at = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            segment, end = self.segments[self.which[at]], int(self.ends[at])
            begin = end - segment.num_bytes
            here = (start - begin) * BITS_PER_BYTE // segment.bits
            until = (min(stop, end) - begin) * BITS_PER_BYTE // segment.bits
            for region in run_regions(segment.region, here, until):
                yield Piece(int(self.units[at]), segment, region)
            start, at = end, at + 1

    def digest(self) -> bytes:
        """Return a hash of everything the ranks of the group have to agree on."""
        told = [_digest_of(segment) for segment in self.segments]
        hashes = np.array(told, np.uint64)[self.which]
        return _blake(
            repr((self.ranks, self.is_common, self.bounds, self.chunk_bytes)).encode()
            + self.units.astype("<i8").tobytes()
            + hashes.astype("<u8").tobytes()
        )


@dataclass(frozen=True, slots=True, eq=False)
class ReadOncePlan:
    """What one rank reads by itself and what it exchanges.

    Attributes:
        direct: Copies of what no other rank of the domain wants.
        streams: The streams of the groups it belongs to, in an order that is the same on all ranks.
        places: By unit and the shape in which it is looked at, the copies that are filled by streams.
    """

    direct: LoadPlan
    streams: tuple[Stream, ...]
    places: Mapping[View, tuple[tuple[str, Copy], ...]]


def plan_read_once(
    plan: LoadPlan,
    units: Units,
    demand: Demand,
    wants: Wants,
    policy: Policy,
    *,
    rank: int,
) -> ReadOncePlan:
    """Return how a rank gets what its plan names when every byte is read once per domain.

    Args:
        plan: What the rank would read by itself.
        units: Everything stored.
        demand: What all ranks want.
        wants: What this rank wants.
        policy: What decides; the same on all ranks.
        rank: This rank.
    """
    members = frozenset(other for other, domain in enumerate(policy.domains) if domain == policy.domains[rank])
    copies = _copies_by_view(plan, units)
    found: dict[tuple[bool, tuple[int, ...]], list[tuple[Numbers, int, Segment]]] = defaultdict(list)
    alone: dict[View, tuple[Region, ...]] = {}
    for pattern in patterns_of(demand, units, shapes_of(wants)):
        segments = tuple(enumerate(cut_pattern(_within(pattern, members), policy.thin_bytes)))
        shared = [(at, segment) for at, segment in segments if len(segment.ranks) > 1 and rank in segment.ranks]
        for at, segment in shared:
            found[len(segment.parts) == 1, segment.ranks].append((pattern.units, at, segment))
        lone = [(at, segment) for at, segment in segments if segment.ranks == (rank,)]
        twice = [unit for unit in pattern.units if _any_overlap(copies[int(unit), pattern.shape])] if lone else []
        if twice:
            for at, segment in lone:
                found[len(segment.parts) == 1, (rank,)].append((np.array(twice), at, segment))
        regions = tuple(segment.region for _, segment in lone)
        if shared:
            alone.update(((int(unit), pattern.shape), regions) for unit in pattern.units)
        alone.update(((int(unit), pattern.shape), ()) for unit in twice)
    streams = [_stream(ranks, common, parts, policy.exchange_bytes) for (common, ranks), parts in found.items()]
    streams.sort(key=lambda stream: (int(stream.units[0]), stream.is_common, stream.ranks))
    places = {view: copies[view] for view in alone}
    return ReadOncePlan(_direct(plan, units, alone), tuple(streams), places)


def cut_pattern(pattern: Pattern, thin_bytes: int) -> tuple[Segment, ...]:
    """Return the segments of a tensor, in the order of their first elements; together all that its ranks want.

    None for a packed dtype whose rows are no whole bytes: nothing of it can be cut, so all its ranks read it.

    Args:
        pattern: How ranks of one domain want it.
        thin_bytes: Runs of fewer bytes on average are read in whole rows.
    """
    shape, bits = pattern.shape, pattern.bits
    if bits % BITS_PER_BYTE and shape and shape[-1] * bits % BITS_PER_BYTE:
        return ()
    ranks_of: dict[Region, list[int]] = defaultdict(list)
    for rank, regions in pattern.wants:
        for region in regions:
            ranks_of[region].append(rank)
    regions = tuple(ranks_of)
    parts = tuple(
        Atom(atom.region, tuple(sorted({rank for at in atom.holders for rank in ranks_of[regions[at]]})))
        for atom in _atoms(shape, regions)
    )
    thin = sum(_num_runs(part.region, shape, bits) for part in parts)
    num_bytes = sum(part.region.num_elements for part in parts) * bits // BITS_PER_BYTE
    if len(parts) > 1 and num_bytes < thin * thin_bytes:
        rows = united(part.region for part in parts)
        if sum(_num_runs(region, shape, bits) for region in rows) < thin:
            return tuple(Segment(shape, bits, region, _inside(parts, region)) for region in rows)
    return tuple(Segment(shape, bits, part.region, (part,)) for part in parts)


def narrow_copy(copy: Copy, region: Region) -> Iterator[Copy]:
    """Yield copies that do the part of `copy` whose elements are in `region`, each a box of the target."""
    common = intersect(copy.region, region)
    if common is None:
        return
    if common == copy.region:
        yield copy
        return
    for runs in product(*map(positions, common.dims, copy.region.dims)):
        target = list(copy.target)
        for dim, (start, stop) in enumerate(runs):
            at = copy.axes.index(dim)
            target[at] = (copy.target[at][0] + start, copy.target[at][0] + stop)
        held = Region(tuple(select(dim, *run) for dim, run in zip(copy.region.dims, runs, strict=True)))
        collapsed = collapse(held, copy.shape, BITS[copy.dtype])
        yield copy._replace(region=held, collapsed=collapsed, target=tuple(target))


def _within(pattern: Pattern, members: frozenset[int]) -> Pattern:
    return pattern._replace(wants=tuple(want for want in pattern.wants if want[0] in members))


@lru_cache(maxsize=4096)
def _atoms(shape: tuple[int, ...], regions: tuple[Region, ...]) -> tuple[Atom, ...]:
    """Return the atoms of a tensor of which some regions are wanted; holders are positions in `regions`."""
    return tuple(atom for atom in atoms_of(Sharding(shape, regions)) if atom.holders)


def _num_runs(region: Region, shape: tuple[int, ...], bits: int) -> int:
    *outer, inner = collapse(region, shape, bits).dims
    return math.prod(sum(stop - start for start, stop in dim) for dim in outer) * len(inner)


def _inside(parts: Sequence[Atom], region: Region) -> tuple[Atom, ...]:
    return tuple(part for part in parts if intersect(part.region, region) is not None)


def _stream(
    ranks: tuple[int, ...],
    is_common: bool,  # noqa: FBT001 - half of a key
    parts: Sequence[tuple[Numbers, int, Segment]],
    exchange_bytes: int,
) -> Stream:
    units = np.concatenate([members for members, _, _ in parts])
    which = np.repeat(np.arange(len(parts)), [len(members) for members, _, _ in parts])
    order = np.lexsort((np.array([at for _, at, _ in parts])[which], units))
    segments = tuple(segment for _, _, segment in parts)
    ends = np.cumsum(np.array([segment.num_bytes for segment in segments])[which[order]])
    copies = len(ranks) if is_common else max(len(part.holders) for segment in segments for part in segment.parts)
    stream = Stream(
        ranks=ranks,
        is_common=is_common,
        segments=segments,
        units=units[order],
        which=which[order],
        ends=ends,
        bounds=(),
        chunk_bytes=_chunk_bytes(len(ranks), 0 if is_common else copies, exchange_bytes),
    )
    total = int(ends[-1])
    return replace(stream, bounds=tuple(_cut(stream, total * at // len(ranks)) for at in range(len(ranks) + 1)))


def _chunk_bytes(num_ranks: int, num_copies: int, exchange_bytes: int) -> int:
    """Return what a rank may read in a round, so that all its buffers stay within their part of `exchange_bytes`.

    A quarter is for what is read, twice, as the next round is read during this one; a quarter for what is sent if that
    is not what was read; half for what is received.
    """
    most = min(exchange_bytes // PARTS_OF_MEMORY, exchange_bytes // (2 * max(1, num_ranks - 1)))
    if num_copies:
        most = min(most, exchange_bytes // (4 * num_copies))
    return max(most - _MIN_CHUNK_BYTES, _MIN_CHUNK_BYTES)


def _cut(stream: Stream, position: int) -> int:
    """Return the last byte at or before `position` at which the stream can be cut."""
    at = int(np.searchsorted(stream.ends, position, side="right"))
    if at == len(stream.ends):
        return int(stream.ends[-1])
    segment = stream.segments[int(stream.which[at])]
    begin = int(stream.ends[at]) - segment.num_bytes
    elements = _PACKED_ELEMENTS if segment.bits % BITS_PER_BYTE else 1
    grain = elements * segment.bits // BITS_PER_BYTE
    return position - (position - begin) % grain


def _direct(plan: LoadPlan, units: Units, alone: Mapping[View, Sequence[Region]]) -> LoadPlan:
    tensors = []
    for tensor in plan.tensors:
        copies: list[Copy] = []
        for copy in tensor.copies:
            regions = alone.get((units.number(copy.file, copy.start), copy.shape))
            if regions is None:
                copies.append(copy)
            else:
                copies.extend(part for region in regions for part in narrow_copy(copy, region))
        if copies or tensor.zeros or tensor.computations:
            tensors.append(replace(tensor, copies=tuple(copies)))
    num_bytes = sum(tensor.bytes_read for tensor in tensors)
    return replace(plan, tensors=tuple(tensors), bytes_wanted=num_bytes, seek_bytes=_NO_HOLES)


def _copies_by_view(plan: LoadPlan, units: Units) -> dict[View, tuple[tuple[str, Copy], ...]]:
    found: dict[View, tuple[tuple[str, Copy], ...]] = {}
    for tensor in plan.tensors:
        for copy in tensor.copies:
            view = (units.number(copy.file, copy.start), copy.shape)
            found[view] = (*found.get(view, ()), (tensor.name, copy))
    return found


def _any_overlap(copies: Sequence[tuple[str, Copy]]) -> bool:
    """Return whether a rank wants elements twice, as a process with several devices may."""
    return any(intersect(one.region, other.region) is not None for (_, one), (_, other) in combinations(copies, 2))


def _digest_of(segment: Segment) -> int:
    return int.from_bytes(_blake(repr(segment).encode()), "little")


def _blake(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()
