"""Steps: the operations of a conversion rule, as data, each with its inverse.

A step takes a row of operands and gives another. An operand is a tensor, or the list of tensors that a numbered field
of a name stands for, such as the experts of a layer, in the order of their numbers. Steps that work on one tensor
work on every operand, and on every tensor of a list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardferry.convert.custom import WholeTensors
from shardferry.convert.ops import (
    Computed,
    chunk,
    concatenate,
    deinterleave,
    dim_of,
    index,
    interleave,
    narrow,
    pad,
    reshape,
    rope,
    split,
    stack,
    swap,
    transpose,
    unrope,
)
from shardferry.convert.quant import MEMBERS, Scheme, dequantize
from shardferry.convert.tensor import Tensor
from shardferry.errors import InvalidInputError
from shardferry.format.dtypes import BITS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from shardferry.convert.ops import Expression


@dataclass(frozen=True, slots=True)
class Stack:
    """Put the tensors of every list together along a new dim, e.g. the experts of a layer."""

    dim: int = 0


@dataclass(frozen=True, slots=True)
class Unstack:
    """Take every tensor apart along a dim, which is gone afterwards; gives lists. The inverse of `Stack`."""

    dim: int = 0


@dataclass(frozen=True, slots=True)
class Concatenate:
    """Join all operands along a dim, in order; lists are flattened.

    Attributes:
        dim: The dim they are joined along.
        sizes: Its size in every operand; wanted to go back if they are not equal.
    """

    dim: int = 0
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Cut one tensor into equal parts along a dim, one for every target of the rule.

    Attributes:
        dim: The dim that is cut.
        uneven: Take a size that does not divide as `torch.chunk` does, the last part shorter, instead of refusing it.
    """

    dim: int = 0
    uneven: bool = False


@dataclass(frozen=True, slots=True)
class Split:
    """Cut one tensor into parts of the given sizes along a dim."""

    dim: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transpose:
    """Swap two dims."""

    first: int = 0
    second: int = 1


@dataclass(frozen=True, slots=True)
class Permute:
    """Reorder the dims: dim i of the result is dim `axes[i]`."""

    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reshape:
    """Give a tensor another shape, its elements in the same row-major order; one size may be -1.

    Attributes:
        shape: The new shape.
        back: The shape to go back to; wanted only for that.
    """

    shape: tuple[int, ...]
    back: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Interleave:
    """Put the even indices of a dim before the odd ones."""

    dim: int = 0


@dataclass(frozen=True, slots=True)
class Deinterleave:
    """Let the indices of the two halves of a dim take turns. The inverse of `Interleave`."""

    dim: int = 0


@dataclass(frozen=True, slots=True)
class Rope:
    """Take the neighbouring pairs of rows of each attention head apart into its two halves.

    Attributes:
        heads: How many heads the rows are of: of keys there may be fewer than of queries.
        dim: The dim of the rows.
    """

    heads: int
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Unrope:
    """Put the two halves of each attention head together as neighbouring pairs. The inverse of `Rope`."""

    heads: int
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Pad:
    """Append zeros along a dim until it has `size` indices.

    Attributes:
        dim: The dim that grows.
        size: Its size afterwards.
        unpadded: Its size before; wanted to go back.
    """

    dim: int
    size: int
    unpadded: int | None = None


@dataclass(frozen=True, slots=True)
class Unpad:
    """Keep the first `size` indices of a dim.

    Attributes:
        dim: The dim that shrinks.
        size: Its size afterwards.
        padded: Its size before; wanted to go back.
    """

    dim: int
    size: int
    padded: int | None = None


@dataclass(frozen=True, slots=True)
class Dequantize:
    """Compute the values of quantized weights from them and their scales; only the blocks that are wanted are read.

    The operands come in groups: a weight and its scales, in the order of the scheme.

    Attributes:
        scheme: `"fp8"` (weight, scale per block), `"mxfp4"` (blocks, scales), or `"nvfp4"` (weight, scale per 16
            values, scale of the tensor).
        block: Rows and columns of a block of `"fp8"`; worked out from the sizes if it is not given.
    """

    scheme: Scheme
    block: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Custom:
    """Compute a tensor with a function of your own, from whole operands: slow, for what no other step can do.

    On a load every rank that wants any of the result reads all of the operands. On a save, where the rule's `back` has
    such a step, one rank gets them and computes the result. Both hold them beside their budget.

    Attributes:
        function: Called with the operands as NumPy arrays, lists flattened; returns the result as one. BF16 and 8-bit
            floats come as their bits. It must give the same on every rank.
        shape: Shape of the result.
        dtype: safetensors name of its dtype.
    """

    function: Callable[[list[NDArray[Any]]], NDArray[Any]]
    shape: tuple[int, ...]
    dtype: str


