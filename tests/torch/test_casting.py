"""What is computed is put into a tensor of another dtype as if it were cast as a whole."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from shardferry.convert.quant import BlockScaled, to_floats
from shardferry.convert.values import Values, values_of
from shardferry.geometry.region import box
from shardferry.torch import casting
from shardferry.torch.casting import put_values

if TYPE_CHECKING:
    from collections.abc import Iterator

RNG = np.random.default_rng(11)
# Products at both ends of what BF16 has, with a tie and beside one; scales of DeepSeek-V3 are like the first.
SCALES = (1.9e-4, 0.37, 1.0, 127.99, 2.0**-118, 3e-39, 2.0**-149, 0.0, 1.00390625, 1.0039064, 0.99609375)


def block_scaled(num_rows: int = 520, scales_of_first: tuple[float, ...] = SCALES) -> tuple[Values, torch.Tensor]:
    """Return values in blocks of 128 rows and 64 columns, every code under every scale, and what F32 makes of them."""
    shape = (num_rows, 64 * len(SCALES))
    codes = (RNG.integers(8, 127, shape) | RNG.choice([0, 128], shape)).astype(np.uint8)
    codes[1:9] = np.tile(np.arange(512, dtype=np.uint16).astype(np.uint8).reshape(8, 64), len(SCALES))
    num_blocks = -(-num_rows // 128)
    scales = np.tile(np.array(scales_of_first, np.float32), (num_blocks, 1))
    scales[1:] = np.ldexp(RNG.random((num_blocks - 1, len(SCALES)), np.float32), RNG.integers(-30, 7))
    function = BlockScaled((128, 64), ("F8_E4M3", "F32"))
    values = function.compute([codes, scales], [shape, scales.shape], box((0, 0), shape))
    factors = np.repeat(np.repeat(scales, 128, axis=0)[:num_rows], 64, axis=1)
    return values, torch.from_numpy(to_floats(codes, "F8_E4M3") * factors)


def assert_same_bits(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(got.isnan(), wanted.isnan())
    numbers = ~wanted.isnan()
    assert torch.equal(got[numbers].view(torch.int16), wanted[numbers].view(torch.int16))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("cached_elements", [1, 100 * 704, 1 << 20], ids=["a row", "100 rows", "blocks"])
def test_products_are_those_of_f32_rounded_once(monkeypatch: pytest.MonkeyPatch, cached_elements: int) -> None:
    monkeypatch.setattr(casting, "CACHED_ELEMENTS", cached_elements)
    values, plain = block_scaled()
    assert values.products is not None
    table = torch.empty(plain.shape, dtype=torch.bfloat16)
    assert casting.can_multiply(table, values.products)
    with torch.device("meta"):  # a default that is not to be used
        assert put_values(table, values, torch.float32) == []
    assert_same_bits(table, plain.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_products_do_not_depend_on_the_default_dtype(dtype: torch.dtype) -> None:
    values, plain = block_scaled()
    table = torch.empty(plain.shape, dtype=torch.bfloat16)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        casting.torch_multiplies.cache_clear()
        put_values(table, values, torch.float32)
    finally:
        torch.set_default_dtype(before)
    assert_same_bits(table, plain.bfloat16())


def test_no_thread_that_takes_subnormal_numbers_for_0_has_a_part() -> None:
    """Not even a worker of torch's, which keeps what its maker was told."""
    values, plain = block_scaled(2048)
    table = torch.empty(plain.shape, dtype=torch.bfloat16)
    before = torch.get_num_threads()

    def fill() -> None:
        torch.set_num_threads(4)
        torch.set_flush_denormal(True)
        torch.ones(1 << 20).mul_(2)  # makes workers
        torch.set_flush_denormal(False)
        put_values(table, values, torch.float32)

    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(fill).result()
    finally:
        torch.set_num_threads(before)
    assert_same_bits(table, plain.bfloat16())


