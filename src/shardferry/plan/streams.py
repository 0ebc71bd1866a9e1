"""Plan a save to where a file can only be written from its beginning to its end: an object store.

Every file has one owner, to which the others send what they have of it. Each round carries the next boxes of the file
that every owner is at, so that an owner holds no more than a round and what it is sending on.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from shardferry.format.dtypes import BITS
from shardferry.geometry.region import Region, select, whole
from shardferry.geometry.spans import BITS_PER_BYTE
from shardferry.plan.exchange import Box

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardferry.format.writer import FileLayout
    from shardferry.plan.catalogue import Held

# Elements of every packed dtype, F6 the widest, end on a byte at multiples of this.
_UNIT = 4


def plan_owners(files: Sequence[FileLayout], world_size: int) -> dict[str, int]:
    """Return the rank that writes each file: the largest first, each to the rank with the fewest bytes."""
    load = [0] * world_size
    owners = {}
    for file in sorted(files, key=lambda file: (-file.size, file.name)):
        owner = min(range(world_size), key=lambda rank: (load[rank], rank))
        owners[file.name] = owner
        load[owner] += file.size
    return owners


def plan_streams(
    catalogue: Mapping[str, Held],
    files: Sequence[FileLayout],
    dtypes: Mapping[str, str],
    *,
    owners: Mapping[str, int],
    round_bytes: int,
) -> list[tuple[Box, ...]]:
    """Return the rounds: of each owner at most `round_bytes`, or one box, in the order of its files' bytes.

    Args:
        catalogue: Every tensor of the job.
        files: How they are laid out over files.
        dtypes: The dtype each is written in.
        owners: The rank that writes each file.
        round_bytes: Most bytes an owner takes in a round.
    """
    streams: dict[int, list[list[Box]]] = {}
    room: dict[int, int] = {}
    for file in files:
        owner = owners[file.name]
        turns = streams.setdefault(owner, [])
        for name, (start, _) in sorted(file.spans.items(), key=lambda item: item[1]):
            bits = BITS[dtypes[name]]
            for region in _runs(whole(catalogue[name].shape), bits, round_bytes, 0):
                num_bytes = region.num_elements * bits // BITS_PER_BYTE
                if not turns or num_bytes > room[owner]:
                    turns.append([])
                    room[owner] = round_bytes
                turns[-1].append(Box(name, file.name, start, region, owner))
                room[owner] -= num_bytes
    rounds = zip_longest(*(streams[owner] for owner in sorted(streams)), fillvalue=())
    return [tuple(box for boxes in turn for box in boxes) for turn in rounds]


def _runs(region: Region, bits: int, max_bytes: int, dim: int) -> Iterator[Region]:
    """Yield parts of a whole tensor, each one run of its bytes, in order; none of an empty tensor."""
    num_bytes = region.num_elements * bits // BITS_PER_BYTE
    if not region.num_elements:
        return
    if num_bytes <= max_bytes or dim == len(region.dims):
        yield region
        return
    size = region.shape[dim]
    step = max(1, size * max_bytes // num_bytes)
    if dim == len(region.dims) - 1:
        step = max(1, step // _UNIT) * _UNIT
    for start in range(0, size, step):
        dims = list(region.dims)
        dims[dim] = select(dims[dim], start, min(size, start + step))
        yield from _runs(Region(tuple(dims)), bits, max_bytes, dim + 1)
