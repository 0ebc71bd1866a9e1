"""A whole job as arrays: what every rank holds of every tensor, without an object per rank and tensor.

A model has few patterns: combinations of shape, dtype and layout. Of a pattern the distinct parts are worked out
once, and each rank is told the number of its part. Everything that is asked of the job is then a sum over patterns
of arrays over ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardferry.errors import InvalidInputError, ShardingError
from shardferry.format.dtypes import BITS
from shardferry.geometry.atoms import atoms_of
from shardferry.geometry.region import Region
from shardferry.geometry.sharding import MeshLayout, Sharding, region_at
from shardferry.geometry.spans import BITS_PER_BYTE, Collapsed, collapse
from shardferry.plan.cost import choose_access
from shardferry.plan.target import region_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardferry.format.index import CheckpointIndex, TensorInfo
    from shardferry.geometry.region import Intervals
    from shardferry.plan.catalogue import Held

    Ints = NDArray[np.int64]


class Atoms(NamedTuple):
    """What several parts have in common.

    Attributes:
        num_bytes: Shape (num_atoms,).
        parts: Per atom the parts it lies in; None if every atom is a part of the same number, so that all are disjoint.
    """

    num_bytes: Ints
    parts: tuple[Ints, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The distinct parts that ranks hold of a tensor, each not empty; shape (num_parts,) if not said.

    Attributes:
        wanted: Bytes of each.
        first: Offset in the tensor of the first byte of each.
        last: Offset after the last byte of each.
        runs: Runs of bytes each consists of.
        is_one_span: Whether it is one run, and not of a row of which more could be read.
        cover: Which of the covers is read to get it: the part itself, or the whole rows it lies in.
        atoms: What is wanted, cut where parts cut each other.
        covers: What is read, cut likewise; its parts are covers.
        cover_bytes: Shape (num_covers,): bytes of each cover.
        cover_runs: Shape (num_covers,): runs of bytes of each.
        row: Which of the rows each part lies in: one that is no single run in whole rows, another in itself.
        rows: The distinct ones, as (first, last, bytes, runs) of each, of shape (num_rows, 4).
    """

    wanted: Ints
    first: Ints
    last: Ints
    runs: Ints
    is_one_span: NDArray[np.bool_]
    cover: Ints
    atoms: Atoms
    covers: Atoms
    cover_bytes: Ints
    cover_runs: Ints
    row: Ints
    rows: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """Tensors of one shape, dtype and layout.

    Attributes:
        num_tensors: How many.
        num_bytes: Bytes of one of them.
        files: Numbers of the files they lie in, ascending.
        part_of_rank: Shape (world_size,): the part each rank holds, -1 for a rank that holds nothing.
        parts: The distinct parts.
    """

    num_tensors: int
    num_bytes: int
    files: Ints
    part_of_rank: Ints
    parts: Parts


@dataclass(frozen=True, slots=True, eq=False)
class JobShape:
    """All tensors of a job.

    Attributes:
        patterns: In the order of their first tensor in the checkpoint.
        pattern_of: Shape (num_tensors,): the pattern of every stored piece, in file order.
        file_of: Shape (num_tensors,): the file it lies in.
        spans: Shape (num_tensors, 2): where, [start, stop) in bytes of the file.
        file_bytes: Shape (num_files,): bytes of data in each file of the checkpoint.
        world_size: Ranks of the job.
    """

    patterns: tuple[Pattern, ...]
    pattern_of: Ints
    file_of: Ints
    spans: Ints
    file_bytes: Ints
    world_size: int


def shape_job(job: Mapping[str, Held], index: CheckpointIndex, *, world_size: int, seek_bytes: int) -> JobShape:
    """Return a job as arrays; names the checkpoint lacks are left out.

    Args:
        job: What every rank holds, by checkpoint name.
        index: Where it is stored.
        world_size: Ranks of the job.
        seek_bytes: What one more request costs, in bytes; see `CostModel`.

    Raises:
        ShardingError: If a part cannot be read, e.g. because it cuts a packed byte in two; names the tensor.
    """
    file_number = {file: at for at, file in enumerate(index.files)}
    patterns: list[Pattern] = []
    rows: list[tuple[int, int, int, int]] = []
    known: dict[tuple[object, ...], Parts] = {}
    for names in _alike(job, index):
        info = index.tensors[names[0]]
        stored = [row for name in names for row in _stored(index.tensors[name], len(patterns), file_number)]
        rows += stored
        files = np.unique(np.array([row[0] for row in stored], np.int64))
        regions, part_of_rank = _regions_of(info.shape, job[names[0]], world_size)
        key = (info.dtype, info.shape, *regions)  # groups of other ranks cut alike
        if key not in known:
            known[key] = _parts_of(names[0], info, regions, seek_bytes)
        patterns.append(Pattern(len(names), info.num_bytes, files, part_of_rank, known[key]))
    table = np.array(sorted(rows), np.int64).reshape(-1, 4)
    data = np.array([info.size - info.header_bytes for info in index.files.values()], np.int64)
    return JobShape(tuple(patterns), table[:, 3], table[:, 0], table[:, 1:3], data, world_size)


