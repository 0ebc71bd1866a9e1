"""What is computed is put into a tensor of another dtype as if it were cast as a whole."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from shardferry.convert.quant import BlockScaled, to_floats
from shardferry.convert.values import Values, values_of
from shardferry.geometry.region import box
from shardferry.torch import casting
from shardferry.torch.casting import put_values

RNG = np.random.default_rng(11)
# Products at both ends of what BF16 has, with a tie and beside one; scales of DeepSeek-V3 are like the first.
SCALES = (1.9e-4, 0.37, 1.0, 127.99, 2.0**-118, 3e-39, 2.0**-149, 0.0, 1.00390625, 1.0039064, 0.99609375)


def block_scaled(num_rows: int = 520, scales_of_first: tuple[float, ...] = SCALES) -> tuple[Values, torch.Tensor]:
    """Return values in blocks of 128 rows and 64 columns, every code under every scale, and what F32 makes of them."""
    shape = (num_rows, 64 * len(SCALES))
    codes = (RNG.integers(8, 127, shape) | RNG.choice([0, 128], shape)).astype(np.uint8)
    codes[: 2 * 256 // 64] = np.tile(np.arange(512, dtype=np.uint16).astype(np.uint8).reshape(8, 64), len(SCALES))
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


@pytest.mark.parametrize("cached_elements", [1, 100 * 768, 1 << 20], ids=["a row", "100 rows", "blocks"])
def test_products_are_those_of_f32_rounded_once(monkeypatch: pytest.MonkeyPatch, cached_elements: int) -> None:
    monkeypatch.setattr(casting, "CACHED_ELEMENTS", cached_elements)
    values, plain = block_scaled()
    assert values.products is not None
    table = torch.empty(plain.shape, dtype=torch.bfloat16)
    assert casting.can_multiply(table, values.products)
    with torch.device("meta"):  # a default that is not to be used
        assert put_values(table, values, torch.float32) == []
    assert_same_bits(table, plain.bfloat16())


@pytest.mark.parametrize("num_threads", [1, 4])
def test_products_are_the_same_for_any_number_of_threads(num_threads: int) -> None:
    before = torch.get_num_threads()
    values, plain = block_scaled(2048)
    table = torch.empty(plain.shape, dtype=torch.bfloat16)
    try:
        torch.set_num_threads(num_threads)
        put_values(table, values, torch.float32)
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
    half = torch.empty(plain.shape, dtype=torch.float16)
    put_values(half, values, torch.float32)
    assert_same_bits(half, plain.half())


def test_values_that_became_infinite_are_counted_where_some_may() -> None:
    array = np.array([[3e38, 3.4e38, -3.4e38], [math.inf, math.nan, 0.0]], np.float32)
    table = torch.empty(array.shape, dtype=torch.bfloat16)
    assert sum(put_values(table, values_of(array), torch.float32)) == 2
    assert put_values(table, values_of(array)._replace(most=3e38), torch.float32) == [], "who says so is believed"
    assert put_values(table, values_of(array[:1] / 2), torch.float32) == []
    assert put_values(torch.empty(array.shape), values_of(array), torch.float32) == []
