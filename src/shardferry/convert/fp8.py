"""Values of F8_E4M3 codes that are multiplied by a factor for each block, a few rows at a time.

A code's bits, moved to where a wider float has its sign, exponent and mantissa, are a power of two times its value,
and the factors make up for that. So a value costs one product, as F32 or in whoever multiplies BF16 by F32.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from shardferry.convert.values import Products, Values
from shardferry.units import KIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

# The largest number of F8_E4M3.
_MOST = 448.0
# Of a code moved to the left, by 20 bits in an F32 and by 4 in a BF16: its sign, which fills all bits above, once, and
# the rest of it. Exponents being biased by 127 and 7, that is 2**-120 of its value, and of 480 if it is no number.
_F32_BITS = np.int32(-(1 << 31) | 0x7F << 20)
_BF16_BITS = np.int16(-(1 << 15) | 0x7F << 4)
_TO_VALUE = np.float32(2.0**120)
_BF16_NO_NUMBER = 0x7FC0
_TINY = np.float32(2.0**-140)
# A factor of which 2**120 times as much still is an F32.
_MOST_MOVED = 128.0
# Multiplied at a time: as many factors stay in a core's first cache.
LONG_ROW_ELEMENTS = 8 * KIB
SAMPLED_ROWS = 8
SAMPLED_COLUMNS = 512


@dataclass(frozen=True, slots=True)
class Blocks:
    """Codes and their factors.

    Attributes:
        codes: Shape [rows, columns].
        factors: A row for every row of blocks, in it a factor for every block.
        ends: Where each row of blocks ends, in rows of codes.
        columns: The block of every column of codes.
        width: Columns of every block, 0 if they differ.
    """

    codes: NDArray[np.uint8]
    factors: Floats
    ends: Sequence[int]
    columns: NDArray[np.int64]
    width: int

    def values(self) -> Values:
        """Return every code's value times its factor."""
        shape = (len(self.codes), len(self.columns))
        largest = float(np.abs(self.factors).max(initial=0))
        # Otherwise factors would be infinite, products of subnormal numbers 0, or many of them slow.
        moves = largest <= _MOST_MOVED and _has_subnormals() and not _many_are_subnormal(self.codes)
        if not moves:
            return Values(shape, self._looked_up, _MOST * largest)
        moved = _Moved(self, self.factors * _TO_VALUE, _has_no_numbers(self.codes))
        products = Products(moved.put_bits, moved.factors, self.ends, self.width) if self.width else None
        return Values(shape, moved.rows, _MOST * largest, products)

    def scale(self, values: Floats, factors: Floats, first: int) -> None:
        """Multiply rows that begin at number `first` in place by factors that stand where this has its own."""
        start, last = first, first + len(values)
        for at in range(bisect_right(self.ends, first), len(self.ends)):
            stop = min(self.ends[at], last)
            _multiply(values[start - first : stop - first], np.take(factors[at], self.columns))
            if stop == last:
                return
            start = stop

    def _looked_up(self, first: int, last: int) -> Floats:
        values = e4m3_values(self.codes[first:last])
        self.scale(values, self.factors, first)
        return values


@dataclass(frozen=True, slots=True)
class _Moved:
    """Codes whose bits are moved, and factors that make up for it."""

    blocks: Blocks
    factors: Floats
    has_no_numbers: bool

    def rows(self, first: int, last: int) -> Floats:
        """Return rows [first, last)."""
        codes = self.blocks.codes[first:last]
        values = np.empty(codes.shape, np.float32)
        bits = values.view(np.int32)
        bits[...] = codes.view(np.int8)
        bits <<= 20
        bits &= _F32_BITS
        self.blocks.scale(values, self.factors, first)
        if self.has_no_numbers:
            values[_are_no_numbers(codes)] = np.nan
        return values

    def put_bits(self, first: int, last: int, out: NDArray[np.int16]) -> None:
        """Put the bits of rows [first, last) of BF16 numbers, to be multiplied by `factors`, into `out`."""
        codes = self.blocks.codes[first:last]
        np.multiply(codes.view(np.int8), np.int16(1 << 4), out=out, dtype=np.int16)
        np.bitwise_and(out, _BF16_BITS, out=out)
        if self.has_no_numbers:
            out[_are_no_numbers(codes)] = _BF16_NO_NUMBER


def e4m3_values(codes: NDArray[np.uint8]) -> Floats:
    """Return the values of codes."""
    return np.asarray(np.take(_e4m3(), codes, mode="clip"))


def _multiply(values: Floats, factors: Floats) -> None:
    """Multiply every row of a table in place by the factors; several rows at a time: NumPy is faster with long ones."""
    rows, columns = values.shape
    at_once = max(1, LONG_ROW_ELEMENTS // max(1, columns))
    many = rows // at_once * at_once
    if many:
        long = values[:many].reshape(many // at_once, at_once * columns)
        np.multiply(long, np.concatenate([factors] * at_once), out=long)
    if many < rows:
        np.multiply(values[many:], factors, out=values[many:])


def _has_no_numbers(codes: NDArray[np.uint8]) -> bool:
    """Return whether some codes are no numbers (NaN): 127 with either sign."""
    return bool(codes.max(initial=0) == 0xFF or codes.view(np.int8).max(initial=0) == 0x7F)  # noqa: PLR2004 - the codes


def _are_no_numbers(codes: NDArray[np.uint8]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = codes & 0x7F == 0x7F  # noqa: PLR2004 - as above
    return found


def _many_are_subnormal(codes: NDArray[np.uint8]) -> bool:
    """Return whether many codes are subnormal: to multiply by such numbers took one Xeon 32 ns for 16.

    Codes of weights seldom are, as their scales are made for the largest of a block. So a few rows are looked at. If
    more than one code in 128 is, a table is faster, by what it and those take.
    """
    sample = codes[:: max(1, len(codes) // SAMPLED_ROWS), :SAMPLED_COLUMNS]
    return bool(np.count_nonzero((sample & 0x7F) - np.uint8(1) < 7) * 128 > sample.size)  # noqa: PLR2004 - 1 to 7 are


def _has_subnormals() -> bool:
    """Return whether this thread computes with subnormal numbers: torch can tell one to take them for 0."""
    return bool(_TINY * _TO_VALUE)


@cache
def _e4m3() -> Floats:
    """Return the values of F8_E4M3, the finite-only one: 4 bits of exponent biased by 7, 3 bits of mantissa."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal) * np.where(codes & 128, -1.0, 1.0)
    values[[0x7F, 0xFF]] = np.nan
    return values.astype(np.float32)
