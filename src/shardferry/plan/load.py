"""Plan a load: from what a rank wants and where it is stored to the copies that bring it in.

Pure: integers in, a frozen plan out. The plan names bytes of files and places in local tensors; it does not know
what memory those are. Tensors are planned in file order, so that executing it streams through the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardferry.collector import paused_collector
from shardferry.convert.ops import Stored, Tile, Tiled, Zeros, dtypes_of, leaves, replace_leaves, reshape
from shardferry.convert.pull import pull_back
from shardferry.errors import InvalidInputError, ShardingError
from shardferry.format.dtypes import BITS
from shardferry.geometry.pieces import byte_boxes
from shardferry.geometry.region import Interval, Intervals, Region, select, whole
from shardferry.geometry.spans import BITS_PER_BYTE, Collapsed, collapse
from shardferry.plan.cost import Access, choose_access
from shardferry.plan.costmodel import PRESETS
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardferry.convert.ops import Computed, Expression
    from shardferry.convert.pull import Piece
    from shardferry.format.index import CheckpointIndex, TensorInfo


# What is planned, and read, at a time to compute with: 4 MiB of 8-bit codes. Half as much costs a load of block-scaled
# FP8 a tenth more.
TILE_ELEMENTS = 4 * MIB


class Wanted(NamedTuple):
    """One tensor a rank wants to hold.

    Attributes:
        name: What the model calls it.
        source: How it is made of stored tensors; a leaf's key is a name of the checkpoint.
        region: The region of it this rank holds.
    """

    name: str
    source: Expression
    region: Region


class Copy(NamedTuple):
    """Bytes of a file that fill a box of a local tensor.

    Attributes:
        file: File, relative to the checkpoint's root.
        start: Offset in the file of the first byte of the stored tensor (or box of one).
        dtype: safetensors dtype stored.
        shape: Shape in which the stored tensor (or box) is looked at, in elements.
        region: Region of it to read.
        collapsed: That region over as few dims as possible, in bytes.
        axes: The region's array is reordered by these axes: dim i of the target is dim `axes[i]`.
        target: Per dim of the reordered array the half-open range filled: of the local tensor's dim, or of `fine`.
        access: How to read it.
        fine: Empty, or what the reordered array's dims are in the local tensor, as a `Piece` has it.
    """

    file: str
    start: int
    dtype: str
    shape: tuple[int, ...]
    region: Region
    collapsed: Collapsed
    axes: tuple[int, ...]
    target: tuple[Interval, ...]
    access: Access
    fine: tuple[tuple[int, int], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes wanted."""
        return self.collapsed.num_bytes

    @property
    def first_byte(self) -> int:
        """Offset in the file of the first byte wanted."""
        sizes, dims = self.collapsed
        offset = 0
        for size, intervals in zip(sizes, dims, strict=True):
            offset = offset * size + intervals[0][0]
        return self.start + offset

    @property
    def is_one_span(self) -> bool:
        """Whether what is wanted lies in the file without a hole."""
        return len(self.collapsed.sizes) == 1 and len(self.collapsed.dims[0]) == 1

    @property
    def in_order(self) -> bool:
        """Whether the region arrives in the target's own order, and fills a box of it."""
        return not self.fine and self.axes == tuple(range(len(self.axes)))


