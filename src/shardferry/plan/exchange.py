"""Plan an exchange: thin pieces travel to the rank that writes a large contiguous part of a file.

This is the two-phase write of collective I/O. The tensors concerned are cut into boxes, each one contiguous range of
its file; in every round each rank owns at most one box, to which all ranks send what they have of it. Rounds are a
pure function of the catalogue, so all ranks know every size beforehand and none has to be told.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from shardferry.format.dtypes import BITS
from shardferry.geometry.region import Region, overlap, select, whole
from shardferry.geometry.spans import collapse
from shardferry.plan.save import Write, local_write, writer_regions
from shardferry.units import KIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardferry.format.writer import FileLayout
    from shardferry.plan.catalogue import Held

# Rows of at least this many bytes are written by themselves (measured on a local disk: 64 KiB rows cost 1.2x one long
# write, 16 KiB rows 1.8x, and an exchange 1.1-1.6x).
DIRECT_ROW_BYTES = 64 * KIB
# Fewer rows are written by themselves however thin: a round of an exchange costs more (a guess).
EXCHANGE_MIN_ROWS = 64


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


def needs_exchange(name: str, held: Held, dtype: str) -> bool:
    """Return whether some rank would have to write a tensor in thin rows."""
    bits = BITS[dtype]
    for regions in writer_regions(name, held, bits).values():
        for region in regions:
            _, dims = collapse(region, held.shape, bits)
            num_rows = math.prod(sum(stop - start for start, stop in dim) for dim in dims[:-1])
            thinnest = min(stop - start for start, stop in dims[-1])
            if num_rows >= EXCHANGE_MIN_ROWS and thinnest < DIRECT_ROW_BYTES:
                return True
    return False


def plan_rounds(
    catalogue: Mapping[str, Held],
    files: Sequence[FileLayout],
    dtypes: Mapping[str, str],
    *,
    exchanged: frozenset[str],
    world_size: int,
    box_bytes: int,
) -> list[tuple[Box, ...]]:
    """Return the rounds of the exchange, each at most one box per rank; none if no tensor needs it.

    Args:
        catalogue: Every tensor of the job.
        files: How they are laid out over files.
        dtypes: The dtype each is written in.
        exchanged: The tensors that need it.
        world_size: Ranks that take part.
        box_bytes: Most bytes of a box.
    """
    boxes: list[Box] = []
    for file in files:
        for name, (start, _) in sorted(file.spans.items(), key=lambda item: item[1]):
            held = catalogue[name]
            if name in exchanged:
                regions = _boxes(whole(held.shape), held.shape, BITS[dtypes[name]], box_bytes)
                boxes.extend(Box(name, file.name, start, region, 0) for region in regions)
    placed = [box._replace(owner=at % world_size) for at, box in enumerate(boxes)]
    return [tuple(placed[at : at + world_size]) for at in range(0, len(placed), world_size)]


def parts_of(box: Box, held: Held, dtype: str) -> tuple[Part, ...]:
    """Return what each rank sends of a box, in the order of the ranks."""
    parts = []
    for sender, regions in sorted(writer_regions(box.name, held, BITS[dtype]).items()):
        for region in regions:
            common = _intersect(region, box.region)
            if common is not None:
                parts.append(Part(sender, common))
    return tuple(parts)


def part_write(box: Box, part: Part, held: Held, dtype: str) -> Write:
    """Return a part as a write of its sender, who finds the elements in its local tensor by it."""
    return local_write(box.name, box.file, box.start, dtype, held, part.region, part.sender)


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


def _intersect(region: Region, box: Region) -> Region | None:
    dims = []
    for held, ((start, stop),) in zip(region.dims, box.dims, strict=True):
        inside, _ = overlap(held, start, stop)
        if not inside:
            return None
        dims.append(inside)
    return Region(tuple(dims))
