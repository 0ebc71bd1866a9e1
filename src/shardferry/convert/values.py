"""Values that are computed a few rows at a time, when they are asked for.

So what is computed need not lie in memory as a whole: whoever takes it asks for as many rows as stay in a core's cache.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray


class Products(NamedTuple):
    """Values that are products of numbers that BF16 has and F32 factors, one for each of many blocks.

    Neither means anything without the other: both may be off by a power of two.

    Attributes:
        put_bits: Puts rows [first, last) of the numbers, as the bits of BF16, into an array of their shape.
        factors: A row for every row of blocks, in it a factor for every block.
        ends: Where each row of blocks ends.
        width: Columns of a block; all are as wide.
    """

    put_bits: Callable[[int, int, NDArray[np.int16]], None]
    factors: NDArray[np.float32]
    ends: Sequence[int]
    width: int

    def runs(self, max_rows: int) -> Iterator[tuple[int, int, int]]:
        """Yield runs of at most so many rows of the same blocks: first row, end, and which row of factors."""
        first = 0
        for at, end in enumerate(self.ends):
            for start in range(first, end, max_rows):
                yield start, min(start + max_rows, end), at
            first = end


class Values(NamedTuple):
    """The values of a region, as a table: all dims of its array but the last are one.

    Attributes:
        shape: Rows and columns.
        rows: Returns rows [first, last). To be called in the thread that was given this.
        most: No finite value is further from 0.
        products: What they are products of, if they are. To be asked in the same thread as `rows`.
    """

    shape: tuple[int, int]
    rows: Callable[[int, int], NDArray[np.generic]]
    most: float = math.inf
    products: Products | None = None


def values_of(array: NDArray[np.generic]) -> Values:
    """Return the values of an array."""
    table = as_table(array, min(1, array.ndim))
    return Values((len(table), table.shape[1]), lambda first, last: table[first:last])


def as_table(array: NDArray[Any], num_inner: int = 1) -> NDArray[Any]:
    """Return an array as a table: its innermost `num_inner` dims are the columns, the others the rows."""
    outer = len(array.shape) - num_inner
    return array.reshape(math.prod(array.shape[:outer]), math.prod(array.shape[outer:]))