@dataclass(frozen=True, slots=True)
class Computation:
    """A part of a local tensor whose values are computed from stored ones.

    Attributes:
        source: What is computed.
        region: Which region of it.
        inputs: Per operand how the part of it that is needed comes about.
        result: Where the region goes, as a copy of its array in its dtype; its file is empty.
    """

    source: Computed
    region: Region
    inputs: tuple[TensorPlan, ...]
    result: Copy


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """What fills one local tensor; nothing for a tensor of which the rank holds no element.

    Attributes:
        name: The tensor.
        local_shape: Shape of what the rank holds.
        copies: What is copied from files.
        zeros: Parts that are zeros, as copies of an empty file.
        computations: Parts that are computed.
    """

    name: str
    local_shape: tuple[int, ...]
    copies: tuple[Copy, ...]
    zeros: tuple[Copy, ...] = ()
    computations: tuple[Computation, ...] = ()

    def all_copies(self) -> Iterator[Copy]:
        """Yield everything that is moved: from files, from nowhere, into operands and out of results."""
        yield from self.copies
        yield from self.zeros
        for made in self.computations:
            yield made.result
            for plan in made.inputs:
                yield from plan.all_copies()

    @property
    def bytes_read(self) -> int:
        """Bytes it is made of, as stored."""
        inputs = (plan.bytes_read for made in self.computations for plan in made.inputs)
        return sum(copy.num_bytes for copy in self.copies) + sum(inputs)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What one rank reads.

    Attributes:
        tensors: In the order of their first byte, by file.
        bytes_wanted: Bytes that land in local tensors, as stored.
        seek_bytes: A hole of fewer bytes is read along with what lies around it.
    """

    tensors: tuple[TensorPlan, ...]
    bytes_wanted: int
    seek_bytes: int


@paused_collector()
def plan_load(
    index: CheckpointIndex, wanted: Iterable[Wanted], seek_bytes: int = PRESETS["local"].seek_bytes
) -> LoadPlan:
    """Return the copies that bring what one rank wants out of a checkpoint.

    Args:
        index: Where everything is stored.
        wanted: Every tensor the rank holds; names are unique.
        seek_bytes: What one more request costs, in bytes; see `CostModel`.

    Raises:
        ShardingError: If a region cannot be read, e.g. because it cuts a packed byte in two; names the tensor.
    """
    order = {name: position for position, name in enumerate(index.files)}
    plans = (_plan_tensor(index, want, seek_bytes) for want in wanted)
    tensors = tuple(sorted(plans, key=lambda plan: _first_byte(plan, order)))
    return LoadPlan(tensors, sum(plan.bytes_read for plan in tensors), seek_bytes)


def split_copy(copy: Copy, max_bytes: int) -> Iterator[Copy]:
    """Return copies of at most `max_bytes` that together do what `copy` does.

    The innermost dim is cut at multiples of 4 elements only: less than their bytes is not kept to.
    """
    if copy.num_bytes <= max_bytes:
        return iter((copy,))
    return (_part(copy, box) for box in byte_boxes(copy.region.shape, BITS[copy.dtype], max_bytes))


def _plan_tensor(index: CheckpointIndex, want: Wanted, seek_bytes: int) -> TensorPlan:
    copies: list[Copy] = []
    zeros: list[Copy] = []
    computations: list[Computation] = []
    try:
        for piece in pull_back(_expand(index, want.source), want.region):
            if isinstance(piece.source, Stored):
                copies.append(_locate(index, piece, piece.source, seek_bytes))
            elif isinstance(piece.source, Zeros):
                zeros.append(_from_nowhere(piece, piece.region.shape, _dtype_of(index, want.source)))
            else:
                computations.extend(_compute(index, piece, piece.source, seek_bytes))
    except InvalidInputError as error:
        message = f"{want.name}: {error}"
        raise ShardingError(message) from error
    return TensorPlan(want.name, want.region.shape, tuple(copies), tuple(zeros), tuple(computations))


def _compute(index: CheckpointIndex, piece: Piece, source: Computed, seek_bytes: int) -> Iterator[Computation]:
    """Yield what computes a piece, a bounded part at a time."""
    for region, result in _tiles_of(source, piece.region, _from_nowhere(piece, piece.counts, source.dtype)):
        shapes = [operand.shape for operand in source.operands]
        wanted = (
            Wanted(source.function.name, operand, needed)
            for operand, needed in zip(source.operands, source.function.needs(shapes, region), strict=True)
        )
        inputs = tuple(_plan_tensor(index, want, seek_bytes) for want in wanted)
        yield Computation(source, region, inputs, result)


def _tiles_of(source: Computed, region: Region, result: Copy) -> Iterator[tuple[Region, Copy]]:
    """Yield a region of a computed tensor and where it goes, in runs of rows of at most `TILE_ELEMENTS` elements."""
    dim = next((dim for dim, size in enumerate(region.shape[:-1]) if size > 1), None)
    at = next((at for at, size in enumerate(result.shape[:-1]) if size > 1), None)
    same = [size for size in region.shape if size > 1] == [size for size in result.shape if size > 1]
    if dim is None or at is None or not same or source.function.whole or region.num_elements <= TILE_ELEMENTS:
        yield region, result
        return
    size = region.shape[dim]
    step = max(1, size * TILE_ELEMENTS // region.num_elements)
    for start in range(0, size, step):
        stop = min(size, start + step)
        dims = list(region.dims)
        dims[dim] = select(dims[dim], start, stop)
        array = _narrow(result, at, start, stop)
        array = array._replace(shape=array.region.shape, region=whole(array.region.shape))
        yield from _tiles_of(source, Region(tuple(dims)), array)


def _from_nowhere(piece: Piece, shape: tuple[int, ...], dtype: str) -> Copy:
    """Return where a piece goes that no file holds, as a copy of all of an array of `shape`."""
    region = whole(shape)
    collapsed = collapse(region, shape, BITS[dtype])
    return Copy("", 0, dtype, shape, region, collapsed, piece.axes, piece.target, "spans", piece.fine)


def _dtype_of(index: CheckpointIndex, source: Expression) -> str:
    return next(iter(dtypes_of(source, lambda key: index.tensors[key].dtype)))


def _check_packed(dtype: str, piece: Piece) -> None:
    moved = piece.fine or (piece.axes and piece.axes[-1] != len(piece.axes) - 1)
    if BITS[dtype] % BITS_PER_BYTE and moved:
        message = f"{dtype} packs several elements into a byte along the last dim, which cannot be moved"
        raise InvalidInputError(message)


def _expand(index: CheckpointIndex, source: Expression) -> Expression:
    """Replace leaves that are stored in several boxes by the boxes."""
    if not any(index.tensors[leaf.key].parts for leaf in leaves(source)):
        return source
    return replace_leaves(source, lambda leaf: _tiles(leaf, index.tensors[leaf.key]))


def _tiles(leaf: Stored, info: TensorInfo) -> Expression:
    if not info.parts:
        return leaf
    tiles = (Tile(part.offsets, Stored(leaf.key, part.shape, at)) for at, part in enumerate(info.parts))
    return reshape(Tiled(info.shape, tuple(tiles)), leaf.shape)


def _locate(index: CheckpointIndex, piece: Piece, source: Stored, seek_bytes: int) -> Copy:
    info = index.tensors[source.key]
    part = info.parts[source.part] if info.parts else info
    _check_packed(info.dtype, piece)
    collapsed = collapse(piece.region, source.shape, BITS[info.dtype])
    return Copy(
        file=part.file,
        start=part.span[0],
        dtype=info.dtype,
        shape=source.shape,
        region=piece.region,
        collapsed=collapsed,
        axes=piece.axes,
        target=piece.target,
        access=choose_access(collapsed, seek_bytes),
        fine=piece.fine,
    )


def _first_byte(plan: TensorPlan, order: Mapping[str, int]) -> tuple[int, int]:
    return min(((order[copy.file], copy.start) for copy in plan.copies), default=(-1, 0))


def _part(copy: Copy, box: tuple[Interval, ...]) -> Copy:
    for dim, (start, stop) in enumerate(box):
        if (start, stop) != (0, copy.region.shape[dim]):
            copy = _narrow(copy, dim, start, stop)
    return copy


def _narrow(copy: Copy, dim: int, start: int, stop: int) -> Copy:
    dims: list[Intervals] = list(copy.region.dims)
    dims[dim] = select(dims[dim], start, stop)
    target = list(copy.target)
    at = copy.axes.index(dim)
    target[at] = (target[at][0] + start, target[at][0] + stop)
    region = Region(tuple(dims))
    collapsed = collapse(region, copy.shape, BITS[copy.dtype])
    return copy._replace(region=region, collapsed=collapsed, target=tuple(target))
