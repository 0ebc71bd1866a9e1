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

from shardferry.convert import quant
from shardferry.convert.ops import Computed, Stored
from shardferry.convert.quant import Scheme, dequantize, to_floats
from shardferry.convert.tensor import Tensor
from shardferry.errors import InvalidInputError
from shardferry.geometry.region import box
from shardferry.testing.strategies import regions

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


def nibble(row: NDArray[np.uint8], at: int) -> float:
    return e2m1(int(row[at // 2]) >> (4 * (at % 2)) & 15)


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
    got = source.function.compute(operands, shapes, region)
    assert np.array_equal(got, gather(plain, region))  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.data(), st.sampled_from(["F32", "BF16", "F16", "F8_E8M0", "U8"]))
def test_block_scaled_fp8_is_the_value_times_the_scale_of_its_block(data: st.DataObject, dtype: str) -> None:
    rows, columns = data.draw(st.integers(5, 12)), data.draw(st.integers(5, 12))
    codes = bytes_of((rows, columns))
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


def test_weights_are_decoded_in_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of three columns at a time, in blocks of five rows: chunks end at both."""
    monkeypatch.setattr(quant, "CACHED_ELEMENTS", 7)
    codes, scales = bytes_of((12, 3)), RNG.random((3, 1)).astype(np.float32)
    plain = np.array([[np.float32(e4m3(int(code))) * scales[i // 5, 0] for code in codes[i]] for i in range(12)])
    function = quant.BlockScaled((5, 3), ("F8_E4M3", "F32"))
    region = box((0, 0), (12, 3))
    assert np.array_equal(function.compute([codes, scales], [(12, 3), (3, 1)], region), plain)


SCALES = (1.0, -0.37, 128.0, 129.0, 3e38, 1e-40, 2.0**-149, 0.0, -0.0, math.inf, -math.inf, math.nan)


@pytest.mark.parametrize("scales", [SCALES, SCALES[:3], SCALES[5:9]], ids=["any", "moderate", "tiny"])
def test_every_code_times_any_scale_is_what_f32_makes_of_the_two(scales: tuple[float, ...]) -> None:
    """20 rows a scale: twice as many as are scaled at a time, and some more."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (20 * len(scales), 1))
    factors = np.array(scales, np.float32).reshape(-1, 1)
    with np.errstate(all="ignore"):
        plain = to_floats(codes, "F8_E4M3") * np.repeat(factors, 20, axis=0)
        function = quant.BlockScaled((20, 256), ("F8_E4M3", "F32"))
        got = function.compute([codes, factors], [codes.shape, factors.shape], box((0, 0), codes.shape))
    numbers = ~np.isnan(plain)
    assert np.array_equal(np.isnan(got), ~numbers)
    assert np.array_equal(np.asarray(got)[numbers].view(np.uint32), plain[numbers].view(np.uint32))


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
