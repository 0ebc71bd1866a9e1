"""Putting elements into tensors of another floating dtype as torch casts them: to nearest, ties to even."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardferry.torch.dtypes import torch_dtype
from shardferry.units import KIB, MIB

if TYPE_CHECKING:
    from shardferry.convert.values import Products, Values
    from shardferry.storage.base import Bytes

# Computed and cast at a time: as many F32 elements, or products, stay in a core's second cache. More where the elements
# of a row lie apart in memory, every line of which a few rows would touch again and again.
CACHED_ELEMENTS = 256 * KIB
SCATTERED_ELEMENTS = MIB
# Fewer products at a time, or in a row of one block, are sooner multiplied in F32 and cast.
MIN_PRODUCTS = 32 * KIB
MIN_BLOCK_WIDTH = 32


def cast_bytes(source: Bytes, source_dtype: str, out: Bytes, dtype: str) -> None:
    """Cast the elements in `source` to `dtype`, into `out`.

    Args:
        source: Bytes of elements of `source_dtype`.
        source_dtype: safetensors name of a floating dtype.
        out: Filled with as many elements of `dtype`.
        dtype: safetensors name of a floating dtype.
    """
    target = torch.from_numpy(out).view(torch_dtype(dtype))
    target.copy_(torch.from_numpy(source).view(torch_dtype(source_dtype)))


def put_values(table: torch.Tensor, values: Values, dtype: torch.dtype) -> list[torch.Tensor]:
    """Compute values and put them into a table, cast to its dtype, so many at a time as stay in a core's cache.

    Args:
        table: On a CPU, of the shape of the values.
        values: What to compute.
        dtype: Theirs.

    Returns:
        Counts of finite values that became infinite.
    """
    at_once = CACHED_ELEMENTS if table.stride(1) == 1 else SCATTERED_ELEMENTS
    step = max(1, at_once // max(1, table.shape[1]))
    stays_finite = not dtype.is_floating_point or values.most <= torch.finfo(table.dtype).max
    if values.products is not None and stays_finite and can_multiply(table, values.products):
        _multiply(table, values.products, step)
        return []
    overflowed = []
    for first in range(0, len(table), step):
        rows = values.rows(first, min(first + step, len(table)))
        # As bytes: torch does not know every kind of array that a function may return.
        data = np.ascontiguousarray(rows).view(np.uint8)
        source, target = torch.from_numpy(data).view(dtype), table[first : first + step]
        target.copy_(source)
        if not stays_finite and not fits(source, target.dtype):
            overflowed.append(became_infinite(source, target))
    return overflowed


def fits(stored: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether no element becomes infinite in another dtype: in one pass, so False if some are no numbers."""
    most = torch.finfo(dtype).max
    if most >= torch.finfo(stored.dtype).max:
        return True
    low, high = (end.item() for end in torch.aminmax(stored))  # as Python floats: BF16 rounds 65504 to 65536
    return bool(-most <= low and high <= most)


def became_infinite(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return how many finite values are infinite in `target`, which they were cast to."""
    return torch.isinf(target).sum() - torch.isinf(source).sum().to(target.device)


def can_multiply(table: torch.Tensor, products: Products) -> bool:
    """Return whether it is right, and faster, to fill a table by `_Scale`."""
    # One thread: others may take subnormal numbers for 0 when this one does not.
    # A factor below 0, even -0, would make the bias below +0, and so a product of -0 too.
    is_right = (
        table.dtype == torch.bfloat16
        and table.is_contiguous()
        and torch.get_num_threads() == 1
        and not np.signbit(products.factors).any()
    )
    is_faster = products.width >= MIN_BLOCK_WIDTH and table.numel() >= MIN_PRODUCTS * len(products.ends)
    return is_right and is_faster and torch_multiplies()


def _multiply(table: torch.Tensor, products: Products, step: int) -> None:
    """Put products into a table of BF16."""
    blocks = (products.factors.shape[1], products.width)
    bits = np.empty((min(step, len(table)), table.shape[1]), np.int16)
    numbers, results = torch.from_numpy(bits).view(torch.bfloat16).unflatten(1, blocks), table.unflatten(1, blocks)
    factors = torch.from_numpy(products.factors).unbind()
    scale = _Scale(blocks[0])
    for first, last, at in products.runs(step):
        products.put_bits(first, last, bits[: last - first])
        scale(numbers[: last - first], factors[at], results[first:last])


class _Scale:
    """Multiplies BF16 numbers by F32 factors and rounds once, and makes no tensor of F32 on the way.

    The one operation of torch that does is batch normalization after training. With mean 0, variance 1, epsilon 0 and
    bias -0 it does nothing else: (x - 0) / 1 * factor + -0.
    """

    def __init__(self, num_blocks: int) -> None:
        self._mean, self._bias, self._variance = (
            torch.full((num_blocks,), value, dtype=torch.float32, device="cpu") for value in (0.0, -0.0, 1.0)
        )
        self._nothing = torch.empty(0, dtype=torch.float32, device="cpu")

    def __call__(self, numbers: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> None:
        """Put products into `out`: shape [rows, blocks, width] as `numbers`, with a factor for every block."""
        torch.native_batch_norm(
            numbers,
            factors,
            self._bias,
            self._mean,
            self._variance,
            training=False,
            momentum=0.0,
            eps=0.0,
            out=(out, self._nothing, self._nothing),
        )


@cache
def torch_multiplies() -> bool:
    """Return whether this torch, on this processor, makes of products what F32 makes of them: some are compared."""
    bits = np.arange(-(1 << 15), 1 << 15, 67, dtype=np.int16)  # numbers of all sizes, and more than fill a vector
    numbers = torch.from_numpy(bits).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite()].expand(4, -1).unsqueeze(0).contiguous()
    factors = torch.tensor([1.9e-4, 1.0039064, 3.3e-39, 0.0], dtype=torch.float32, device="cpu")
    got = torch.empty_like(numbers)
    _Scale(4)(numbers, factors, got)
    wanted = (numbers.float() * factors[:, None]).bfloat16()
    return torch.equal(got.view(torch.int16), wanted.view(torch.int16))
