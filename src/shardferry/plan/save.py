"""Plan a save: which rank writes which bytes of which file.

Pure. Every element is written by one of its holders: a part one rank holds alone by that rank, a small replicated
part by one holder chosen by the name's hash, a large one in pieces by all its holders. What a rank writes depends
on the layout, what ends up in the files does not.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardferry.errors import ShardingError
from shardferry.format.dtypes import BITS
from shardferry.geometry.atoms import atoms_of
from shardferry.geometry.pieces import ALIGNED_ELEMENTS, byte_boxes, intersect, part_at
from shardferry.geometry.region import Region, positions, select
from shardferry.geometry.sharding import Sharding
from shardferry.geometry.spans import Collapsed, collapse
from shardferry.plan.agreement import hash_names
from shardferry.plan.catalogue import holders
from shardferry.plan.target import region_of
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardferry.format.writer import FileLayout
    from shardferry.geometry.region import Interval
    from shardferry.plan.catalogue import Held
    from shardferry.plan.target import Layout

# Smaller replicated parts have one writer: cutting them costs more calls than it spreads bytes.
SPLIT_MIN_BYTES = MIB


class Write(NamedTuple):
    """A region of a tensor that this rank writes.

    Attributes:
        name: The tensor.
        file: File it lies in.
        start: Offset in the file of the tensor's first byte.
        dtype: safetensors dtype written.
        shape: Global shape of the tensor.
        region: What to write of it.
        local: The same elements by their positions in this rank's local tensor.
        memory: What the model calls that tensor.
        axes: None if `local` has the dims of `region`; else per dim of `region` the dim of `local` that it is, -1 for
            none. Dims of `local` that are not named have one position.
    """

    name: str
    file: str
    start: int
    dtype: str
    shape: tuple[int, ...]
    region: Region
    local: Region
    memory: str
    axes: tuple[int, ...] | None = None

    @property
    def local_order(self) -> tuple[int, ...]:
        """The dims of the local tensor in the order in which they are written."""
        if self.axes is None:
            return tuple(range(len(self.local.dims)))
        unnamed = (dim for dim in range(len(self.local.dims)) if dim not in self.axes)
        return (*unnamed, *(axis for axis in self.axes if axis >= 0))

    @property
    def collapsed(self) -> Collapsed:
        """The region over as few dims as possible, in bytes."""
        return collapse(self.region, self.shape, BITS[self.dtype])

    @property
    def num_bytes(self) -> int:
        """Bytes written."""
        return self.collapsed.num_bytes


def plan_save(
    catalogue: Mapping[str, Held],
    files: Sequence[FileLayout],
    dtypes: Mapping[str, str],
    *,
    rank: int,
    exchanged: frozenset[str],
) -> tuple[Write, ...]:
    """Return what one rank writes by itself, in file order.

    Args:
        catalogue: Every tensor of the job.
        files: How they are laid out over files.
        dtypes: The dtype each is written in.
        rank: Whose part to plan.
        exchanged: Tensors that are written after an exchange instead.

    Raises:
        ShardingError: If elements of a tensor are on no rank; names the tensor and the first missing part.
    """
    writes: list[Write] = []
    for file in files:
        for name, (start, _) in sorted(file.spans.items(), key=lambda item: item[1]):
            held = catalogue[name]
            check_whole(name, held)
            if name in exchanged or rank not in held.ranks:
                continue
            pieces = (piece for piece in pieces_of(held, BITS[dtypes[name]]) if piece.writer(name) == rank)
            writes.extend(local_write(name, file.name, start, dtypes[name], held, one.region, rank) for one in pieces)
    return tuple(writes)


def local_write(  # noqa: PLR0917 - the fields of a write
    name: str, file: str, start: int, dtype: str, held: Held, region: Region, rank: int
) -> Write:
    """Return the write of a region by a rank that holds it."""
    if held.parts:
        return _made_write(Write(name, file, start, dtype, held.shape, region, region, ""), held, rank)
    mine = region_of(held.layout, held.shape, rank)
    local = Region(tuple(map(positions, region.dims, mine.dims if mine else ())))
    return Write(name, file, start, dtype, held.shape, region, local, held.memory or name)


class Piece(NamedTuple):
    """A region of a tensor that one rank writes: any of those given, which of them the name decides."""

    region: Region
    ranks: tuple[int, ...]

    def writer(self, name: str) -> int:
        """Return the rank that writes it of the tensor of this name."""
        return self.ranks[0] if len(self.ranks) == 1 else self.ranks[hash_names([name]) % len(self.ranks)]


def pieces_of(held: Held, bits: int) -> tuple[Piece, ...]:
    """Return the pieces that are every element of a tensor once; the same for all tensors of a kind."""
    if held.parts:
        return tuple(Piece(part.region, part.ranks) for part in held.parts)
    return _pieces(held.shape, held.layout, holders(held), bits)


def check_whole(name: str, held: Held) -> None:
    """Raise `ShardingError` unless every element of a tensor is on some rank."""
    gap = None if held.parts else _gap(held.shape, held.layout, holders(held))
    if gap is not None:
        first = ", ".join(f"{dim[0][0]}-{dim[0][1]}" for dim in gap.dims)
        message = (
            f"{name}: elements [{first}] of shape {list(held.shape)} are on no rank, so it cannot be saved. "
            "Every rank of the tensor's mesh must take part, with its layout"
        )
        raise ShardingError(message)


def split_write(write: Write, max_bytes: int) -> Iterator[Write]:
    """Yield writes of at most `max_bytes`, or of a few innermost elements, that do what `write` does."""
    for box in byte_boxes(write.region.shape, BITS[write.dtype], max_bytes):
        local = box if write.axes is None else _local_box(write, box)
        yield write._replace(region=part_at(write.region, box), local=part_at(write.local, local))


def _local_box(write: Write, box: Sequence[Interval]) -> list[Interval]:
    assert write.axes is not None
    runs = [(0, size) for size in write.local.shape]
    for axis, run in zip(write.axes, box, strict=True):
        if axis >= 0:
            runs[axis] = run
    return runs


def _made_write(write: Write, held: Held, rank: int) -> Write:
    """Return a write of a tensor that is made from others with the place of its elements in one of those."""
    part = next(part for part in held.parts if intersect(part.region, write.region) == write.region)
    dims = list(part.origin.dims)
    for inner, outer, axis in zip(write.region.dims, part.region.dims, part.axes, strict=True):
        if axis >= 0:
            runs = (select(part.origin.dims[axis], *run) for run in positions(inner, outer))
            dims[axis] = tuple(interval for run in runs for interval in run)
    mine = region_of(part.held.layout, part.held.shape, rank)
    assert mine is not None
    local = Region(tuple(map(positions, dims, mine.dims)))
    return write._replace(local=local, memory=part.memory, axes=part.axes)


@lru_cache(maxsize=4096)
def _pieces(shape: tuple[int, ...], layout: Layout | None, ranks: tuple[int, ...], bits: int) -> tuple[Piece, ...]:
    pieces = []
    for part, owners in _parts(shape, layout, ranks):
        if len(owners) > 1 and part.num_elements * bits // 8 >= SPLIT_MIN_BYTES:
            shares = (Piece(_share(part, at, len(owners)), (rank,)) for at, rank in enumerate(owners))
            pieces += [share for share in shares if share.region.num_elements]
        else:
            pieces.append(Piece(part, owners))
    return tuple(pieces)


@lru_cache(maxsize=4096)
def _gap(shape: tuple[int, ...], layout: Layout | None, ranks: tuple[int, ...]) -> Region | None:
    return next((part for part, owners in _parts(shape, layout, ranks) if not owners), None)


@lru_cache(maxsize=4096)
def _parts(
    shape: tuple[int, ...], layout: Layout | None, ranks: tuple[int, ...]
) -> tuple[tuple[Region, tuple[int, ...]], ...]:
    """Return the parts of a tensor with their holders, none for elements that nobody has."""
    if 0 in shape:
        return ()
    regions: list[Region | None] = [None] * (max(ranks, default=-1) + 1)
    for rank in ranks:
        regions[rank] = region_of(layout, shape, rank)
    return tuple((atom.region, atom.holders) for atom in atoms_of(Sharding(shape, tuple(regions))))


def _share(region: Region, index: int, count: int) -> Region:
    """Return one of `count` nearly equal runs of a region, cut along its outermost dim that is long enough."""
    sizes = region.shape
    dim = next((dim for dim, size in enumerate(sizes) if size >= count), sizes.index(max(sizes)))
    unit = 1 if dim < len(sizes) - 1 else PAGE_ELEMENTS if sizes[dim] >= count * PAGE_ELEMENTS else ALIGNED_ELEMENTS
    start, stop = (min(sizes[dim], -(-sizes[dim] * at // count // unit) * unit) for at in (index, index + 1))
    if index == count - 1:
        stop = sizes[dim]
    dims = list(region.dims)
    dims[dim] = select(dims[dim], start, stop)
    return Region(tuple(dims))


# A cut of the innermost dim falls on a multiple of this many elements, so that no two writers share a page.
PAGE_ELEMENTS = 4096
