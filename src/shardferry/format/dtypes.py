"""The data types a safetensors file can hold: their names, widths and the order writers sort by.

Names and widths are those of the safetensors crate, version 0.8. Nothing here knows NumPy or a framework: a dtype
is the string of the header.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Bits per element, in the order of the crate's enum, which is also its order of alignment.
BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

# A writer lays tensors out by this order descending, then by name, so that every tensor is aligned to its width.
ORDER: tuple[str, ...] = tuple(BITS)


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return how many bytes a whole tensor takes in a file.

    Args:
        dtype: A key of `BITS`.
        shape: Elements per dim; sub-byte dtypes count elements, not bytes. Must end on a byte.

    Examples:
        >>> tensor_bytes("BF16", (3, 4)), tensor_bytes("F4", (2, 8)), tensor_bytes("F32", ())
        (24, 8, 4)
    """
    return math.prod(shape) * BITS[dtype] // 8