Step = (
    Stack
    | Unstack
    | Concatenate
    | Chunk
    | Split
    | Transpose
    | Permute
    | Reshape
    | Interleave
    | Deinterleave
    | Rope
    | Unrope
    | Pad
    | Unpad
    | Dequantize
    | Custom
)

Operand = Tensor | list[Tensor]


def apply(step: Step, operands: Sequence[Operand], num_targets: int) -> list[Operand]:  # noqa: PLR0911 - a return for every kind
    """Return the operands after a step.

    Args:
        step: What to do.
        operands: Tensors and lists of them.
        num_targets: How many parts the rule is to end with.

    Raises:
        InvalidInputError: If shapes or dtypes do not allow it.
    """
    if isinstance(step, Stack):
        return [_stacked(operand, step.dim) if isinstance(operand, list) else operand for operand in operands]
    if isinstance(step, Concatenate):
        flat = _flat(operands)
        if step.sizes and step.sizes != tuple(tensor.shape[dim_of(tensor.shape, step.dim)] for tensor in flat):
            shapes = ", ".join(str(list(tensor.shape)) for tensor in flat)
            raise InvalidInputError(f"tensors of {shapes} do not have sizes {list(step.sizes)} in dim {step.dim}")
        return [_joined(flat, step.dim)]
    if isinstance(step, Chunk | Split):
        return _cut(step, operands, num_targets)
    if isinstance(step, Unstack):
        return [_unstack(operand, step.dim) for operand in operands]
    if isinstance(step, Dequantize):
        return _dequantize(step, operands)
    if isinstance(step, Custom):
        return [_custom(step, operands)]
    change = _on_one(step)
    return [[change(one) for one in of] if isinstance(of, list) else change(of) for of in operands]


def inverse(step: Step) -> Step:  # noqa: C901, PLR0911, PLR0912 - a case for every step
    """Return the step that undoes another.

    Raises:
        InvalidInputError: If what it takes to go back is not known.
    """
    match step:
        case Stack(dim):
            return Unstack(dim)
        case Unstack(dim):
            return Stack(dim)
        case Concatenate(dim, sizes):
            return Split(dim, sizes) if sizes else Chunk(dim)
        case Split(dim, sizes):
            return Concatenate(dim, sizes)
        case Chunk(dim, uneven=False):
            return Concatenate(dim)
        case Interleave(dim):
            return Deinterleave(dim)
        case Deinterleave(dim):
            return Interleave(dim)
        case Rope(heads, dim):
            return Unrope(heads, dim)
        case Unrope(heads, dim):
            return Rope(heads, dim)
        case Transpose():
            return step
        case Permute(axes):
            return Permute(tuple(axes.index(dim) for dim in range(len(axes))))
        case Reshape(shape, back) if back:
            return Reshape(back, shape)
        case Pad(dim, size, unpadded) if unpadded is not None:
            return Unpad(dim, unpadded, size)
        case Unpad(dim, size, padded) if padded is not None:
            return Pad(dim, padded, size)
    raise InvalidInputError(f"{step} cannot be undone without knowing more: {_WANTED.get(type(step), _NO_WAY_BACK)}")


_NO_WAY_BACK = "give the rule a way back of its own"
_WANTED: dict[type, str] = {
    Reshape: "give back=, the shape to go back to",
    Pad: "give unpadded=, the size before",
    Unpad: "give padded=, the size before",
}


def _on_one(step: Step) -> Callable[[Tensor], Tensor]:
    """Return what a step does to one tensor."""

    def change(tensor: Tensor) -> Tensor:
        return tensor._replace(source=_converted(step, tensor.source))

    return change


def _converted(step: Step, of: Expression) -> Expression:  # noqa: C901, PLR0911 - a case for every step
    match step:
        case Transpose(first, second):
            return swap(of, first, second)
        case Permute(axes):
            return transpose(of, axes)
        case Reshape(shape, back):
            if back and back != of.shape:
                raise InvalidInputError(f"shape {list(of.shape)} is not {list(back)}, which is to become {list(shape)}")
            return reshape(of, shape)
        case Interleave(dim):
            return interleave(of, dim)
        case Deinterleave(dim):
            return deinterleave(of, dim)
        case Rope(heads, dim):
            return rope(of, heads, dim)
        case Unrope(heads, dim):
            return unrope(of, heads, dim)
        case Pad(dim, size, unpadded):
            _check_size(of, dim, unpadded)
            return pad(of, dim, size)
        case Unpad(dim, size, padded):
            _check_size(of, dim, padded)
            return narrow(of, dim, 0, size)
    raise AssertionError(step)


