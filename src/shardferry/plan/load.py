"""Plan a load: from what a rank wants and where it is stored to the copies that bring it in.

Pure: integers in, a frozen plan out. The plan names bytes of files and places in local tensors; it does not know
what memory those are. Tensors are planned in file order, so that executing it streams through the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardferry.convert.ops import Expression, Piece, Stored, Tile, Tiled, Transposed, pull_back
from shardferry.errors import InvalidInputError, ShardingError
from shardferry.format.dtypes import BITS
from shardferry.geometry.region import Interval, Intervals, Region, select
from shardferry.geometry.spans import BITS_PER_BYTE, Collapsed, collapse
from shardferry.plan.cost import Access, choose_access
from shardferry.plan.costmodel import PRESETS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardferry.format.index import CheckpointIndex, TensorInfo


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
        shape: Shape of the stored tensor (or box), in elements.
        region: Region of it to read.
        collapsed: That region over as few dims as possible, in bytes.
        axes: The region's array is reordered by these axes: dim i of the target is dim `axes[i]`.
        target: Per dim of the local tensor the half-open range filled.
        access: How to read it.
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
        """Whether the region arrives in the target's own order."""
        return self.axes == tuple(range(len(self.axes)))


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The copies that fill one local tensor; none for a tensor of which the rank holds no element."""

    name: str
    local_shape: tuple[int, ...]
    copies: tuple[Copy, ...]


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
    return LoadPlan(tensors, sum(copy.num_bytes for plan in tensors for copy in plan.copies), seek_bytes)


def split_copy(copy: Copy, max_bytes: int) -> Iterator[Copy]:
    """Return copies of at most `max_bytes` that together do what `copy` does.

    The innermost dim is cut at multiples of 4 elements only: less than their bytes is not kept to.
    """
    if copy.num_bytes <= max_bytes:
        return iter((copy,))
    return _split(copy, max_bytes, 0)


def _plan_tensor(index: CheckpointIndex, want: Wanted, seek_bytes: int) -> TensorPlan:
    try:
        copies = tuple(
            _locate(index, piece, seek_bytes) for piece in pull_back(_expand(index, want.source), want.region)
        )
    except InvalidInputError as error:
        message = f"{want.name}: {error}"
        raise ShardingError(message) from error
    return TensorPlan(want.name, want.region.shape, copies)


def _check_axes(dtype: str, axes: tuple[int, ...]) -> None:
    if BITS[dtype] % BITS_PER_BYTE and axes and axes[-1] != len(axes) - 1:
        message = f"{dtype} packs several elements into a byte along the last dim, which cannot be moved"
        raise InvalidInputError(message)


def _expand(index: CheckpointIndex, source: Expression) -> Expression:
    """Replace leaves that are stored in several boxes by the boxes."""
    if isinstance(source, Stored):
        return _tiles(source, index.tensors[source.key])
    if isinstance(source, Transposed):
        return Transposed(_expand(index, source.of), source.axes)
    return Tiled(source.shape, tuple(Tile(tile.offsets, _expand(index, tile.part)) for tile in source.tiles))


def _tiles(leaf: Stored, info: TensorInfo) -> Expression:
    if not info.parts:
        return leaf
    tiles = (Tile(part.offsets, Stored(leaf.key, part.shape, at)) for at, part in enumerate(info.parts))
    return Tiled(leaf.shape, tuple(tiles))


def _locate(index: CheckpointIndex, piece: Piece, seek_bytes: int) -> Copy:
    info = index.tensors[piece.source.key]
    part = info.parts[piece.source.part] if info.parts else info
    _check_axes(info.dtype, piece.axes)
    collapsed = collapse(piece.region, part.shape, BITS[info.dtype])
    access = choose_access(collapsed, seek_bytes)
    return Copy(
        part.file, part.span[0], info.dtype, part.shape, piece.region, collapsed, piece.axes, piece.target, access
    )


def _first_byte(plan: TensorPlan, order: Mapping[str, int]) -> tuple[int, int]:
    return min(((order[copy.file], copy.start) for copy in plan.copies), default=(-1, 0))


def _split(copy: Copy, max_bytes: int, dim: int) -> Iterator[Copy]:
    if copy.num_bytes <= max_bytes or dim == len(copy.shape):
        yield copy
        return
    size = copy.region.shape[dim]
    step = max(1, size * max_bytes // copy.num_bytes)
    if dim == len(copy.shape) - 1:
        step = max(1, step // _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS
    for start in range(0, size, step):
        yield from _split(_narrow(copy, dim, start, min(size, start + step)), max_bytes, dim + 1)


# Sub-byte dtypes start and end on a byte only at multiples of 2 (F4) and 4 (F6) elements.
_ALIGNED_ELEMENTS = 4


def _narrow(copy: Copy, dim: int, start: int, stop: int) -> Copy:
    dims: list[Intervals] = list(copy.region.dims)
    dims[dim] = select(dims[dim], start, stop)
    target = list(copy.target)
    at = copy.axes.index(dim)
    target[at] = (target[at][0] + start, target[at][0] + stop)
    region = Region(tuple(dims))
    collapsed = collapse(region, copy.shape, BITS[copy.dtype])
    return copy._replace(region=region, collapsed=collapsed, target=tuple(target))
