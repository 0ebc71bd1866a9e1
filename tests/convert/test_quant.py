"""Any region of a quantized weight has the values that decoding it one element after another gives."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.convert.oracle import gather

from shardferry.convert import fp8, quant
from shardferry.convert.ops import Computed, Stored
from shardferry.convert.quant import Scheme, dequantize, to_floats
from shardferry.convert.tensor import Tensor
from shardferry.errors import InvalidInputError
from shardferry.geometry.region import box
from shardferry.testing.strategies import regions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardferry.convert.values import Products, Values

Members = Sequence[tuple[str, "NDArray[np.generic]"]]
RNG = np.random.default_rng(7)


def e4m3(code: int) -> float:
    """Decode by the definition of the format."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e2m1(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def bytes_of(shape: tuple[int, ...], low: int = 0, high: int = 256) -> NDArray[np.uint8]:
    codes = RNG.integers(low, high, shape).astype(np.uint8)
    return np.where(codes & 127 == 127, codes ^ 1, codes).astype(np.uint8)


def normal_codes(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return F8_E4M3 codes none of which is subnormal: their bits are moved, not looked up."""
    codes: NDArray[np.int64] = RNG.integers(8, 127, shape) | RNG.choice([0, 128], shape)
    return codes.astype(np.uint8)


def nibble(row: NDArray[np.uint8], at: int) -> float:
    return e2m1(int(row[at // 2]) >> (4 * (at % 2)) & 15)


def multiplied(products: Products, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Multiply as whoever takes products does, two rows at a time."""
    made = np.empty(shape, np.float32)
    for first, last, at in products.runs(2):
        bits = np.empty((last - first, shape[1]), np.int16)
        products.put_bits(first, last, bits)
        numbers = (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        made[first:last] = numbers * np.repeat(products.factors[at], products.width)
    return made


def all_rows(values: Values) -> NDArray[np.float32]:
    return values.rows(0, values.shape[0])  # type: ignore[return-value]


def check(scheme: Scheme, members: Members, plain: NDArray[np.float32], data: st.DataObject) -> None:
    """Compare a region, computed from just the parts it says it needs, with all values decoded one by one."""
    tensors = [Tensor(f"t{at}", dtype, Stored(f"t{at}", array.shape)) for at, (dtype, array) in enumerate(members)]
    source = dequantize(tensors, scheme, None).source
    assert isinstance(source, Computed)
    assert source.shape == plain.shape
    region = data.draw(regions(plain.shape))
    if not region.num_elements:
        return
    shapes = [array.shape for _, array in members]
    needed = source.function.needs(shapes, region)
    operands = [gather(array, part) for (_, array), part in zip(members, needed, strict=True)]  # type: ignore[arg-type]
    values = source.function.compute(operands, shapes, region)
    wanted = gather(plain, region).reshape(values.shape)  # type: ignore[arg-type]
    cut = data.draw(st.integers(0, values.shape[0]))
    assert np.array_equal(np.concatenate([values.rows(0, cut), values.rows(cut, values.shape[0])]), wanted)
    assert np.abs(wanted).max() <= values.most
    if values.products is not None:
        assert np.array_equal(multiplied(values.products, values.shape), wanted)


@settings(deadline=None)
@given(st.data(), st.sampled_from(["F32", "BF16", "F16", "F8_E8M0", "U8"]))
def test_block_scaled_fp8_is_the_value_times_the_scale_of_its_block(data: st.DataObject, dtype: str) -> None:
    rows, columns = data.draw(st.integers(5, 12)), data.draw(st.integers(5, 12))
    codes = data.draw(st.sampled_from([bytes_of, normal_codes]))((rows, columns))
    kinds: dict[str, NDArray[np.generic]] = {
        "F32": RNG.random((-(-rows // 4), -(-columns // 4))).astype(np.float32),
        "BF16": RNG.integers(0x3F00, 0x4000, (-(-rows // 4), -(-columns // 4))).astype(np.uint16),
        "F16": RNG.random((-(-rows // 4), -(-columns // 4))).astype(np.float16),
        "F8_E8M0": bytes_of((-(-rows // 4), -(-columns // 4)), 120, 134),
        "U8": bytes_of((-(-rows // 4), -(-columns // 4)), 120, 134),
    }
    scales = kinds[dtype]
    values = to_floats(scales, dtype)
    plain = np.array(
        [[np.float32(e4m3(int(codes[i, j]))) * values[i // 4, j // 4] for j in range(columns)] for i in range(rows)],
        np.float32,
    )
    members = [("F8_E4M3", codes), (dtype, scales)]
    if all(-(-n // size) != -(-n // 4) for n in (rows, columns) for size in (8, 16)):
        check("fp8", members, plain, data)


@settings(deadline=None)
@given(st.data())
def test_mxfp4_is_a_code_times_a_power_of_two(data: st.DataObject) -> None:
    blocks, scales = bytes_of((3, 2, 16)), bytes_of((3, 2), 118, 136)
    plain = np.array(
        [
            [nibble(blocks[i, j // 32], j % 32) * math.ldexp(1.0, int(scales[i, j // 32]) - 127) for j in range(64)]
            for i in range(3)
        ],
        np.float32,
    )
    check("mxfp4", [("U8", blocks), ("U8", scales)], plain, data)


@settings(deadline=None)
@given(st.data())
def test_nvfp4_has_two_levels_of_scale(data: st.DataObject) -> None:
    codes, scales = bytes_of((4, 24)), bytes_of((4, 3), 0, 127)
    scale = np.array(RNG.random(), np.float32)
    factors = np.array([[np.float32(e4m3(int(code))) * scale for code in row] for row in scales])
    plain = np.array([[np.float32(nibble(codes[i], j)) * factors[i, j // 16] for j in range(48)] for i in range(4)])
    check("nvfp4", [("U8", codes), ("F8_E4M3", scales), ("F32", scale)], plain, data)


def test_codes_decode_by_the_definition_of_their_format() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = to_floats(codes, "F8_E4M3")
    assert np.isnan(values[[127, 255]]).all()
    assert all(values[code] == e4m3(code) for code in range(256) if code & 127 != 127)
    assert np.array_equal(to_floats(codes[:255], "F8_E8M0"), [math.ldexp(1.0, code - 127) for code in range(255)])
    assert to_floats(np.array([1.5], np.float16).view(np.uint16), "F16") == 1.5


def test_codes_decode_alike_in_a_thread_that_takes_subnormal_numbers_for_0() -> None:
    """Also what such a thread is the first to need, as in a module just imported."""
    spec = importlib.util.find_spec("shardferry.convert.quant")
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    codes = np.arange(256, dtype=np.uint8)
    with ThreadPoolExecutor(1) as thread:
        assert all(thread.map(torch.set_flush_denormal, [True])), "the processor can; it ends with the thread"
        exponents, values = thread.map(fresh.to_floats, [codes, codes], ["F8_E8M0", "F8_E4M3"])
    powers = [math.ldexp(1.0, code - 127) for code in range(255)]
    assert np.array_equal(exponents, [*powers, math.nan], equal_nan=True)
    numbers = [math.nan if code & 127 == 127 else e4m3(code) for code in range(256)]
    assert np.array_equal(values, numbers, equal_nan=True)


def test_rows_are_scaled_together_up_to_the_end_of_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of three columns at a time, in blocks of five rows."""
    monkeypatch.setattr(fp8, "LONG_ROW_ELEMENTS", 7)
    codes, scales = normal_codes((12, 3)), RNG.random((3, 1)).astype(np.float32)
    plain = np.array([[np.float32(e4m3(int(code))) * scales[i // 5, 0] for code in codes[i]] for i in range(12)])
    values = quant.BlockScaled((5, 3), ("F8_E4M3", "F32")).compute(
        [codes, scales], [(12, 3), (3, 1)], box((0, 0), (12, 3))
    )
    assert np.array_equal(all_rows(values), plain)
    assert values.products is not None
    assert list(values.products.runs(4)) == [(0, 4, 0), (4, 5, 0), (5, 9, 1), (9, 10, 1), (10, 12, 2)]


def test_experts_have_blocks_of_their_own() -> None:
    """Two of three experts, of five rows in blocks of four, from row 3 on: of each the last row of two blocks."""
    codes, scales = normal_codes((2, 2, 6)), RNG.random((2, 2, 2)).astype(np.float32)
    function = quant.BlockScaled((4, 3), ("F8_E4M3", "F32"))
    values = function.compute([codes, scales], [(3, 5, 6), (3, 2, 2)], box((1, 3, 0), (2, 2, 6)))
    plain = to_floats(codes, "F8_E4M3") * np.repeat(scales, 3, axis=-1)
    assert np.array_equal(all_rows(values), plain.reshape(4, 6))
    assert values.products is not None
    assert np.array_equal(multiplied(values.products, values.shape), plain.reshape(4, 6))


SCALES = (1.0, -0.37, 128.0, 129.0, 3e38, 1e-40, 2.0**-149, 0.0, -0.0, math.inf, -math.inf, math.nan)


@pytest.mark.parametrize("scales", [SCALES, SCALES[:3], SCALES[5:9]], ids=["any", "moderate", "tiny"])
@pytest.mark.parametrize("subnormal", [True, False], ids=["looked up", "moved"])
def test_every_code_times_any_scale_is_what_f32_makes_of_the_two(scales: tuple[float, ...], *, subnormal: bool) -> None:
    """Every code in 20 rows a scale, after rows, which are looked at, of codes that are subnormal or not."""
    every = np.tile(np.arange(256, dtype=np.uint8), (20, 1))
    codes = np.concatenate([np.full((236, 256), 3 if subnormal else 0x40, np.uint8), every] * len(scales))
    factors = np.array(scales, np.float32).reshape(-1, 1)
    with np.errstate(all="ignore"):
        plain = to_floats(codes, "F8_E4M3") * np.repeat(factors, 256, axis=0)
        function = quant.BlockScaled((256, 256), ("F8_E4M3", "F32"))
        values = function.compute([codes, factors], [codes.shape, factors.shape], box((0, 0), codes.shape))
        made = [all_rows(values)]
        if values.products is not None:
            made.append(multiplied(values.products, values.shape))
    assert len(made) == 1 + (not subnormal and scales != SCALES), "only then bits are moved"
    numbers = ~np.isnan(plain)
    for got in made:
        assert np.array_equal(np.isnan(got), ~numbers)
        assert np.array_equal(got[numbers].view(np.uint32), plain[numbers].view(np.uint32))
    assert not np.abs(plain[np.isfinite(plain)]).max() > values.most


def test_a_part_reads_only_the_scales_of_the_blocks_it_touches() -> None:
    """Rows 72 to 143 of 576 lie in the first two rows of blocks of 128."""
    members = [Tensor("w", "F8_E4M3", Stored("w", (576, 200))), Tensor("s", "F32", Stored("s", (5, 2)))]
    source = dequantize(members, "fp8", (128, 128)).source
    assert isinstance(source, Computed)
    assert source.function.needs([(576, 200), (5, 2)], box((72, 0), (72, 200)))[1] == box((0, 0), (2, 2))


@pytest.mark.parametrize(
    ("scheme", "members", "message"),
    [
        ("fp8", [("F8_E4M3", (576, 256)), ("F32", (4, 2))], "scales"),
        ("fp8", [("BF16", (4, 4)), ("F32", (1, 1))], "no block-scaled FP8"),
        ("fp8", [("F8_E4M3", (4,)), ("F32", (1,))], "no grid"),
        ("fp8", [("F8_E4M3", (4, 4))], "wants 2 tensors"),
        ("mxfp4", [("U8", (4, 2, 16)), ("U8", (4, 3))], "no mxfp4"),
        ("mxfp4", [("U8", (4, 2, 8)), ("U8", (4, 2))], "no mxfp4"),
        ("nvfp4", [("U8", (4, 24)), ("F8_E4M3", (4, 3)), ("F32", (2,))], "no nvfp4"),
        ("nvfp4", [("U8", (4, 20)), ("F8_E4M3", (4, 2)), ("F32", ())], "no nvfp4"),
        ("int3", [("U8", (4, 20))], "'int3'"),
    ],
)
def test_what_is_no_group_of_a_scheme_is_refused(
    scheme: Scheme, members: list[tuple[str, tuple[int, ...]]], message: str
) -> None:
    tensors = [Tensor(f"t{at}", dtype, Stored(f"t{at}", shape)) for at, (dtype, shape) in enumerate(members)]
    with pytest.raises(InvalidInputError, match=message):
        dequantize(tensors, scheme, (128, 128) if scheme == "fp8" else None)
