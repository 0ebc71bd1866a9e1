"""Values of block-quantized weights, computed block by block: any region of a weight from its codes and scales.

The arithmetic is that of the formats' own reference implementations, in float32, so that results agree bit for bit:
a code's value times its scale. What is not an 8-bit or 16-bit float of NumPy is kept as its bits. The result is F32;
a target of another float dtype casts it, to nearest, ties to even.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardferry.convert.fp8 import Blocks, e4m3_values
from shardferry.convert.ops import Computed
from shardferry.convert.tensor import Tensor
from shardferry.convert.values import Values, as_table
from shardferry.errors import InvalidInputError
from shardferry.geometry.region import Region

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
# The largest number of E2M1.
E2M1_MOST = 6.0
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
    ) -> Values:
        """Return the values of a region."""
        codes = as_table(operands[0].view(np.uint8))
        factors = as_table(to_floats(operands[1], self.dtypes[1]))
        needed = self.needs(shapes, region)[1].dims[-2:]
        rows, columns = (
            _positions(held, blocks, size)
            for held, blocks, size in zip(region.dims[-2:], needed, self.block, strict=True)
        )
        # Row of blocks after row of blocks, and table after table.
        ends = np.searchsorted(rows, np.arange(_count(needed[0])), side="right")
        starts = np.arange(0, len(codes), len(rows))
        all_ends = (starts[:, None] + ends).reshape(-1).tolist()
        width = self.block[1] if region.dims[-1] == _scaled(needed[1], self.block[1]) else 0
        return Blocks(codes, factors, all_ends, columns, width).values()


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
    ) -> Values:
        """Return the values of a region."""
        codes, factors = as_table(operands[0], 2), as_table(to_floats(operands[1], "U8"))
        groups = self.needs(shapes, region)[1].dims[-1]
        return _fp4_values(codes, factors, MXFP4_GROUP, region.dims[-1], groups)


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
    ) -> Values:
        """Return the values of a region."""
        codes, scales, scale = operands
        factors = to_floats(scales, "F8_E4M3") * to_floats(scale, "F32").reshape(())
        groups = self.needs(shapes, region)[1].dims[-1]
        return _fp4_values(as_table(codes), as_table(factors), NVFP4_GROUP, region.dims[-1], groups)


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
        return e4m3_values(array.view(np.uint8))
    return np.asarray(np.take(_e8m0(), array.view(np.uint8), mode="clip"))


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


def _fp4_values(codes: NDArray[np.generic], factors: Floats, group: int, held: Intervals, groups: Intervals) -> Values:
    """Return the values of two codes per byte with a factor for every group of codes.

    Args:
        codes: Shape [rows, bytes].
        factors: Shape [rows, groups].
        group: Codes that share a factor.
        held: Elements wanted of the last dim.
        groups: Groups of which there are codes.
    """
    # A pair is copied as one number, and no index needs a check: three times as fast as an index of rows.
    pairs = _fp4_pairs().view(np.float64).reshape(-1)

    def values_of_rows(first: int, last: int) -> Floats:
        values = np.take(pairs, codes[first:last].view(np.uint8), mode="clip").view(np.float32)
        values.reshape(last - first, factors.shape[1], group)[...] *= factors[first:last, :, None]
        return _inside(values, held, groups, group)

    shape = (len(codes), _count(held))
    return Values(shape, values_of_rows, E2M1_MOST * float(np.abs(factors).max(initial=0)))


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


def _count(held: Intervals) -> int:
    return sum(stop - start for start, stop in held)


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
