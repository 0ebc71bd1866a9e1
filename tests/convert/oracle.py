"""The ordinary way to convert: whole tensors with NumPy, to compare with what is pulled back region by region."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardferry.convert.ops import Picked, Reshaped, Stored, Tiled, Transposed, Zeros

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shardferry.convert.ops import Expression
    from shardferry.convert.pull import Piece
    from shardferry.geometry.region import Region

    Array = NDArray[np.int64]


def gather(array: Array, region: Region) -> Array:
    """Return the elements of a region, dim by dim."""
    for dim, held in enumerate(region.dims):
        array = np.take(array, np.array([i for a, b in held for i in range(a, b)], np.int64), axis=dim)
    return array


def evaluate(expression: Expression, arrays: Mapping[str, Array]) -> Array:
    """Return the whole tensor."""
    if isinstance(expression, Stored):
        return arrays[expression.key].reshape(expression.shape)
    if isinstance(expression, Zeros):
        return np.zeros(expression.shape, np.int64)
    if isinstance(expression, Transposed):
        return evaluate(expression.of, arrays).transpose(expression.axes)
    if isinstance(expression, Reshaped):
        return evaluate(expression.of, arrays).reshape(expression.shape)
    if isinstance(expression, Picked):
        return gather(evaluate(expression.of, arrays), expression.region)
    assert isinstance(expression, Tiled)
    whole = np.full(expression.shape, -1, np.int64)
    for offsets, part in expression.tiles:
        values = evaluate(part, arrays)
        whole[tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))] = values
    return whole


def place(piece: Piece, shape: tuple[int, ...]) -> Array:
    """Return, by what a piece's docstring says, the flat position in the local tensor of each of its elements."""
    strides = [int(np.prod(shape[dim + 1 :], dtype=np.int64)) for dim in range(len(shape))]
    fine = piece.fine or tuple((dim, 1) for dim in range(len(shape)))
    at = np.zeros((), np.int64)
    for (start, stop), (dim, step) in zip(piece.target, fine, strict=True):
        at = at[..., None] + np.arange(start, stop) * (step * strides[dim] if dim >= 0 else 0)
    return at


def fill(out: Array, piece: Piece, arrays: Mapping[str, Array]) -> None:
    """Copy a piece into the local tensor, which must not have been filled there."""
    assert isinstance(piece.source, Stored | Zeros)
    if isinstance(piece.source, Stored):
        values = gather(arrays[piece.source.key].reshape(piece.source.shape), piece.region)
    else:
        values = np.zeros(piece.region.shape, np.int64)
    flat = out.reshape(-1)
    at = place(piece, out.shape)
    assert (flat[at] == -1).all(), "no element is filled twice"
    assert len(np.unique(at)) == at.size
    flat[at] = values.transpose(piece.axes).reshape(at.shape)
