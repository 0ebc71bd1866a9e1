"""Plan an exchange: thin pieces travel to the rank that writes a large contiguous part of a file.

This is the two-phase write of collective I/O. The tensors concerned are cut into boxes, each one contiguous range of
its file; in every round each rank owns at most one box, to which all ranks send what they have of it. Rounds are a
pure function of the catalogue, so all ranks know every size beforehand and none has to be told.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardferry.format.dtypes import BITS
from shardferry.geometry.pieces import intersect
from shardferry.geometry.region import Region, select, whole
from shardferry.geometry.spans import collapse
from shardferry.plan.catalogue import holders
from shardferry.plan.save import Write, local_write, pieces_of
from shardferry.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardferry.format.writer import FileLayout
    from shardferry.plan.catalogue import Held
    from shardferry.plan.costmodel import CostModel

# Fewer rows are written by themselves however thin: a round of an exchange costs more (a guess).
EXCHANGE_MIN_ROWS = 64
# Rows of so many bytes are never exchanged: clients of network filesystems send what they are given in requests of
# about this size (NFS' largest is 1 MiB, Lustre's 1-4 MiB), many of them at a time, so longer writes gain nothing.
MAX_EXCHANGED_ROW_BYTES = MIB


class Box(NamedTuple):
    """A contiguous part of a file that one rank puts together and writes.

    Attributes:
        name: The tensor.
        file: File it lies in.
        start: Offset in the file of the tensor's first byte.
        region: The part of the tensor.
        owner: The rank that writes it.
    """

    name: str
    file: str
    start: int
    region: Region
    owner: int


class Part(NamedTuple):
    """What one rank has of a box."""

    sender: int
    region: Region


class Turn(NamedTuple):
    """What one rank does in a round.

    Attributes:
        outgoing: Parts it sends, in the order of the receivers; those it keeps among them.
        incoming: Parts it gets, in the order of the senders.
    """

    outgoing: tuple[tuple[Box, Part], ...]
    incoming: tuple[tuple[Box, Part], ...]


class Choice(NamedTuple):
    """Which tensors travel to the ranks that write them.

    Attributes:
        exchanged: Their names; the holders of all others write their own bytes.
        why: What is done and why, in words.
    """

    exchanged: frozenset[str]
    why: str


def choose_exchange(
    catalogue: Mapping[str, Held], dtypes: Mapping[str, str], cost: CostModel, nodes: Sequence[int], *, box_bytes: int
) -> Choice:
    """Return which tensors are exchanged: those of which a rank would write many rows that are cheaper to send.

    Args:
        catalogue: Every tensor of the job.
        dtypes: The dtype each is written in.
        cost: The storage that is written to, and the links between ranks.
        nodes: The node of every rank.
        box_bytes: Most bytes that an exchange writes at once.
    """
    if len(nodes) == 1:
        return Choice(frozenset(), "direct: one rank writes everything")
    limit = direct_row_bytes(cost, nodes, box_bytes)
    rows = {name: _thinnest_rows(held, BITS[dtypes[name]], EXCHANGE_MIN_ROWS) for name, held in catalogue.items()}
    thin = {name: num_bytes for name, num_bytes in rows.items() if num_bytes < limit}
    if not thin:
        why = f"direct: holders write their own bytes, none in many rows below {format_bytes(limit)} ({cost.source})"
        return Choice(frozenset(), why)
    sizes = list(dict.fromkeys(format_bytes(int(num_bytes)) for num_bytes in sorted(thin.values())))
    why = (
        f"exchange for {len(thin)} of {len(rows)} tensors: rows of {' to '.join(sizes[:1] + sizes[1:][-1:])} are below "
        f"{format_bytes(limit)}, where a request costs more than to send them to one writer ({cost.source})"
    )
    return Choice(frozenset(thin), why if len(thin) == len(rows) else f"{why}; holders write the others")


def direct_row_bytes(cost: CostModel, nodes: Sequence[int], box_bytes: int) -> int:
    """Return how long rows must be for their holder to write them by itself.

    By itself a row costs one more request, which is `seek_bytes` at the node's bandwidth; in an exchange it costs its
    bytes once more, at the bandwidth of its rank's link. On the preset of a local disk that is some 50 KiB, where it
    was measured to be: 64 KiB rows cost 1.2x one long write, 16 KiB rows 1.8x, an exchange 1.1-1.6x. An exchange writes
    boxes, so rows of half a box gain nothing either.

    Args:
        cost: The storage, and the links.
        nodes: The node of every rank.
        box_bytes: Most bytes that an exchange writes at once.
    """
    link = cost.rank_bandwidth
    if len(set(nodes)) > 1:
        link = min(link, cost.interconnect_bandwidth / max(Counter(nodes).values()))
    return min(int(cost.seek_bytes * link / cost.node_bandwidth), MAX_EXCHANGED_ROW_BYTES, box_bytes // 2)


def plan_rounds(
    catalogue: Mapping[str, Held],
    files: Sequence[FileLayout],
    dtypes: Mapping[str, str],
    *,
    exchanged: frozenset[str],
    box_bytes: int,
) -> list[tuple[Box, ...]]:
    """Return the rounds of the exchange, each at most one box per rank; none if no tensor needs it.

    A box goes to a rank that holds a part of it; the holders of a kind of tensor take turns.

    Args:
        catalogue: Every tensor of the job.
        files: How they are laid out over files.
        dtypes: The dtype each is written in.
        exchanged: The tensors that need it.
        box_bytes: Most bytes of a box.
    """
    rounds: list[list[Box]] = []
    num_boxes: dict[tuple[int, ...], int] = {}
    num_owned: dict[int, int] = {}
    for file in files:
        for name, (start, _) in sorted(file.spans.items(), key=lambda item: item[1]):
            if name not in exchanged:
                continue
            held = catalogue[name]
            ranks = holders(held)
            for region in _boxes_of(held.shape, BITS[dtypes[name]], box_bytes):
                owner = ranks[num_boxes.get(ranks, 0) % len(ranks)]
                num_boxes[ranks] = num_boxes.get(ranks, 0) + 1
                turn = num_owned.get(owner, 0)
                num_owned[owner] = turn + 1
                if turn == len(rounds):
                    rounds.append([])
                rounds[turn].append(Box(name, file.name, start, region, owner))
    return [tuple(boxes) for boxes in rounds]


def turn_of(boxes: Sequence[Box], catalogue: Mapping[str, Held], dtypes: Mapping[str, str], rank: int) -> Turn:
    """Return what a rank does in the round that moves these boxes."""
    outgoing, incoming = [], []
    for box in boxes:
        held = catalogue[box.name]
        if box.owner != rank and rank not in holders(held):
            continue
        for part in parts_of(box, held, dtypes[box.name]):
            if part.sender == rank:
                outgoing.append((box, part))
            if box.owner == rank:
                incoming.append((box, part))
    outgoing.sort(key=lambda pair: pair[0].owner)
    return Turn(tuple(outgoing), tuple(incoming))


def parts_of(box: Box, held: Held, dtype: str) -> tuple[Part, ...]:
    """Return what each rank sends of a box, in the order of the ranks."""
    parts = []
    for piece in pieces_of(held, BITS[dtype]):
        common = intersect(piece.region, box.region)
        if common is not None:
            parts.append(Part(piece.writer(box.name), common))
    return tuple(sorted(parts, key=lambda part: part.sender))


def part_write(box: Box, part: Part, held: Held, dtype: str) -> Write:
    """Return a part as a write of its sender, who finds the elements in its local tensor by it."""
    return local_write(box.name, box.file, box.start, dtype, held, part.region, part.sender)


@lru_cache(maxsize=4096)
def _thinnest_rows(held: Held, bits: int, min_rows: int) -> float:
    """Return the fewest bytes of a row, among the pieces of at least `min_rows` rows; infinite if there are none."""
    thinnest = math.inf
    for piece in pieces_of(held, bits):
        _, dims = collapse(piece.region, held.shape, bits)
        if math.prod(sum(stop - start for start, stop in dim) for dim in dims[:-1]) >= min_rows:
            thinnest = min(thinnest, *(stop - start for start, stop in dims[-1]))
    return thinnest


@lru_cache(maxsize=4096)
def _boxes_of(shape: tuple[int, ...], bits: int, max_bytes: int) -> tuple[Region, ...]:
    return tuple(_boxes(whole(shape), shape, bits, max_bytes))


def _boxes(region: Region, shape: tuple[int, ...], bits: int, max_bytes: int, dim: int = 0) -> Iterator[Region]:
    num_bytes = region.num_elements * bits // 8
    if num_bytes <= max_bytes or dim >= len(shape) - 1:
        yield region
        return
    size = region.shape[dim]
    step = max(1, size * max_bytes // num_bytes)
    for start in range(0, size, step):
        dims = list(region.dims)
        dims[dim] = select(dims[dim], start, min(size, start + step))
        yield from _boxes(Region(tuple(dims)), shape, bits, max_bytes, dim + 1)
