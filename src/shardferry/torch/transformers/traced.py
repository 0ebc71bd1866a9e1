"""Tensors without values that record where each of their elements comes from.

transformers describes how checkpoints become models by code that works on tensors. Run on these, that code moves
nothing: it leaves, for every tensor it makes, the expression of stored tensors that `shardferry.convert` can pull a
region back through. So its operations are not described a second time, and one that is new is followed as well, as long
as it only moves elements. What would change values is refused with the name of torch's operation.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from shardferry.convert.ops import (
    Expression,
    Zeros,
    concatenate,
    dim_of,
    index,
    narrow,
    reshape,
    split,
    stack,
    swap,
    transpose,
)
from shardferry.errors import InvalidInputError
from shardferry.plan.match import FLOATS
from shardferry.torch.dtypes import dtype_name, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_aten = torch.ops.aten


class Traced(torch.Tensor):
    """A tensor that knows how it is made of stored ones.

    Attributes:
        source: How.
        stored_dtype: safetensors name of the dtype its elements are stored in. A cast to another float is left to the
            load, which casts to the parameter's dtype.
    """

    source: Expression
    stored_dtype: str

    def __new__(cls, source: Expression, stored_dtype: str, dtype: torch.dtype | None = None) -> Self:
        """Return a tensor made like `source`, which code sees in `dtype`, its stored one if None."""
        seen = torch_dtype(stored_dtype) if dtype is None else dtype
        device = torch.device("cpu")
        traced = torch.Tensor._make_wrapper_subclass(cls, source.shape, dtype=seen, device=device)  # noqa: SLF001 - torch's way
        traced.source, traced.stored_dtype = source, stored_dtype
        return traced

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch declares it as a variable
        cls,
        func: Any,  # noqa: ANN401 - torch's signature, here and below
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Follow an operation."""
        follow = _FOLLOWED.get(func.overloadpacket)
        if follow is None:
            raise InvalidInputError(f"torch's {func} does more than move elements, so it cannot be done by parts")
        return follow(*args, **(kwargs or {}))


def _like(of: Traced, source: Expression) -> Traced:
    return Traced(source, of.stored_dtype, of.dtype)


def _same(of: Traced, **_: object) -> Traced:
    return _like(of, of.source)


def _cast(of: Traced, *, dtype: torch.dtype | None = None, **_: object) -> Traced:
    wanted = of.dtype if dtype is None else dtype
    if wanted is not of.dtype and not {dtype_name(wanted, "a cast"), of.stored_dtype} <= FLOATS:
        raise InvalidInputError(f"a cast from {of.stored_dtype} to {wanted} changes values")
    return Traced(of.source, of.stored_dtype, wanted)


def _viewed(of: Traced, shape: Sequence[int]) -> Traced:
    return _like(of, reshape(of.source, shape))


def _unsqueezed(of: Traced, dim: int) -> Traced:
    dim %= of.ndim + 1
    return _viewed(of, (*of.shape[:dim], 1, *of.shape[dim:]))


def _squeezed(of: Traced, dims: int | Sequence[int] | None = None) -> Traced:
    chosen = range(of.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {dim_of(of.shape, dim) for dim in chosen}
    return _viewed(of, [size for dim, size in enumerate(of.shape) if size != 1 or dim not in gone])


def _swapped(of: Traced, first: int = 0, second: int = 1) -> Traced:
    return _like(of, swap(of.source, first, second))


def _permuted(of: Traced, dims: Sequence[int]) -> Traced:
    return _like(of, transpose(of.source, [dim_of(of.shape, dim) for dim in dims]))


def _cut(of: Traced, size: int, dim: int = 0) -> list[Traced]:
    whole, size = of.shape[dim], max(size, 1)
    return _cut_by_sizes(of, [min(size, whole - at) for at in range(0, max(whole, 1), size)], dim)


def _cut_by_sizes(of: Traced, sizes: Sequence[int], dim: int = 0) -> list[Traced]:
    return [_like(of, part) for part in split(of.source, dim, sizes)]


def _apart(of: Traced, dim: int = 0) -> list[Traced]:
    return [_selected(of, dim, at) for at in range(of.shape[dim])]


def _selected(of: Traced, dim: int, at: int) -> Traced:
    return _like(of, index(of.source, dim, at % of.shape[dim]))


def _sliced(of: Traced, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Traced:
    indices = range(*slice(start, stop, step).indices(of.shape[dim]))
    if step == 1:
        return _like(of, narrow(of.source, dim, indices.start, max(indices.start, indices.stop)))
    return _gathered(of, indices, dim)


def _indexed(of: Traced, indices: Sequence[torch.Tensor | None]) -> Traced:
    given = [(dim, at) for dim, at in enumerate(indices) if at is not None]
    if len(given) != 1 or given[0][1].ndim != 1 or given[0][1].dtype is torch.bool:
        raise InvalidInputError("an index by several lists, or by a mask, cannot be followed")
    dim, at = given[0]
    return _gathered(of, [place % of.shape[dim] for place in at.tolist()], dim)


def _gathered(of: Traced, indices: Sequence[int], dim: int) -> Traced:
    parts = [narrow(of.source, dim, at, at + 1) for at in indices] or [narrow(of.source, dim, 0, 0)]
    return _like(of, concatenate(parts, dim))


def _joined(put: Callable[[Sequence[Expression], int], Expression], tensors: Sequence[Any], dim: int = 0) -> Traced:
    unknown = next((one for one in tensors if not isinstance(one, Traced)), None)
    if unknown is not None:
        raise InvalidInputError(f"a tensor of shape {list(unknown.shape)} with values of its own cannot be followed")
    return _like(tensors[0], put([one.source for one in tensors], dim))


def _zeros(of: Traced, shape: Sequence[int], **_: object) -> Traced:
    return _like(of, Zeros(tuple(shape)))


_FOLLOWED: dict[object, Callable[..., Any]] = {
    _aten.clone: _same,
    _aten.detach: _same,
    _aten.alias: _same,
    _aten._to_copy: _cast,  # noqa: SLF001 - torch's name for it
    _aten.view: _viewed,
    _aten._unsafe_view: _viewed,  # noqa: SLF001
    _aten.reshape: _viewed,
    _aten.unsqueeze: _unsqueezed,
    _aten.squeeze: _squeezed,
    _aten.transpose: _swapped,
    _aten.t: _swapped,
    _aten.permute: _permuted,
    _aten.split: _cut,
    _aten.split_with_sizes: _cut_by_sizes,
    _aten.unbind: _apart,
    _aten.select: _selected,
    _aten.slice: _sliced,
    _aten.index: _indexed,
    _aten.cat: partial(_joined, concatenate),
    _aten.stack: partial(_joined, stack),
    _aten.new_zeros: _zeros,
}
