"""Who wants which bytes of a checkpoint: what ranks tell each other before one of them can read for another.

A rank has few different wants (a shape, and the regions of it), each for many stored tensors. It tells the wants and
a hash of the set of tensors under each; a set that several ranks have is then sent by the first of them only. So what
travels grows with the sharding of the model and not with names times ranks.

A stored tensor is known by its unit: its number among everything stored, in the order of the files' bytes.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardferry.collector import paused_collector
from shardferry.format.dtypes import BITS
from shardferry.geometry.region import Region

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardferry.format.index import CheckpointIndex
    from shardferry.plan.load import LoadPlan

    Numbers = NDArray[np.int64]
    # By shape and regions, the units that are wanted so, ascending.
    Wants = dict[tuple[tuple[int, ...], tuple[Region, ...]], Numbers]


class Unit(NamedTuple):
    """A stored tensor, or a box of one that is stored in several.

    Attributes:
        file: File, relative to the checkpoint's root.
        start: Offset in the file of its first byte.
        dtype: safetensors dtype.
    """

    file: str
    start: int
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Everything stored that is not empty, in the order of the files and of the bytes within.

    Columns, as there may be 100,000 units: arrays of shape (num_units,).

    Attributes:
        names: Names of the files.
        files: Number of the file of each unit.
        starts: Offset in the file of its first byte.
        dtypes: Its safetensors dtype.
        bits: Its bits per element.
        numbers: Number of a unit, by file and start.
    """

    names: tuple[str, ...]
    files: Numbers
    starts: Numbers
    dtypes: tuple[str, ...]
    bits: Numbers
    numbers: Mapping[str, Mapping[int, int]]

    def unit(self, number: int) -> Unit:
        """Return one unit."""
        return Unit(self.names[self.files[number]], int(self.starts[number]), self.dtypes[number])

    def number(self, file: str, start: int) -> int:
        """Return the number of the unit at a place."""
        return self.numbers[file][start]