def _alike(job: Mapping[str, Held], index: CheckpointIndex) -> list[list[str]]:
    """Return the names of the tensors of each pattern, in the index's order, so that the job's does not matter."""
    ranks = _RankLists()
    groups: dict[tuple[str, tuple[int, ...], int, int], list[str]] = {}
    for name, info in index.tensors.items():
        held = job.get(name)
        if held is None:
            continue
        # By identity: to hash a layout takes as long as its list of ranks, and who makes a job makes each layout once.
        key = (info.dtype, info.shape, id(held.layout), ranks.number(held.ranks))
        groups.setdefault(key, []).append(name)
    return list(groups.values())


class _RankLists:
    """Numbers tuples of ranks; comparing two that are equal is much quicker than hashing one."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        self._count = 0

    def number(self, ranks: tuple[int, ...]) -> int:
        """Return the number of a tuple; equal ones have the same."""
        alike = self._known.setdefault((len(ranks), *ranks[:1], *ranks[-1:]), [])
        for other, number in alike:
            if other is ranks or other == ranks:
                return number
        alike.append((ranks, self._count))
        self._count += 1
        return self._count - 1


def _stored(info: TensorInfo, pattern: int, file_number: Mapping[str, int]) -> list[tuple[int, int, int, int]]:
    return [(file_number[part.file], *part.span, pattern) for part in info.parts or (info,)]


def _parts_of(name: str, info: TensorInfo, regions: Sequence[Region], seek_bytes: int) -> Parts:
    try:
        return measure_parts([(region,) for region in regions], info.shape, BITS[info.dtype], seek_bytes)
    except InvalidInputError as error:
        message = f"{name}: {error}"
        raise ShardingError(message) from error


def _regions_of(shape: tuple[int, ...], held: Held, world_size: int) -> tuple[list[Region], Ints]:
    """Return the distinct regions that are not empty, and the number of each rank's."""
    part_of_rank = np.full(world_size, -1, np.int64)
    if isinstance(held.layout, MeshLayout):
        regions, numbers = _mesh_regions(shape, held.layout)
        part_of_rank[np.array(held.layout.ranks, np.int64)] = numbers
        absent = np.ones(world_size, np.bool_)
        absent[np.array(held.ranks, np.int64)] = False
        part_of_rank[absent] = -1
        return regions, part_of_rank
    number: dict[Region, int] = {}
    for rank in held.ranks:
        region = region_of(held.layout, shape, rank)
        if region is not None and region.num_elements:
            part_of_rank[rank] = number.setdefault(region, len(number))
    return list(number), part_of_rank


def _mesh_regions(shape: tuple[int, ...], layout: MeshLayout) -> tuple[list[Region], Ints]:
    """Return the distinct regions of a mesh layout that are not empty, and the number of each mesh position's."""
    cut = {split.axis for split in layout.splits}
    sizes = tuple(size if axis in cut else 1 for axis, size in enumerate(layout.mesh_shape))
    # Only the axes that cut matter, and region_at does not look at ranks: long tuples of them are slow to hash.
    small = MeshLayout(sizes, (), layout.splits)
    regions: list[Region] = []
    numbers = np.full(math.prod(sizes), -1, np.int64)
    for position in range(len(numbers)):
        region = region_at(shape, small, position)
        if region.num_elements:
            numbers[position] = len(regions)
            regions.append(region)
    return regions, np.broadcast_to(numbers.reshape(sizes), layout.mesh_shape).reshape(-1)