def _check_size(of: Expression, dim: int, size: int | None) -> None:
    if size is not None and of.shape[dim_of(of.shape, dim)] != size:
        raise InvalidInputError(f"dim {dim} of shape {list(of.shape)} is not {size}")


def _stacked(tensors: Sequence[Tensor], dim: int) -> Tensor:
    _check_alike(tensors, None)
    return tensors[0]._replace(source=stack([tensor.source for tensor in tensors], dim))


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    _check_alike(tensors, dim_of(tensors[0].shape, dim))
    return tensors[0]._replace(source=concatenate([tensor.source for tensor in tensors], dim))


def _check_alike(tensors: Sequence[Tensor], free: int | None) -> None:
    """Raise `InvalidInputError` unless tensors have one dtype and one shape, but for a dim that is free."""
    first, shape = tensors[0], tensors[0].shape
    for tensor in tensors:
        if tensor.dtype != first.dtype:
            raise InvalidInputError(f"{first.name} has dtype {first.dtype}, but {tensor.name} {tensor.dtype}")
        if tensor.shape == shape:
            continue
        same = [a == b or dim == free for dim, (a, b) in enumerate(zip(shape, tensor.shape, strict=False))]
        if len(shape) != len(tensor.shape) or not all(same):
            raise InvalidInputError(
                f"{first.name} has shape {list(shape)}, but {tensor.name} has shape {list(tensor.shape)}"
            )


def _flat(operands: Sequence[Operand]) -> list[Tensor]:
    return [tensor for operand in operands for tensor in (operand if isinstance(operand, list) else [operand])]


def _custom(step: Custom, operands: Sequence[Operand]) -> Tensor:
    tensors = _flat(operands)
    dtypes = tuple(tensor.dtype for tensor in tensors)
    if step.dtype not in BITS or any(BITS[dtype] % 8 for dtype in (*dtypes, step.dtype)):
        raise InvalidInputError(f"{step.dtype} and {', '.join(dtypes)}: a custom function takes and gives whole bytes")
    sources = tuple(tensor.source for tensor in tensors)
    source = Computed(
        WholeTensors(step.function, dtypes, step.shape, step.dtype), sources, dtypes, step.shape, step.dtype
    )
    return Tensor(tensors[0].name, step.dtype, source)


def _cut(step: Chunk | Split, operands: Sequence[Operand], num_targets: int) -> list[Operand]:
    if len(operands) != 1 or isinstance(operands[0], list):
        raise InvalidInputError(f"{step} cuts one tensor, but there are {len(operands)} operands or a list")
    (tensor,) = operands
    assert isinstance(tensor, Tensor)
    if isinstance(step, Split):
        parts = split(tensor.source, step.dim, step.sizes)
    else:
        size = tensor.shape[dim_of(tensor.shape, step.dim)]
        if size % num_targets and not step.uneven:
            raise InvalidInputError(
                f"dim {step.dim} of shape {list(tensor.shape)} has size {size}, which is not divisible into "
                f"{num_targets} equal parts"
            )
        parts = chunk(tensor.source, step.dim, num_targets)
    return [tensor._replace(source=part) for part in parts]


def _unstack(operand: Operand, dim: int) -> list[Tensor]:
    if isinstance(operand, list):
        raise InvalidInputError(f"a list of {len(operand)} tensors cannot be taken apart again")
    size = operand.shape[dim_of(operand.shape, dim)]
    return [operand._replace(source=index(operand.source, dim, at)) for at in range(size)]


def _dequantize(step: Dequantize, operands: Sequence[Operand]) -> list[Operand]:
    count = MEMBERS[step.scheme]
    if len(operands) % count:
        raise InvalidInputError(f"{step} wants groups of {count} tensors, but there are {len(operands)} operands")
    values: list[Operand] = []
    for at in range(0, len(operands), count):
        group = operands[at : at + count]
        lists = [operand for operand in group if isinstance(operand, list)]
        if not lists:
            values.append(dequantize([one for one in group if isinstance(one, Tensor)], step.scheme, step.block))
            continue
        if len(lists) != count or len({len(one) for one in lists}) != 1:
            raise InvalidInputError(f"{step}: not every weight has its scales")
        values.append([dequantize(members, step.scheme, step.block) for members in zip(*lists, strict=True)])
    return values