class Row(NamedTuple):
    """One want of one rank.

    Attributes:
        shape: How the stored tensors are looked at.
        regions: What is wanted of each, different regions, ascending.
        units: Hash of the set of units it is wanted of.
    """

    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    units: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What all ranks want.

    Attributes:
        rows: By rank.
        sets: The units of every set, ascending, by hash.
    """

    rows: tuple[tuple[Row, ...], ...]
    sets: Mapping[int, Numbers]


class Pattern(NamedTuple):
    """Units that the same ranks want in the same way.

    Attributes:
        shape: How they are looked at.
        bits: Bits per element.
        units: Ascending.
        wants: Ranks, ascending, and the regions each wants.
    """

    shape: tuple[int, ...]
    bits: int
    units: Numbers
    wants: tuple[tuple[int, tuple[Region, ...]], ...]


@paused_collector()
def number_units(index: CheckpointIndex) -> Units:
    """Return the units of a checkpoint; the same on every rank that has its index."""
    order = {name: position for position, name in enumerate(index.files)}
    stored = [(part, info.dtype) for info in index.tensors.values() for part in info.parts or (info,)]
    files = np.array([order[part.file] for part, _ in stored], np.int64)
    spans = np.array([part.span for part, _ in stored], np.int64).reshape(-1, 2)
    which = np.lexsort((spans[:, 0], files))
    which = which[spans[which, 0] < spans[which, 1]]
    files, starts = files[which], spans[which, 0]
    dtypes = tuple(stored[at][1] for at in which.tolist())
    numbers: dict[str, dict[int, int]] = {file: {} for file in order}
    names = tuple(order)
    for number, (file, start) in enumerate(zip(files.tolist(), starts.tolist(), strict=True)):
        numbers[names[file]][start] = number
    return Units(names, files, starts, dtypes, np.array([BITS[dtype] for dtype in dtypes], np.int64), numbers)


def wants_of(plan: LoadPlan, units: Units) -> Wants:
    """Return what a rank wants, from the copies it would make by itself."""
    regions: dict[tuple[int, tuple[int, ...]], set[Region]] = defaultdict(set)
    for tensor in plan.tensors:
        for copy in tensor.copies:
            regions[units.number(copy.file, copy.start), copy.shape].add(copy.region)
    found: dict[tuple[tuple[int, ...], tuple[Region, ...]], list[int]] = defaultdict(list)
    for (unit, shape), held in sorted(regions.items()):
        found[shape, tuple(sorted(held, key=lambda region: region.dims))].append(unit)
    return {want: np.array(members, np.int64) for want, members in found.items()}


def wants_to_bytes(wants: Wants) -> bytes:
    """Return what a rank tells first: its wants, and of each the hash of the units."""
    rows = [
        [_json([shape, [region.dims for region in regions]]), _hash(units)] for (shape, regions), units in wants.items()
    ]
    return _json(rows).encode()


def rows_from_bytes(data: bytes) -> tuple[Row, ...]:
    """Return the wants that `wants_to_bytes` encoded."""
    return tuple(Row(*_want(text), units) for text, units in json.loads(data))


def sets_to_bytes(wants: Wants, rows: Sequence[Sequence[Row]], rank: int) -> bytes:
    """Return what a rank tells next: the sets of units of which it is the first to know the hash.

    Args:
        wants: What this rank wants.
        rows: The wants that every rank has told.
        rank: This rank.
    """
    mine = {_hash(units): units for units in wants.values()}
    sets = [mine[name] for name in _first_told(rows)[rank]]
    counts = np.array([len(units) for units in sets], np.int32)
    steps = [np.diff(units, prepend=0).astype(np.int32) for units in sets]
    return zlib.compress(np.concatenate([counts, *steps]).tobytes(), 1)


def make_demand(rows: Sequence[tuple[Row, ...]], sets: Sequence[bytes]) -> Demand:
    """Return what all ranks want; the same on every rank.

    Args:
        rows: The wants that every rank has told.
        sets: What `sets_to_bytes` returned on every rank.
    """
    found: dict[int, Numbers] = {}
    for names, data in zip(_first_told(rows), sets, strict=True):
        numbers = np.frombuffer(zlib.decompress(data), np.int32).astype(np.int64)
        counts, steps = numbers[: len(names)], numbers[len(names) :]
        parts = np.split(steps, np.cumsum(counts)[:-1]) if names else []
        found.update((name, np.cumsum(part)) for name, part in zip(names, parts, strict=True))
    return Demand(tuple(rows), found)


def patterns_of(demand: Demand, units: Units, shapes: Mapping[tuple[int, ...], Numbers]) -> Iterator[Pattern]:
    """Yield the patterns of some units.

    Args:
        demand: What all ranks want.
        units: Everything stored.
        shapes: The units concerned, ascending, by the shape in which they are looked at.
    """
    tellers: dict[tuple[int, ...], dict[int, list[tuple[int, tuple[Region, ...]]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for rank, rows in enumerate(demand.rows):
        for row in rows:
            tellers[row.shape][row.units].append((rank, row.regions))
    for shape, members in shapes.items():
        # Units are alike if they are in the same sets: the sum of the sets' hashes tells.
        signs = units.bits.astype(np.uint64)
        for name in tellers[shape]:
            signs[demand.sets[name]] += np.uint64(name)
        _, first, inverse = np.unique(signs[members], return_index=True, return_inverse=True)
        wants = _wants_at(demand, tellers[shape], members[first], len(units.bits))
        by_pattern = np.split(members[np.argsort(inverse, kind="stable")], np.cumsum(np.bincount(inverse))[:-1])
        for alike, wanted in zip(by_pattern, wants, strict=True):
            yield Pattern(shape, int(units.bits[alike[0]]), alike, wanted)


def shapes_of(wants: Wants) -> dict[tuple[int, ...], Numbers]:
    """Return the units a rank wants, ascending, by the shape in which it looks at them."""
    found: dict[tuple[int, ...], list[Numbers]] = defaultdict(list)
    for (shape, _), units in wants.items():
        found[shape].append(units)
    return {shape: np.unique(np.concatenate(parts)) for shape, parts in found.items()}


def all_shapes(demand: Demand) -> dict[tuple[int, ...], Numbers]:
    """Return the units that any rank wants, ascending, by the shape in which they are looked at."""
    sets: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for rows in demand.rows:
        for row in rows:
            sets[row.shape].add(row.units)
    return {shape: np.unique(np.concatenate([demand.sets[name] for name in names])) for shape, names in sets.items()}


def _wants_at(
    demand: Demand,
    tellers: Mapping[int, Sequence[tuple[int, tuple[Region, ...]]]],
    members: Numbers,
    num_units: int,
) -> list[tuple[tuple[int, tuple[Region, ...]], ...]]:
    found: list[list[tuple[int, tuple[Region, ...]]]] = [[] for _ in members]
    inside = np.zeros(num_units, np.bool_)
    for name, told in tellers.items():
        inside[demand.sets[name]] = True
        for at in np.flatnonzero(inside[members]):
            found[at].extend(told)
        inside[demand.sets[name]] = False
    return [tuple(sorted(wants, key=lambda want: want[0])) for wants in found]


def _first_told(rows: Sequence[Sequence[Row]]) -> list[list[int]]:
    """Return, by rank, the hashes that no rank before it has told, in the order told."""
    seen: set[int] = set()
    found = []
    for mine in rows:
        names = [name for name in dict.fromkeys(row.units for row in mine) if name not in seen]
        seen.update(names)
        found.append(names)
    return found


@lru_cache(maxsize=4096)
def _want(text: str) -> tuple[tuple[int, ...], tuple[Region, ...]]:
    """Return the shape and the regions that a text tells: many ranks tell the same, which is decoded once."""
    shape, regions = json.loads(text)
    return tuple(shape), tuple(map(_region, regions))


def _json(told: object) -> str:
    return json.dumps(told, separators=(",", ":"))


def _region(dims: list[list[list[int]]]) -> Region:
    return Region(tuple(tuple((start, stop) for start, stop in intervals) for intervals in dims))


def _hash(units: Numbers) -> int:
    return int.from_bytes(blake2b(units.astype("<i8").tobytes(), digest_size=8).digest(), "little")
