"""What each process holds of an array: from a JAX sharding to the parts that are planned.

A process may have several devices, so several boxes of one array. Devices of a process that hold the same box are one
holder: the box is read once and handed to each. Distinct boxes are parts of their own, read straight into memory of
their own, unless their rows are thin and together they make a region: then they are one part, because reading each by
itself would read the same rows again for every device.

Everything here follows from the sharding alone, so that all processes find the same parts of all processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import jax

from shardferry.errors import ShardingError
from shardferry.geometry.region import Interval, Region, box, make_region, overlap
from shardferry.geometry.sharding import Sharding as Layout
from shardferry.geometry.spans import BITS_PER_BYTE
from shardferry.units import KIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from jax.sharding import Sharding

# Pieces this long are read one by one (as the planner has it), so that whoever shares their rows costs nothing.
THIN_BYTES = 32 * KIB

Box = tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Boxes of one process that are planned as one region.

    Attributes:
        region: Their union.
        boxes: The boxes, ascending.
    """

    region: Region
    boxes: tuple[Box, ...]

    @property
    def places(self) -> tuple[Box, ...]:
        """Per box and dim the half-open range of its elements in the local tensor of the region."""
        return tuple(
            tuple(overlap(intervals, *range_)[1] for intervals, range_ in zip(self.region.dims, held, strict=True))
            for held in self.boxes
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """An array as the processes hold it.

    Attributes:
        by_process: The parts of every process.
        layouts: Per part number the region of every process, None for a process that has fewer parts.
    """

    by_process: tuple[tuple[Part, ...], ...]
    layouts: tuple[Layout, ...]


@lru_cache(maxsize=4096)
def parts_to_load(sharding: Sharding, shape: tuple[int, ...], bits: int) -> Parts:
    """Return the parts of an array that every process reads.

    Args:
        sharding: How its devices hold it.
        shape: Its global shape.
        bits: Bits of an element in a file.

    Raises:
        ShardingError: If the sharding does not fit the shape.
    """
    by_process = tuple(tuple(_parts(boxes, shape, bits)) for boxes in boxes_of(sharding, shape))
    return _numbered(shape, by_process)


@lru_cache(maxsize=4096)
def parts_to_save(sharding: Sharding, shape: tuple[int, ...]) -> Parts | None:
    """Return the one part that every process has of an array; None if boxes of a process make no region together.

    Raises:
        ShardingError: If the sharding does not fit the shape.
    """
    by_process: list[tuple[Part, ...]] = []
    for boxes in boxes_of(sharding, shape):
        region = _union(boxes) if boxes else None
        if boxes and region is None:
            return None
        by_process.append(() if region is None else (Part(region, boxes),))
    return _numbered(shape, tuple(by_process))


def boxes_of(sharding: Sharding, shape: tuple[int, ...]) -> tuple[tuple[Box, ...], ...]:
    """Return the distinct boxes of every process, ascending.

    Raises:
        ShardingError: If the sharding does not fit the shape.
    """
    try:
        sharding.shard_shape(shape)  # devices_indices_map does not look whether dims divide
        indices = sharding.devices_indices_map(shape)
    except ValueError as error:
        raise ShardingError(f"the sharding does not fit shape {list(shape)}: {error}") from error
    boxes: list[set[Box]] = [set() for _ in range(jax.process_count())]
    for device, index in indices.items():
        boxes[int(device.process_index)].add(box_of(index, shape))  # type: ignore[attr-defined]  # jaxlib's class
    return tuple(tuple(sorted(mine)) for mine in boxes)


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Return the box that slices cut out of an array of `shape`."""
    return tuple(piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True))


def is_local(sharding: Sharding) -> bool:
    """Return whether all devices of a sharding are this process's, in a job of several.

    Each process may have such an array of its own; the others know nothing of it.
    """
    return jax.process_count() > 1 and sharding.is_fully_addressable


def _numbered(shape: tuple[int, ...], by_process: tuple[tuple[Part, ...], ...]) -> Parts:
    layouts = (
        Layout(shape, tuple(mine[at].region if at < len(mine) else None for mine in by_process))
        for at in range(max(map(len, by_process)))
    )
    return Parts(by_process, tuple(layouts))


def _parts(boxes: Sequence[Box], shape: tuple[int, ...], bits: int) -> Iterable[Part]:
    if len(boxes) > 1 and any(_is_thin(held, shape, bits) for held in boxes):
        region = _union(boxes)
        if region is not None:
            return [Part(region, tuple(boxes))]
    return [Part(box([a for a, _ in held], [b - a for a, b in held]), (held,)) for held in boxes]


def _union(boxes: Sequence[Box]) -> Region | None:
    """Return the region that boxes make together, None if they make none."""
    dims = [sorted({held[dim] for held in boxes}) for dim in range(len(boxes[0]))]
    if math.prod(map(len, dims)) != len(boxes):
        return None
    if any(second[0] < first[1] for dim in dims for first, second in pairwise(dim)):
        return None
    return make_region(dims)


def _is_thin(held: Box, shape: tuple[int, ...], bits: int) -> bool:
    """Return whether the box's bytes lie in the file in many short pieces."""
    run = bits
    for (start, stop), size in zip(reversed(held), reversed(shape), strict=True):
        run *= stop - start
        if stop - start != size:
            break
    total = math.prod(stop - start for start, stop in held) * bits
    return run < total and run < THIN_BYTES * BITS_PER_BYTE
