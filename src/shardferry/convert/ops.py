"""Conversions as index maps: from a region of the tensor a model wants to regions of the tensors that are stored.

An expression says how a target tensor is made of stored ones: `Stored` leaves, `Transposed`, and `Tiled`, which
places parts at offsets (a concatenation, or a tensor stored in boxes). A rank asks for a region of the *target*;
`pull_back` pushes it down to the leaves. Cutting the stored tensors with the target's placements and converting
afterwards would be silently wrong whenever the operation touches the cut dim.

Nothing here knows files or frameworks; a leaf's key is opaque.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardferry.errors import InvalidInputError
from shardferry.geometry.region import Interval, Region, overlap, shift

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor, or a box of one, as it lies in storage.

    Attributes:
        key: What storage calls the tensor.
        shape: Shape of the tensor, or of the box.
        part: Which box, for a tensor stored in several; 0 for a whole tensor.
    """

    key: str
    shape: tuple[int, ...]
    part: int = 0


@dataclass(frozen=True, slots=True)
class Transposed:
    """Another tensor with its dims reordered: dim i of this is dim `axes[i]` of `of`."""

    of: Expression
    axes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape after reordering."""
        return tuple(self.of.shape[axis] for axis in self.axes)


class Tile(NamedTuple):
    """A part and where its first element lies in the whole."""

    offsets: tuple[int, ...]
    part: Expression


@dataclass(frozen=True, slots=True)
class Tiled:
    """A tensor put together from parts that cover it without overlap."""

    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]


Expression = Stored | Transposed | Tiled


class Piece(NamedTuple):
    """One copy: a region of a stored tensor, and where it goes in the local tensor of the target region.

    Attributes:
        source: The stored tensor, or box of one.
        region: Region of it.
        axes: The gathered region is reordered by these axes: dim i of the target is dim `axes[i]` of the region.
        target: Per target dim the half-open range of *local* positions the piece fills.
    """

    source: Stored
    region: Region
    axes: tuple[int, ...]
    target: tuple[Interval, ...]


def transpose(of: Expression, axes: Sequence[int]) -> Transposed:
    """Return `of` with its dims reordered.

    Raises:
        InvalidInputError: If `axes` is not a permutation of its dims.
    """
    if sorted(axes) != list(range(len(of.shape))):
        message = f"axes {tuple(axes)} do not reorder the dims of shape {of.shape}"
        raise InvalidInputError(message)
    return Transposed(of, tuple(axes))


def concatenate(parts: Sequence[Expression], dim: int) -> Tiled:
    """Return the parts joined along `dim`, in order.

    Raises:
        InvalidInputError: If there is no part, or the parts differ in another dim.
    """
    if not parts:
        message = "a concatenation needs at least one part"
        raise InvalidInputError(message)
    first = parts[0].shape
    if not 0 <= dim < len(first):
        message = f"tensors of shape {first} have no dim {dim} to join along"
        raise InvalidInputError(message)
    tiles: list[Tile] = []
    size = 0
    for part in parts:
        if _without(part.shape, dim) != _without(first, dim):
            message = f"parts of shape {first} and {part.shape} cannot be joined along dim {dim}"
            raise InvalidInputError(message)
        tiles.append(Tile(tuple(size if d == dim else 0 for d in range(len(first))), part))
        size += part.shape[dim]
    return Tiled((*first[:dim], size, *first[dim + 1 :]), tuple(tiles))


def pull_back(expression: Expression, region: Region) -> Iterator[Piece]:
    """Yield the copies that fill the local tensor of `region` of the expression's tensor.

    Together the pieces fill every local element once, if the tiles cover their whole; empty pieces are left out.

    Args:
        expression: How the target is made.
        region: Region of the target, within its shape.
    """
    shape = region.shape
    if 0 in shape:
        return
    yield from _pull(expression, region, tuple((0, size) for size in shape))


def leaves(expression: Expression) -> Iterator[Stored]:
    """Yield the stored tensors an expression is made of."""
    if isinstance(expression, Stored):
        yield expression
    elif isinstance(expression, Transposed):
        yield from leaves(expression.of)
    else:
        for tile in expression.tiles:
            yield from leaves(tile.part)


def _pull(expression: Expression, region: Region, target: tuple[Interval, ...]) -> Iterator[Piece]:
    if isinstance(expression, Stored):
        yield Piece(expression, region, tuple(range(len(region.dims))), target)
    elif isinstance(expression, Transposed):
        yield from _pull_transposed(expression, region, target)
    else:
        for tile in expression.tiles:
            yield from _pull_tile(tile, region, target)


def _pull_transposed(node: Transposed, region: Region, target: tuple[Interval, ...]) -> Iterator[Piece]:
    inverse = tuple(node.axes.index(axis) for axis in range(len(node.axes)))
    below = Region(tuple(region.dims[dim] for dim in inverse))
    for source, stored, axes, place in _pull(node.of, below, tuple(target[dim] for dim in inverse)):
        yield Piece(
            source,
            stored,
            tuple(axes[axis] for axis in node.axes),
            tuple(place[axis] for axis in node.axes),
        )


def _pull_tile(tile: Tile, region: Region, target: tuple[Interval, ...]) -> Iterator[Piece]:
    dims, place = [], []
    for intervals, offset, size, (start, _) in zip(region.dims, tile.offsets, tile.part.shape, target, strict=True):
        inside, (first, last) = overlap(intervals, offset, offset + size)
        if first == last:
            return
        dims.append(shift(inside, -offset))
        place.append((start + first, start + last))
    yield from _pull(tile.part, Region(tuple(dims)), tuple(place))


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])
