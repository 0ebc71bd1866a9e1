"""Conversions as index maps: how a tensor a model wants is made of tensors that are stored.

An expression is a small tree of six kinds of node that only move elements: `Stored` leaves, `Zeros`, `Transposed`,
`Reshaped`, `Picked` (a region of another tensor) and `Tiled` (parts placed at offsets). The operations of model
conversions, from stacking experts to the halves of a rotary embedding, are functions that put such trees together;
all check shapes when they are called, before anything is read. A seventh node, `Computed`, changes values.

`shardferry.convert.pull` pulls a region of the target back to regions of the leaves. Cutting the stored tensors with
the target's placements and converting afterwards would be silently wrong whenever an operation touches the cut dim.

Nothing here knows files or frameworks; a leaf's key is opaque.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from shardferry.errors import InvalidInputError
from shardferry.geometry.region import Region, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from shardferry.convert.values import Values
    from shardferry.geometry.region import Intervals


class Stored(NamedTuple):
    """A tensor, or a box of one, as it lies in storage.

    Attributes:
        key: What storage calls the tensor.
        shape: The shape it is looked at with: its own, or another with as many elements.
        part: Which box, for a tensor stored in several; 0 for a whole tensor.
    """

    key: str
    shape: tuple[int, ...]
    part: int = 0


@dataclass(frozen=True, slots=True)
class Zeros:
    """A tensor of zeros, which comes from nowhere."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transposed:
    """Another tensor with its dims reordered: dim i of this is dim `axes[i]` of `of`."""

    of: Expression
    axes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape after reordering."""
        return tuple(self.of.shape[axis] for axis in self.axes)


@dataclass(frozen=True, slots=True)
class Reshaped:
    """Another tensor's elements in the same row-major order, with another shape."""

    of: Expression
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Picked:
    """A region of another tensor, gathered in ascending order."""

    of: Expression
    region: Region

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the region."""
        return self.region.shape


class Tile(NamedTuple):
    """A part and where its first element lies in the whole."""

    offsets: tuple[int, ...]
    part: Expression


@dataclass(frozen=True, slots=True)
class Tiled:
    """A tensor put together from parts that cover it without overlap."""

    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]


class Function(Protocol):
    """Values computed from other tensors, region by region."""

    @property
    def name(self) -> str:
        """What errors and reports call it."""
        ...

    @property
    def whole(self) -> bool:
        """Whether any part of the result takes all of the operands, so that it is computed at once."""
        ...

    def needs(self, shapes: Sequence[tuple[int, ...]], region: Region) -> tuple[Region, ...]:
        """Return the region of every operand that a region of the result is computed from."""
        ...

    def compute(
        self, operands: Sequence[NDArray[np.generic]], shapes: Sequence[tuple[int, ...]], region: Region
    ) -> Values:
        """Return the values of the result's region, made of the operands' regions that `needs` names."""
        ...


@dataclass(frozen=True, slots=True)
class Computed:
    """A tensor whose values are computed from others.

    Attributes:
        function: What computes it; compares equal to another that computes the same.
        operands: What it is computed from.
        dtypes: The operands' dtypes, as safetensors names.
        shape: Shape of the result.
        dtype: The result's dtype, as a safetensors name.
    """

    function: Function
    operands: tuple[Expression, ...]
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


Expression = Stored | Zeros | Transposed | Reshaped | Picked | Tiled | Computed


def leaves(expression: Expression) -> list[Stored]:
    """Return the stored tensors an expression is made of, in order."""
    if isinstance(expression, Stored):
        return [expression]
    if isinstance(expression, Transposed | Reshaped | Picked):
        return leaves(expression.of)
    if isinstance(expression, Tiled):
        return [leaf for tile in expression.tiles for leaf in leaves(tile.part)]
    if isinstance(expression, Computed):
        return [leaf for operand in expression.operands for leaf in leaves(operand)]
    return []


def dtypes_of(expression: Expression, dtype_of: Callable[[str], str]) -> set[str]:
    """Return the dtypes of the elements an expression puts together, given those of stored tensors by key."""
    if isinstance(expression, Stored):
        return {dtype_of(expression.key)}
    if isinstance(expression, Computed):
        return {expression.dtype}
    if isinstance(expression, Tiled):
        return {dtype for tile in expression.tiles for dtype in dtypes_of(tile.part, dtype_of)}
    return set() if isinstance(expression, Zeros) else dtypes_of(expression.of, dtype_of)


def replace_leaves(expression: Expression, replacement: Callable[[Stored], Expression]) -> Expression:
    """Return an expression with every stored tensor replaced by another expression of the same shape."""
    if isinstance(expression, Stored):
        return replacement(expression)
    return _with_parts(expression, lambda part: replace_leaves(part, replacement))


def replace_computed(expression: Expression, replacement: Callable[[Computed], Expression]) -> Expression:
    """Return an expression with every computed tensor that is not an operand of another one replaced."""
    if isinstance(expression, Computed):
        return replacement(expression)
    return _with_parts(expression, lambda part: replace_computed(part, replacement))


def transpose(of: Expression, axes: Sequence[int]) -> Expression:
    """Return `of` with its dims reordered: dim i of the result is dim `axes[i]`.

    Raises:
        InvalidInputError: If `axes` is not a permutation of its dims.
    """
    if sorted(axes) != list(range(len(of.shape))):
        message = f"axes {tuple(axes)} do not reorder the dims of shape {of.shape}"
        raise InvalidInputError(message)
    return Transposed(of, tuple(axes))


def swap(of: Expression, first: int, second: int) -> Expression:
    """Return `of` with two dims swapped."""
    axes = list(range(len(of.shape)))
    first, second = dim_of(of.shape, first), dim_of(of.shape, second)
    axes[first], axes[second] = second, first
    return transpose(of, axes)


def reshape(of: Expression, shape: Sequence[int]) -> Expression:
    """Return `of` with another shape, its elements in the same row-major order; one size may be -1.

    Raises:
        InvalidInputError: If the shape has another number of elements.
    """
    shape, count = list(shape), math.prod(of.shape)
    if shape.count(-1) == 1:
        known = -math.prod(shape)
        shape[shape.index(-1)] = count // known if known else 0
    if min(shape, default=0) < 0 or math.prod(shape) != count:
        message = f"shape {of.shape} has {count} elements and cannot become {tuple(shape)}"
        raise InvalidInputError(message)
    return _reshaped(of, tuple(shape))


def concatenate(parts: Sequence[Expression], dim: int) -> Expression:
    """Return the parts joined along `dim`, in order.

    Raises:
        InvalidInputError: If there is no part, or the parts differ in another dim.
    """
    if not parts:
        message = "a concatenation needs at least one part"
        raise InvalidInputError(message)
    first = parts[0].shape
    if not -len(first) <= dim < len(first):
        message = f"tensors of shape {first} have no dim {dim} to join along"
        raise InvalidInputError(message)
    dim = dim_of(first, dim)
    tiles: list[Tile] = []
    size = 0
    before, behind = (0,) * dim, (0,) * (len(first) - dim - 1)
    for part in parts:
        if part.shape != first and _without(part.shape, dim) != _without(first, dim):
            message = f"parts of shape {first} and {part.shape} cannot be joined along dim {dim}"
            raise InvalidInputError(message)
        tiles.append(Tile((*before, size, *behind), part))
        size += part.shape[dim]
    return Tiled((*first[:dim], size, *first[dim + 1 :]), tuple(tiles))


def stack(parts: Sequence[Expression], dim: int) -> Expression:
    """Return parts of one shape as one tensor with a new dim in front of dim `dim`.

    Raises:
        InvalidInputError: If there is no part, or shapes differ.
    """
    for part in parts:
        if part.shape != parts[0].shape:
            message = f"parts of shape {parts[0].shape} and {part.shape} cannot be stacked"
            raise InvalidInputError(message)
    rank = len(parts[0].shape) + 1 if parts else 1
    dim = dim + rank if dim < 0 else dim
    return concatenate([_reshaped(part, (*part.shape[:dim], 1, *part.shape[dim:])) for part in parts], dim)


def narrow(of: Expression, dim: int, start: int, stop: int) -> Expression:
    """Return indices [start, stop) of a dim.

    Raises:
        InvalidInputError: If they do not lie within it.
    """
    dim = dim_of(of.shape, dim)
    if not 0 <= start <= stop <= of.shape[dim]:
        message = f"dim {dim} of shape {of.shape} has no indices {start} to {stop}"
        raise InvalidInputError(message)
    dims: list[Intervals] = list(whole(of.shape).dims)
    dims[dim] = ((start, stop),) if start < stop else ()
    return Picked(of, Region(tuple(dims))) if (start, stop) != (0, of.shape[dim]) else of


def split(of: Expression, dim: int, sizes: Sequence[int]) -> list[Expression]:
    """Return consecutive parts of the given sizes along `dim`.

    Raises:
        InvalidInputError: If the sizes do not add up to the dim's.
    """
    dim = dim_of(of.shape, dim)
    if sum(sizes) != of.shape[dim] or min(sizes, default=0) < 0:
        message = f"dim {dim} of shape {of.shape} cannot be split into sizes {list(sizes)}"
        raise InvalidInputError(message)
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    return [narrow(of, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def chunk(of: Expression, dim: int, parts: int) -> list[Expression]:
    """Return `parts` consecutive parts along `dim`, as equal as `torch.chunk` makes them: the last may be shorter."""
    dim = dim_of(of.shape, dim)
    size = of.shape[dim]
    step = -(-size // parts)
    return [narrow(of, dim, min(size, at * step), min(size, (at + 1) * step)) for at in range(parts)]


def index(of: Expression, dim: int, at: int) -> Expression:
    """Return one index of a dim, which is gone afterwards."""
    dim = dim_of(of.shape, dim)
    return _reshaped(narrow(of, dim, at, at + 1), _without(of.shape, dim))


def interleave(of: Expression, dim: int) -> Expression:
    """Return the even indices of a dim followed by the odd ones.

    Raises:
        InvalidInputError: If the dim's size is odd.
    """
    return _swapped_factors(of, dim, 1, (-1, 2))


def deinterleave(of: Expression, dim: int) -> Expression:
    """Return the two halves of a dim with their indices taking turns: the inverse of `interleave`."""
    return _swapped_factors(of, dim, 1, (2, -1))


def rope(of: Expression, heads: int, dim: int = 0) -> Expression:
    """Return the rows of each head with pairs taken apart: rows 2p and 2p + 1 become rows p and D/2 + p of D.

    What models whose rotary embedding works on halves want of weights made for neighbouring pairs.

    Raises:
        InvalidInputError: If the dim is no whole number of heads with an even number of rows.
    """
    return _swapped_factors(of, dim, heads, (-1, 2))


def unrope(of: Expression, heads: int, dim: int = 0) -> Expression:
    """Return the inverse of `rope`."""
    return _swapped_factors(of, dim, heads, (2, -1))


def pad(of: Expression, dim: int, size: int) -> Expression:
    """Return `of` with zeros appended along `dim` until it has `size` indices.

    Raises:
        InvalidInputError: If it has more.
    """
    dim = dim_of(of.shape, dim)
    if size < of.shape[dim]:
        message = f"dim {dim} of shape {of.shape} cannot be padded to {size}, it is larger"
        raise InvalidInputError(message)
    zeros = Zeros((*of.shape[:dim], size - of.shape[dim], *of.shape[dim + 1 :]))
    return concatenate([of, zeros], dim) if size > of.shape[dim] else of


def dim_of(shape: Sequence[int], dim: int) -> int:
    """Return a dim counted from the front.

    Raises:
        InvalidInputError: If a tensor of `shape` has no such dim.
    """
    if not -len(shape) <= dim < len(shape):
        message = f"a tensor of shape {tuple(shape)} has no dim {dim}"
        raise InvalidInputError(message)
    return dim % len(shape)


def _reshaped(of: Expression, shape: tuple[int, ...]) -> Expression:
    if shape == of.shape:
        return of
    if isinstance(of, Stored):
        return Stored(of.key, shape, of.part)  # a file keeps no shape: any view of it is as good
    if isinstance(of, Zeros):
        return Zeros(shape)
    return _reshaped(of.of, shape) if isinstance(of, Reshaped) else Reshaped(of, shape)


def _swapped_factors(of: Expression, dim: int, groups: int, factors: tuple[int, int]) -> Expression:
    """Swap two factors of a dim inside each of `groups` equal runs of it; one of the factors is 2, the other -1."""
    dim = dim_of(of.shape, dim)
    before, size, after = of.shape[:dim], of.shape[dim], of.shape[dim + 1 :]
    if groups < 1 or size % (2 * groups):
        what = f"{groups} heads of an even number of rows" if groups > 1 else "two equal halves"
        message = f"dim {dim} of shape {of.shape} is not {what}: {size} is not divisible by {2 * groups}"
        raise InvalidInputError(message)
    half = size // (2 * groups)
    fine = (*before, groups, *(half if factor == -1 else factor for factor in factors), *after)
    return _reshaped(swap(_reshaped(of, fine), dim + 1, dim + 2), of.shape)


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _with_parts(expression: Expression, change: Callable[[Expression], Expression]) -> Expression:
    """Return an expression with each of those it is directly made of changed; itself if none is."""
    if isinstance(expression, Transposed | Reshaped | Picked):
        of = change(expression.of)
        return expression if of is expression.of else replace(expression, of=of)
    if isinstance(expression, Tiled):
        tiles = tuple(Tile(offsets, change(part)) for offsets, part in expression.tiles)
        same = all(new.part is old.part for new, old in zip(tiles, expression.tiles, strict=True))
        return expression if same else replace(expression, tiles=tiles)
    if isinstance(expression, Computed):
        return replace(expression, operands=tuple(map(change, expression.operands)))
    return expression