def measure_parts(parts: Sequence[tuple[Region, ...]], shape: tuple[int, ...], bits: int, seek_bytes: int) -> Parts:
    """Return the distinct parts of a tensor as arrays.

    Args:
        parts: Regions of each, none empty; a rank that needs several of one tensor has several.
        shape: How the tensor is looked at, in elements.
        bits: Bits per element.
        seek_bytes: What one more request costs, in bytes.

    Raises:
        InvalidInputError: If a region cuts a byte in two.
    """
    covers, tables = dict[tuple[Region, ...], int](), dict[tuple[Region, ...], int]()
    rows = []
    for regions in parts:
        collapsed = [collapse(region, shape, bits) for region in regions]
        seen = list(zip(regions, collapsed, strict=True))
        read = tuple(_rows_of(one, shape) if choose_access(c, seek_bytes) == "rows" else one for one, c in seen)
        lies = tuple(one if _num_runs(c) == 1 else _rows_of(one, shape) for one, c in seen)
        one_span = len(regions) == 1 and len(collapsed[0].sizes) == 1 and _num_runs(collapsed[0]) == 1
        numbers = (
            found.setdefault(tuple(dict.fromkeys(k)), len(found)) for found, k in ((covers, read), (tables, lies))
        )
        rows.append((one_span, *numbers))
    table = np.array(rows, np.int64).reshape(-1, 3)
    first, last, wanted, runs = _measured(parts, shape, bits).T
    read_as, lie_in = (_measured(found, shape, bits) for found in (covers, tables))
    return Parts(
        wanted=wanted,
        first=first,
        last=last,
        runs=runs,
        is_one_span=table[:, 0] == 1,
        cover=table[:, 1],
        atoms=_atoms(parts, wanted, shape, bits),
        covers=_atoms(list(covers), read_as[:, 2], shape, bits),
        cover_bytes=read_as[:, 2],
        cover_runs=read_as[:, 3],
        row=table[:, 2],
        rows=lie_in,
    )


def _measured(parts: Iterable[tuple[Region, ...]], shape: tuple[int, ...], bits: int) -> Ints:
    """Return first byte, last byte, bytes and runs of each, of shape (num_parts, 4)."""
    rows = []
    for regions in parts:
        collapsed = [collapse(region, shape, bits) for region in regions]
        ends = [_ends(one) for one in collapsed]
        num_bytes = sum(one.num_bytes for one in collapsed)
        rows.append((min(ends)[0], max(end for _, end in ends), num_bytes, sum(map(_num_runs, collapsed))))
    return np.array(rows, np.int64).reshape(-1, 4)


def _rows_of(region: Region, shape: tuple[int, ...]) -> Region:
    """Return the whole rows a region lies in: its last dim that is not held whole, made whole."""
    dims: list[Intervals] = list(region.dims)
    at = max(dim for dim, size in enumerate(shape) if dims[dim] != ((0, size),))
    dims[at] = ((0, shape[at]),)
    return Region(tuple(dims))


def _ends(collapsed: Collapsed) -> tuple[int, int]:
    first = last = 0
    for size, intervals in zip(collapsed.sizes, collapsed.dims, strict=True):
        first = first * size + intervals[0][0]
        last = last * size + intervals[-1][1] - 1
    return first, last + 1


def _num_runs(collapsed: Collapsed) -> int:
    *outer, inner = collapsed.dims
    return math.prod(sum(stop - start for start, stop in intervals) for intervals in outer) * len(inner)


def _atoms(parts: Sequence[tuple[Region, ...]], num_bytes: Ints, shape: tuple[int, ...], bits: int) -> Atoms:
    """Return what parts have in common, one atom each if they are disjoint."""
    parts_of: dict[Region, list[int]] = {}
    for part, regions in enumerate(parts):
        for region in regions:
            parts_of.setdefault(region, []).append(part)
    if all(len(owners) == 1 for owners in parts_of.values()) and _are_disjoint(parts_of):
        return Atoms(num_bytes, None)
    owners = list(parts_of.values())
    found: dict[tuple[int, ...], int] = {}
    for atom in atoms_of(Sharding(shape, tuple(parts_of))):
        if atom.holders:
            members = tuple(sorted({part for at in atom.holders for part in owners[at]}))
            found[members] = found.get(members, 0) + atom.region.num_elements * bits // BITS_PER_BYTE
    return Atoms(np.array(list(found.values()), np.int64), tuple(np.array(members, np.int64) for members in found))


def _are_disjoint(regions: Iterable[Region]) -> bool:
    """Return whether different regions surely have no element in common, without comparing all with all.

    So it is if along every dim their lists of intervals are equal or disjoint, as those of a mesh are.
    """
    for lists in zip(*(region.dims for region in regions), strict=True):
        intervals = sorted((start, stop, at) for at, one in enumerate(set(lists)) for start, stop in one)
        if any(stop > start for (_, stop, _), (start, _, _) in pairwise(intervals)):
            return False
    return True
