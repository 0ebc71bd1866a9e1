"""Values of block-quantized weights, computed block by block: any region of a weight from its codes and scales.

The arithmetic is that of the formats' own reference implementations, in float32, so that results agree bit for bit:
a code's value times its scale. What is not an 8-bit or 16-bit float of NumPy is kept as its bits. The result is F32;
a target of another float dtype casts it, to nearest, ties to even.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardferry.convert.ops import Computed
from shardferry.convert.tensor import Tensor
from shardferry.errors import InvalidInputError
from shardferry.geometry.region import Region
from shardferry.units import KIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardferry.geometry.region import Interval, Intervals

    Floats = NDArray[np.float32]

Scheme = Literal["fp8", "mxfp4", "nvfp4"]

# The values of the 4-bit float E2M1 (OCP Microscaling Formats 1.0, 5.3.3): bit 3 is the sign.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Codes that share a scale, in MXFP4 (the same specification, 5.2) and in NVFP4.
MXFP4_GROUP = 32
NVFP4_GROUP = 16
# How many tensors belong together, by scheme.
MEMBERS = {"fp8": 2, "mxfp4": 2, "nvfp4": 3}
# Of an F8_E4M3 code moved 20 bits to the left: its sign, which fills all bits above, once, and the rest of it.
_E4M3_BITS = np.int32(-(1 << 31) | 0x7F << 20)
_E4M3_TO_F32 = np.float32(2.0**120)
_TINY = np.float32(2.0**-140)
# A scale of which 2**120 times as much still is an F32.
_MOST_AT_ONCE = 128.0
# Decoded and scaled at a time: their F32 values stay in a core's cache.
CACHED_ELEMENTS = 96 * KIB
ROWS_AT_ONCE = 8
_SCALE_DTYPES = frozenset({"F32", "BF16", "F16", "F8_E8M0", "U8"})


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """FP8 weights with a scale per block of rows and columns: value times scale.

    Attributes:
        block: Rows and columns of a block; at the far edges blocks may be smaller.
        dtypes: Of weight and scales.
    """

    block: tuple[int, int]
    dtypes: tuple[str, str]
    name: str = "fp8"
    whole: bool = False

    def needs(self, shapes: Sequence[tuple[int, ...]], region: Region) -> tuple[Region, ...]:  # noqa: ARG002 - a Function
        """Return the same region of the weight, and the scales of every block it touches."""
        rows, columns = (_blocks(held, size) for held, size in zip(region.dims[-2:], self.block, strict=True))
        return region, Region((*region.dims[:-2], rows, columns))

    def compute(
        self, operands: Sequence[NDArray[np.generic]], shapes: Sequence[tuple[int, ...]], region: Region
    ) -> NDArray[np.generic]:
        """Return the values of a region."""
        weight, scales = operands
        needed = self.needs(shapes, region)[1]
        rows, columns = (
            _positions(held, blocks, size)
            for held, blocks, size in zip(region.dims[-2:], needed.dims[-2:], self.block, strict=True)
        )
        factors = np.take(to_floats(scales, self.dtypes[1]), columns, axis=-1)
        codes, values = weight.view(np.uint8), np.empty(weight.shape, np.float32)
        # One product instead of two, and the same numbers, as long as what is multiplied by is one of F32's.
        at_once = _has_subnormals() and bool((np.abs(factors) <= _MOST_AT_ONCE).all())
        decode, factors = (_move_e4m3, factors * _E4M3_TO_F32) if at_once else (_decode_e4m3, factors)
        ends = [0, *(np.flatnonzero(np.diff(rows)) + 1).tolist(), len(rows)]
        for first, last in pairwise(ends):
            num_parts = max(1, round(values[..., first:last, :].size / CACHED_ELEMENTS))
            step = max(1, -(-(last - first) // num_parts))
            for start in range(first, last, step):
                held = (..., slice(start, min(start + step, last)), slice(None))
                decode(codes[held], values[held])
                _scale(values[held], factors[..., rows[first], :])
        if at_once:
            _mark_no_numbers(codes, values)
        return values


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Two 4-bit codes per byte, [..., groups, 16], and the exponents of their scales, [..., groups]."""

    name: str = "mxfp4"
    whole: bool = False

    def needs(self, shapes: Sequence[tuple[int, ...]], region: Region) -> tuple[Region, ...]:
        """Return the groups of which an element is wanted: their bytes and their scales."""
        groups = _blocks(region.dims[-1], MXFP4_GROUP)
        scales = Region((*region.dims[:-1], groups))
        return Region((*scales.dims, ((0, shapes[0][-1]),))), scales

    def compute(
        self, operands: Sequence[NDArray[np.generic]], shapes: Sequence[tuple[int, ...]], region: Region
    ) -> NDArray[np.generic]:
        """Return the values of a region."""
        blocks, exponents = operands
        values = _codes(blocks.reshape(*blocks.shape[:-2], -1)).reshape(*exponents.shape, MXFP4_GROUP)
        values *= to_floats(exponents, "U8")[..., None]
        groups = self.needs(shapes, region)[1].dims[-1]
        return _inside(values.reshape(*exponents.shape[:-1], -1), region.dims[-1], groups, MXFP4_GROUP)


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """Two 4-bit codes per byte, an FP8 scale for every 16 codes, and one scale for all: code * (scale * scale)."""

    name: str = "nvfp4"
    whole: bool = False

    def needs(self, shapes: Sequence[tuple[int, ...]], region: Region) -> tuple[Region, ...]:
        """Return the bytes and the scales of every group of which an element is wanted, and the scale of all."""
        groups = _blocks(region.dims[-1], NVFP4_GROUP)
        codes = _scaled(groups, NVFP4_GROUP // 2)
        everything: tuple[Intervals, ...] = tuple(((0, size),) for size in shapes[2])
        return Region((*region.dims[:-1], codes)), Region((*region.dims[:-1], groups)), Region(everything)

    def compute(
        self, operands: Sequence[NDArray[np.generic]], shapes: Sequence[tuple[int, ...]], region: Region
    ) -> NDArray[np.generic]:
        """Return the values of a region."""
        codes, scales, scale = operands
        factors = to_floats(scales, "F8_E4M3") * to_floats(scale, "F32").reshape(())
        values = _codes(codes).reshape(*scales.shape, NVFP4_GROUP)
        values *= factors[..., None]
        groups = self.needs(shapes, region)[1].dims[-1]
        return _inside(values.reshape(*scales.shape[:-1], -1), region.dims[-1], groups, NVFP4_GROUP)


def dequantize(members: Sequence[Tensor], scheme: Scheme, block: tuple[int, int] | None) -> Tensor:
    """Return the values of a quantized weight as an F32 tensor.

    Args:
        members: The weight and its scales, in the order of the scheme.
        scheme: How they are stored.
        block: Rows and columns of a block of `"fp8"`; worked out if None and the sizes leave one possibility.

    Raises:
        InvalidInputError: If shapes or dtypes are not those of the scheme.
    """
    if scheme not in MEMBERS or len(members) != MEMBERS[scheme]:
        message = f"dequantizing {scheme!r} wants {MEMBERS.get(scheme, 'a scheme of')} tensors, not {len(members)}"
        raise InvalidInputError(message)
    if scheme == "fp8":
        return _computed(_block_scaled(members, block), members, members[0].shape)
    _check_nibbles(members, scheme)
    if scheme == "mxfp4":
        *rows, groups, size = members[0].shape
        return _computed(Mxfp4(), members, (*rows, groups * size * 2))
    *rows, size = members[0].shape
    return _computed(Nvfp4(), members, (*rows, size * 2))


def to_floats(array: NDArray[np.generic], dtype: str) -> Floats:
    """Return float32 values of an array that holds a dtype, or the bits of one NumPy does not know.

    Args:
        array: Values of `"F32"` or `"F16"`, or bits as unsigned integers of the dtype's width.
        dtype: safetensors name; `"U8"` and `"F8_E8M0"` are exponents of two, biased by 127.
    """
    if dtype == "F32":
        return array.view(np.float32)
    if dtype == "F16":
        return array.view(np.float16).astype(np.float32)
    if dtype == "BF16":
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E4M3":
        values = np.empty(array.shape, np.float32)
        _decode_e4m3(array.view(np.uint8), values)
        return values
    return np.asarray(_e8m0()[array.view(np.uint8)])


def _scale(values: Floats, factors: Floats) -> None:
    """Multiply every row of a table, or of several tables, in place by the factors of its table.

    Several rows at a time, as NumPy is up to twice as fast with long ones.
    """
    *outer, rows, columns = values.shape
    many = rows // ROWS_AT_ONCE * ROWS_AT_ONCE
    if many:
        # A view: rows that follow each other lie together.
        long = values[..., :many, :].reshape(*outer, many // ROWS_AT_ONCE, ROWS_AT_ONCE * columns)
        np.multiply(long, np.concatenate([factors] * ROWS_AT_ONCE, axis=-1)[..., None, :], out=long)
    rest = values[..., many:, :]
    np.multiply(rest, factors[..., None, :], out=rest)


def _decode_e4m3(codes: NDArray[np.uint8], values: Floats) -> None:
    """Put the values of F8_E4M3 codes into `values`, three times as fast as a table tells them."""
    if not _has_subnormals():
        values[...] = _e4m3()[codes]
        return
    _move_e4m3(codes, values)
    values *= _E4M3_TO_F32
    _mark_no_numbers(codes, values)


def _move_e4m3(codes: NDArray[np.uint8], values: Floats) -> None:
    """Put the bits of F8_E4M3 codes where an F32 has its sign, exponent and mantissa.

    The biases being 127 and 7, that is 2**-120 of their values; no number (NaN) becomes 2**-120 of 480.
    """
    bits = values.view(np.int32)
    bits[...] = codes.view(np.int8)
    bits <<= 20
    bits &= _E4M3_BITS


def _mark_no_numbers(codes: NDArray[np.uint8], values: Floats) -> None:
    if (codes & 0x7F).max(initial=0) == 0x7F:  # noqa: PLR2004 - the mask and the code of the format
        values[codes & 0x7F == 0x7F] = np.nan  # noqa: PLR2004


def _has_subnormals() -> bool:
    """Return whether this thread computes with subnormal numbers: torch can tell one to take them for 0."""
    return bool(_TINY * _E4M3_TO_F32)


@cache
def _e4m3() -> Floats:
    """Return the values of F8_E4M3, the finite-only one: 4 bits of exponent biased by 7, 3 bits of mantissa."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal) * np.where(codes & 128, -1.0, 1.0)
    values[[0x7F, 0xFF]] = np.nan
    return values.astype(np.float32)


@cache
def _e8m0() -> Floats:
    """Return the values of F8_E8M0: powers of two, of which the last code is no number.

    Made of bits: arithmetic gives 0 for the first, which is subnormal, in a thread that is told to take those for 0.
    """
    bits = np.arange(256, dtype=np.uint32) << 23
    bits[0] = 1 << 22
    values = bits.view(np.float32)
    values[255] = np.nan
    return values


@cache
def _fp4_pairs() -> Floats:
    """Return the two values of every byte, the low four bits first."""
    codes = np.arange(256)
    values = np.array(FP4_VALUES, np.float32)
    return np.stack([values[codes & 15], values[codes >> 4]], axis=-1)


def _codes(array: NDArray[np.generic]) -> Floats:
    """Return the values of two codes per byte; the last dim is twice as long."""
    # A pair is copied as one number, and no index needs a check: three times as fast as an index of rows.
    pairs = np.take(_fp4_pairs().view(np.float64).reshape(-1), array.view(np.uint8), mode="clip")
    return pairs.view(np.float32)


def _computed(function: BlockScaled | Mxfp4 | Nvfp4, members: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    sources, dtypes = tuple(tensor.source for tensor in members), tuple(tensor.dtype for tensor in members)
    return Tensor(members[0].name, "F32", Computed(function, sources, dtypes, shape, "F32"))


def _block_scaled(members: Sequence[Tensor], block: tuple[int, int] | None) -> BlockScaled:
    weight, scales = members
    if weight.dtype != "F8_E4M3" or scales.dtype not in _SCALE_DTYPES:
        message = f"weights of dtype {weight.dtype} with scales of dtype {scales.dtype} are no block-scaled FP8"
        raise InvalidInputError(message)
    if len(weight.shape) < 2 or len(scales.shape) != len(weight.shape) or scales.shape[:-2] != weight.shape[:-2]:  # noqa: PLR2004
        raise InvalidInputError(f"scales of shape {scales.shape} are no grid of blocks of a weight of {weight.shape}")
    sizes = block or tuple(_block_size(n, count) for n, count in zip(weight.shape[-2:], scales.shape[-2:], strict=True))
    grid = tuple(-(-n // size) for n, size in zip(weight.shape[-2:], sizes, strict=True))
    if grid != scales.shape[-2:]:
        message = (
            f"a weight of {list(weight.shape)} in blocks of {list(sizes)} has a grid of {list(grid)} scales, but there "
            f"are {list(scales.shape[-2:])}"
        )
        raise InvalidInputError(message)
    return BlockScaled((sizes[0], sizes[1]), (weight.dtype, scales.dtype))


def _block_size(size: int, blocks: int) -> int:
    """Return the power of two, from 128 down, that cuts `size` into as many blocks; all of it for one block."""
    if blocks == 1:
        return max(size, 1)
    return next((unit for unit in (128, 64, 32, 16, 8, 4, 2, 1) if -(-size // unit) == blocks), max(size, 1))


def _check_nibbles(members: Sequence[Tensor], scheme: Scheme) -> None:
    codes, scales = members[:2]
    group = MXFP4_GROUP if scheme == "mxfp4" else NVFP4_GROUP
    wanted = (*codes.shape[:-1],) if scheme == "mxfp4" else (*codes.shape[:-1], codes.shape[-1] * 2 // group)
    whole = codes.shape[-1] * 2 % group == 0 and (scheme == "nvfp4" or codes.shape[-1] * 2 == group)
    dtypes = [tensor.dtype for tensor in members]
    expected = {"mxfp4": [["U8", "U8"], ["U8", "F8_E8M0"]], "nvfp4": [["U8", "F8_E4M3", "F32"]]}[scheme]
    scalar = scheme == "mxfp4" or members[2].shape in {(), (1,)}
    if dtypes not in expected or scales.shape != wanted or not whole or not scalar:
        listed = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in members)
        message = f"{listed} are no {scheme} weight with its scales: one scale for {group} codes, two codes in a byte"
        raise InvalidInputError(message)


def _blocks(held: Intervals, size: int) -> Intervals:
    """Return the blocks of which an index is held."""
    found: list[Interval] = []
    for start, stop in held:
        first, last = start // size, -(-stop // size)
        if found and found[-1][1] >= first:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return tuple(found)


def _scaled(held: Intervals, by: int) -> Intervals:
    return tuple((start * by, stop * by) for start, stop in held)


def _indices(held: Intervals) -> NDArray[np.int64]:
    return np.concatenate([np.arange(start, stop) for start, stop in held] or [np.arange(0)])


@lru_cache(maxsize=64)
def _positions(held: Intervals, blocks: Intervals, size: int) -> NDArray[np.int64]:
    """Return, for every index held, where among the blocks held its own is; not to be written to."""
    return np.searchsorted(_indices(blocks), _indices(held) // size)


def _inside(values: Floats, held: Intervals, blocks: Intervals, size: int) -> Floats:
    """Return the elements held, of all elements of the blocks held, in the last dim."""
    if held == _scaled(blocks, size):
        return values
    return np.asarray(values[..., _positions(held, blocks, size) * size + _indices(held) % size])
