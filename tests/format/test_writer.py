"""The layout of a file to be written: byte for byte what safetensors writes, or refused before anything is."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from shardferry.errors import InvalidInputError
from shardferry.format.dtypes import BITS
from shardferry.format.header import METADATA, parse_header
from shardferry.format.writer import FileLayout, TensorSpec, lay_out_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NAME = "weights.safetensors"
# What safetensors calls the dtypes it writes; it has no name for the two of 6 bits.
DTYPES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
# A few names from plain text, and many from what JSON escapes and what sorts oddly.
texts = st.text(max_size=6) | st.text('a"\\/\b\f\n\r\t\0\x1f\x7f\u2028\uffff\U0001f642é.09', max_size=6)
names = texts.filter(lambda name: name not in ("", METADATA))
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
specs = st.builds(TensorSpec, st.sampled_from([dtype for dtype in DTYPES if dtype != "F4"]), shapes) | st.builds(
    TensorSpec, st.just("F4"), st.lists(st.integers(0, 3), max_size=2).map(lambda dims: (*dims, 4))
)


def reference(tensors: Mapping[str, TensorSpec], data: np.ndarray, metadata: dict[str, str] | None) -> bytes:
    """Return the file that safetensors makes of tensors that all begin with the same bytes."""
    given_to_it = {}
    for name, (dtype, shape) in tensors.items():
        stored = (*shape[:-1], shape[-1] // 2) if dtype == "F4" else shape  # it doubles the last dim of this one
        given_to_it[name] = safetensors.TensorSpec(
            dtype=DTYPES[dtype], shape=stored, data_ptr=data.ctypes.data, data_len=tensors[name].num_bytes
        )
    return safetensors.serialize(given_to_it, metadata=metadata)


def filled(layout: FileLayout, data: bytes) -> bytes:
    """Return the file of a layout whose tensors all begin with the same bytes."""
    content = bytearray(layout.size)
    content[: len(layout.header)] = layout.header
    for start, stop in layout.spans.values():
        content[start:stop] = data[: stop - start]
    return bytes(content)


@given(st.dictionaries(names, specs, min_size=1, max_size=6), st.dictionaries(texts, texts, max_size=1))
def test_the_file_is_what_safetensors_writes(tensors: dict[str, TensorSpec], metadata: dict[str, str]) -> None:
    data = np.frombuffer(random.Random(0).randbytes(8 * 3**3), np.uint8)  # noqa: S311 - any bytes
    assert filled(lay_out_file(NAME, tensors, metadata), data.tobytes()) == reference(tensors, data, metadata)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_that_safetensors_writes_is_laid_out_alike(dtype: str) -> None:
    tensors = {"b": TensorSpec(dtype, (3, 8)), "B": TensorSpec(dtype, (8,)), "é": TensorSpec("U8", (5,))}
    data = np.arange(256, dtype=np.uint8)
    assert filled(lay_out_file(NAME, tensors, {"format": "pt"}), data.tobytes()) == reference(
        tensors, data, {"format": "pt"}
    )


def test_the_file_is_what_save_file_writes(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray] = {
        "layer.w": np.arange(6, dtype=np.float16).reshape(2, 3),
        "layer.ids": np.arange(3),
        "s": np.asarray(7, np.float32),
    }
    save_file(arrays, tmp_path / NAME, {"format": "pt"})
    tensors = {"layer.w": TensorSpec("F16", (2, 3)), "layer.ids": TensorSpec("I64", (3,)), "s": TensorSpec("F32", ())}
    layout = lay_out_file(NAME, tensors, {"format": "pt"})
    written = (tmp_path / NAME).read_bytes()
    assert (len(written), written[: len(layout.header)]) == (layout.size, layout.header)
    assert {name: written[slice(*span)] for name, span in layout.spans.items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }


@given(
    st.dictionaries(names, st.builds(TensorSpec, st.sampled_from(list(BITS)), st.just((2, 8))), max_size=6),
    st.dictionaries(texts, texts, max_size=4),
)
def test_a_header_reads_back_as_what_it_was_made_of(tensors: dict[str, TensorSpec], metadata: dict[str, str]) -> None:
    layout = lay_out_file(NAME, tensors, metadata)
    header, problems = parse_header(layout.header, layout.size, NAME)
    assert header is not None
    assert (problems, header.metadata) == ([], metadata)
    assert {name: TensorSpec(info.dtype, info.shape) for name, info in header.tensors.items()} == tensors
    assert {name: info.span for name, info in header.tensors.items()} == layout.spans


@given(st.dictionaries(names, specs, min_size=1, max_size=6))
def test_every_tensor_begins_at_a_multiple_of_its_width(tensors: dict[str, TensorSpec]) -> None:
    layout = lay_out_file(NAME, tensors, {})
    assert len(layout.header) % 8 == 0
    for name, (start, stop) in layout.spans.items():
        assert start % max(1, BITS[tensors[name].dtype] // 8) == 0 or start == stop


@given(st.permutations(["a", "b", "c"]))
def test_the_order_of_metadata_and_tensors_does_not_matter(order: list[str]) -> None:
    one = lay_out_file(NAME, dict.fromkeys(order, TensorSpec("I8", (1,))), dict.fromkeys(order, "x"))
    two = lay_out_file(NAME, dict.fromkeys("abc", TensorSpec("I8", (1,))), dict.fromkeys("abc", "x"))
    assert one == two


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        ("", TensorSpec("F32", (2,)), ["tensor ''", "empty name"]),
        (METADATA, TensorSpec("F32", (2,)), [f"tensor '{METADATA}'", "reserves"]),
        ("layer.\ud800", TensorSpec("F32", (2,)), ["layer.", "Unicode"]),
        (3, TensorSpec("F32", (2,)), ["tensor 3", "must be text, not int"]),
        ("w", TensorSpec("complex128", (2,)), ["tensor 'w'", "complex128", "C64"]),
        ("w", TensorSpec("F4", (3, 3)), ["tensor 'w'", "[3, 3]", "F4", "byte"]),
    ],
)
def test_a_tensor_the_format_cannot_hold_is_refused_by_name(name: str, spec: TensorSpec, words: list[str]) -> None:
    with pytest.raises(InvalidInputError) as refused:
        lay_out_file(NAME, {"good": TensorSpec("I8", ()), name: spec}, {})
    assert all(word in str(refused.value) for word in words), str(refused.value)
    assert "good" not in str(refused.value)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"step": 12}, ["metadata 'step'", "int"]),
        ({5: "x"}, ["metadata 5", "int"]),
        ({"step": "\udfff"}, ["metadata 'step'", "Unicode"]),
        ({"\udfff": "step"}, ["metadata", "Unicode"]),
    ],
)
def test_metadata_that_is_not_text_is_refused_by_key(metadata: dict[str, str], words: list[str]) -> None:
    with pytest.raises(InvalidInputError) as refused:
        lay_out_file(NAME, {}, metadata)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_everything_wrong_is_listed_up_to_a_limit() -> None:
    with pytest.raises(InvalidInputError) as refused:
        lay_out_file(NAME, {f"w{n}": TensorSpec("C128", ()) for n in range(25)}, {"key": 1})  # type: ignore[dict-item]
    assert all(f"'w{n}'" in str(refused.value) for n in range(20))
    assert str(refused.value).endswith("and 6 more")


def test_the_longest_header_is_as_long_as_safetensors_allows() -> None:
    around = len(lay_out_file(NAME, {"w": TensorSpec("I8", (1,))}, {"k": ""}).header.rstrip()) - 8
    tensors, longest = {"w": TensorSpec("I8", (1,))}, 100_000_000 - around
    assert len(lay_out_file(NAME, tensors, {"k": "v" * longest}).header) == 8 + 100_000_000
    with pytest.raises(InvalidInputError, match=r"weights.safetensors would have 100000008 bytes for 1 tensors"):
        lay_out_file(NAME, tensors, {"k": "v" * (longest + 1)})