def test_a_torch_that_rounds_factors_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.native_batch_norm

    def rounding(numbers: torch.Tensor, factors: torch.Tensor, *others: Any, **options: Any) -> object:  # noqa: ANN401
        return exact(numbers, factors.bfloat16().float(), *others, **options)

    monkeypatch.setattr(torch, "native_batch_norm", rounding)
    casting.torch_multiplies.cache_clear()
    try:
        values, plain = block_scaled()
        table = torch.empty(plain.shape, dtype=torch.bfloat16)
        assert values.products is not None
        assert not casting.can_multiply(table, values.products)
        put_values(table, values, torch.float32)
    finally:
        casting.torch_multiplies.cache_clear()
    assert_same_bits(table, plain.bfloat16())


@pytest.mark.parametrize("scale", [-0.37, -0.0])
def test_zeros_keep_their_sign_under_scales_below_0(scale: float) -> None:
    values, plain = block_scaled(scales_of_first=(scale, *SCALES[1:]))
    table = torch.empty(plain.shape, dtype=torch.bfloat16)
    put_values(table, values, torch.float32)
    assert_same_bits(table, plain.bfloat16())


def test_what_bf16_batch_normalization_cannot_be_asked_for_is_cast() -> None:
    """A table that is a part of a wider one, and one of another dtype."""
    values, plain = block_scaled()
    wide = torch.zeros((plain.shape[0], plain.shape[1] + 3), dtype=torch.bfloat16)
    put_values(wide[:, 1:-2], values, torch.float32)
    assert_same_bits(wide[:, 1:-2], plain.bfloat16())
    assert not wide[:, 0].any()
    assert not wide[:, -2:].any()
    turned = torch.empty(plain.shape[::-1], dtype=torch.bfloat16)
    put_values(turned.T, values, torch.float32)
    assert_same_bits(turned, plain.bfloat16().T.contiguous())
    half = torch.empty(plain.shape, dtype=torch.float16)
    put_values(half, values, torch.float32)
    assert_same_bits(half, plain.half())


def test_blocks_of_few_rows_are_not_multiplied_one_by_one() -> None:
    """A call for each would take longer than F32 values."""
    codes, scales = np.full((600, 256), 0x38, np.uint8), RNG.random((600, 1), np.float32)
    function = BlockScaled((1, 256), ("F8_E4M3", "F32"))
    values = function.compute([codes, scales], [codes.shape, scales.shape], box((0, 0), codes.shape))
    table = torch.empty(codes.shape, dtype=torch.bfloat16)
    assert values.products is not None
    assert not casting.can_multiply(table, values.products)
    put_values(table, values, torch.float32)
    assert torch.equal(table, torch.from_numpy(scales).bfloat16().expand(-1, 256))


def test_arrays_that_torch_does_not_know_are_taken_as_their_bits() -> None:
    array = np.array([[1.5, -2.0]], np.float32).view(np.uint16)[:, 1::2].copy().view("V2")
    table = torch.empty((1, 2))
    put_values(table, values_of(array), torch.bfloat16)
    assert table.tolist() == [[1.5, -2.0]]
    columns = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32).T
    across = torch.empty((2, 3), dtype=torch.bfloat16)
    put_values(across, Values((2, 3), lambda first, last: columns[first:last]), torch.float32)
    assert across.tolist() == columns.tolist()


def test_values_that_became_infinite_are_counted_where_some_may() -> None:
    array = np.array([[3e38, 3.4e38, -3.4e38], [math.inf, math.nan, 0.0]], np.float32)
    table = torch.empty(array.shape, dtype=torch.bfloat16)
    assert sum(put_values(table, values_of(array), torch.float32)) == 2
    assert put_values(table, values_of(array)._replace(most=3e38), torch.float32) == [], "who says so is believed"
    assert put_values(table, values_of(array[:1] / 2), torch.float32) == []
    assert put_values(torch.empty(array.shape), values_of(array), torch.float32) == []
