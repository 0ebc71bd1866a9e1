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

from shardferry.errors import ShardingError
from shardferry.geometry.region import Interval, Region, box, make_region
from shardferry.geometry.sharding import Sharding as Layout
from shardferry.geometry.spans import BITS_PER_BYTE
from shardferry.units import KIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from jax import Device
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


@dataclass(frozen=True, slots=True)
class Parts:
    """An array as the processes hold it.

    Attributes:
        devices: The devices of each box, of all processes.
        by_process: The parts of every process.
        layouts: Per part number the region of every process, None for a process that has fewer parts.
    """

    devices: Mapping[Box, tuple[Device, ...]]
    by_process: tuple[tuple[Part, ...], ...]
    layouts: tuple[Layout, ...]


@lru_cache(maxsize=4096)
def parts_of(sharding: Sharding, shape: tuple[int, ...], bits: int, num_processes: int) -> Parts:
    """Return the parts of an array.

    Args:
        sharding: How its devices hold it.
        shape: Its global shape.
        bits: Bits of an element in a file.
        num_processes: Processes of the job.

    Raises:
        ShardingError: If the sharding does not fit the shape.
    """
    devices: dict[Box, list[Device]] = {}
    boxes: list[set[Box]] = [set() for _ in range(num_processes)]
    for device, held in _boxes(sharding, shape).items():
        devices.setdefault(held, []).append(device)
        boxes[device.process_index].add(held)
    by_process = tuple(tuple(_parts(sorted(mine), shape, bits)) for mine in boxes)
    layouts = [
        Layout(shape, tuple(mine[at].region if at < len(mine) else None for mine in by_process))
        for at in range(max(map(len, by_process)))
    ]
    return Parts({held: tuple(those) for held, those in devices.items()}, by_process, tuple(layouts))


@lru_cache(maxsize=4096)
def union_layout(sharding: Sharding, shape: tuple[int, ...], num_processes: int) -> tuple[Layout, tuple[Part, ...]]:
    """Return the one region of every process, with the part it is; None for a process without devices of the array.

    Raises:
        ShardingError: If the sharding does not fit the shape, or a process holds boxes that make no region together.
    """
    boxes: list[set[Box]] = [set() for _ in range(num_processes)]
    for device, held in _boxes(sharding, shape).items():
        boxes[device.process_index].add(held)
    parts: list[Part] = []
    for process, mine in enumerate(boxes):
        region = _union(sorted(mine)) if mine else Region(())
        if region is None:
            raise ShardingError(
                f"process {process} holds boxes that make no product of intervals, in shape {list(shape)} under "
                f"{sharding}. Order the devices of the mesh so that a process has a block of them"
            )
        parts.append(Part(region, tuple(sorted(mine))))
    regions = tuple(part.region if part.boxes else None for part in parts)
    return Layout(shape, regions), tuple(parts)


def _boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Device, Box]:
    try:
        sharding.shard_shape(shape)  # devices_indices_map does not look whether dims divide
        indices = sharding.devices_indices_map(shape)
    except ValueError as error:
        raise ShardingError(f"the sharding does not fit shape {list(shape)}: {error}") from error
    return {
        device: tuple(slice_.indices(size)[:2] for slice_, size in zip(index, shape, strict=True))
        for device, index in indices.items()
    }


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
