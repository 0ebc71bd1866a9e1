"""One file's header: what is accepted, what is refused and why, and that nothing hostile gets further."""

from __future__ import annotations

import time
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoints import Tensor, entry, file_of, raw_file, tensor

from shardferry.errors import CheckpointError
from shardferry.format.dtypes import BITS
from shardferry.format.header import MAX_HEADER_BYTES, Header, parse_header, read_raw_header
from shardferry.format.problem import Problem, refusal
from shardferry.storage.files import MemoryFiles

NAME = "weights.safetensors"
EIGHT = bytes(range(8))
GOOD = entry("F16", [4], 0, 8)


def parse(content: bytes) -> tuple[Header | None, list[Problem]]:
    raw = read_raw_header(MemoryFiles({NAME: content}), NAME)
    return parse_header(raw.raw, raw.size, NAME)


def accepted(content: bytes) -> Header:
    header, problems = parse(content)
    assert header is not None
    assert [problem for problem in problems if problem.severity != "warning"] == []
    return header


def messages(content: bytes, severity: str) -> str:
    return "\n".join(problem.message for problem in parse(content)[1] if problem.severity == severity)


def test_spans_are_absolute_and_in_the_order_of_the_bytes() -> None:
    header = accepted(raw_file({"late": entry("U8", [2], 8, 10), "early": GOOD}, EIGHT + b"ab"))
    start = header.info.header_bytes
    assert [(name, info.span) for name, info in header.tensors.items()] == [
        ("early", (start, start + 8)),
        ("late", (start + 8, start + 10)),
    ]


@pytest.mark.parametrize("dtype", BITS)
def test_every_dtype_of_the_format_is_known(dtype: str) -> None:
    one = tensor("t", dtype, (3, 8))
    info = accepted(file_of([one])).tensors["t"]
    assert (info.dtype, info.shape, info.num_bytes) == (dtype, (3, 8), len(one.data))


@pytest.mark.parametrize("block", [{}, None, {"format": "pt", "": "no key", "заметка": 'a "quoted"\nline'}])
def test_metadata_comes_back_unchanged(block: dict[str, str] | None) -> None:
    assert accepted(raw_file({"t": GOOD, "__metadata__": block}, EIGHT)).metadata == (block or {})


@pytest.mark.parametrize("padding", ["", " " * 70_000, "\t\r\n "])
def test_white_space_may_follow_the_object(padding: str) -> None:
    text = '{"t":{"dtype":"F16","shape":[4],"data_offsets":[0,8]}}' + padding
    assert list(accepted(raw_file(text, EIGHT)).tensors) == ["t"]


def test_white_space_before_the_object_is_a_warning() -> None:
    assert "begins with white space" in messages(raw_file("\n {}"), "warning")


def test_unknown_fields_of_an_entry_are_ignored() -> None:
    assert list(accepted(raw_file({"t": GOOD | {"note": [{"deep": 1.5}]}}, EIGHT)).tensors) == ["t"]


def test_empty_tensors_may_stand_anywhere() -> None:
    entries = {
        "middle": entry("BF16", [0, 5], 8, 8),
        "t": GOOD,
        "first": entry("I64", [3, 0], 0, 0),
        "last": entry("U8", [1], 8, 9),
        "end": entry("F8_E4M3", [0, 2**40, 2**40], 9, 9),
    }
    assert len(accepted(raw_file(entries, EIGHT + b"z")).tensors) == 5


def test_names_are_opaque_text() -> None:
    names = ["../x", "/etc/hosts", 'q"q', "back\\slash", "nul\0nul", "é", "e\u0301", "Ünï", "🦊", "n" * 5000, "a\nb"]
    tensors = [tensor(name, "U16", (2,)) for name in names]
    assert set(accepted(file_of(tensors)).tensors) == set(names)


def text_of(*pairs: str) -> str:
    return "{" + ",".join(pairs) + "}"


T = '"t":{"dtype":"F16","shape":[4],"data_offsets":[0,8]}'

# What only the strict rules refuse: content, words of the message, the dtype of "t" (or "") that is used all the same.
STRICT = {
    "equal twins": (raw_file(text_of(T, T), EIGHT), ["duplicate", "t"], "F16"),
    "twins of two dtypes": (raw_file(text_of(T, T.replace("F16", "I16")), EIGHT), ["duplicate", "t"], "I16"),
    "a twin spelt with an escape": (
        raw_file(text_of(T, T.replace('"t"', '"\\u0074"').replace("F16", "U16")), EIGHT),
        ["duplicate", "t"],
        "U16",
    ),
    "twins in the metadata": (
        raw_file(text_of('"__metadata__":{"k":"1","k":"2"}', T), EIGHT),
        ["duplicate", "__metadata__", "k"],
        "F16",
    ),
    "twins in an unknown field": (
        raw_file(text_of(T[:-1] + ',"note":{"k":1,"k":1}}'), EIGHT),
        ["duplicate", "k"],
        "F16",
    ),
    "a positional entry": (raw_file({"t": ["F16", [4], [0, 8]]}, EIGHT), ["'t'", "array"], "F16"),
    "an empty name": (raw_file({"": GOOD}, EIGHT), ["empty name"], ""),
}


@pytest.mark.parametrize("case", STRICT)
def test_what_only_strict_rules_refuse_says_how_to_go_on(case: str) -> None:
    content, words, _ = STRICT[case]
    header, problems = parse(content)
    assert header is not None
    error = refusal(problems, "here", strict=True)
    assert isinstance(error, CheckpointError)
    assert all(word in str(error) for word in [*words, NAME, "strict=False", "--no-strict"])


@pytest.mark.parametrize("case", STRICT)
def test_without_strictness_the_stated_choice_is_taken(case: str) -> None:
    content, _, dtype = STRICT[case]
    header, problems = parse(content)
    assert header is not None
    assert refusal(problems, "here", strict=False) is None
    assert [info.dtype for info in header.tensors.values()] == [dtype or "F16"]


# What nobody can read: content and words of the message.
FATAL: dict[str, tuple[bytes, list[str]]] = {
    "empty file": (b"", ["empty"]),
    "five bytes": (b"\x10\0\0\0\0", ["5 bytes", "truncated"]),
    "length past the end": (raw_file({"t": GOOD}, EIGHT, length=999), ["header", "999"]),
    "length over the cap": (raw_file({}, length=MAX_HEADER_BYTES + 1), ["header", "100000001", "100000000"]),
    "length beyond 63 bits": (raw_file({}, length=2**64 - 1), ["header", "18446744073709551615"]),
    "length zero": (raw_file("", EIGHT), ["header", "zero"]),
    "zeros only": (bytes(5000), ["header", "zero"]),
    "no object": (raw_file("[1]"), ["header", "JSON object", "an array"]),
    "cut JSON": (raw_file('{"t":{"dtype'), ["header", "JSON"]),
    "two objects": (raw_file("{}{}"), ["header", "JSON"]),
    "NUL padding": (raw_file(b"{}\0\0"), ["header", "JSON"]),
    "byte order mark": (raw_file(b"\xef\xbb\xbf{}"), ["header", "BOM"]),
    "NaN": (raw_file('{"t":NaN}'), ["header", "NaN"]),
    "not UTF-8": (raw_file(b'{"\xfe":1}'), ["header", "UTF-8"]),
    "half a surrogate pair": (raw_file('{"\\udc00":null}'), ["header", "surrogate"]),
    "deep nesting": (raw_file('{"t":' + "[" * 200_000), ["header", "nested"]),
    "an integer without end": (raw_file('{"t":{"shape":[' + "7" * 200_000 + "]}}"), ["header", "digits"]),
    "metadata is no object": (raw_file({"__metadata__": ["pt"]}), ["__metadata__", "an array"]),
    "metadata holds a number": (raw_file({"__metadata__": {"epoch": 3}}), ["__metadata__", "epoch", "an integer"]),
    "a tensor called __metadata__": (raw_file({"__metadata__": GOOD}, EIGHT), ["__metadata__", "shape"]),
    "two metadata blocks": (
        raw_file('{"__metadata__":{},"__metadata__":{}}'),
        ["duplicate", "__metadata__"],
    ),
    "a field twice": (
        raw_file('{"t":{"dtype":"F16","shape":[4],"shape":[4],"data_offsets":[0,8]}}', EIGHT),
        ["duplicate", "shape", "'t'"],
    ),
    "twins of two ranges": (
        raw_file(text_of(T, '"t":{"dtype":"F16","shape":[4],"data_offsets":[8,16]}'), EIGHT * 2),
        ["duplicate", "t"],
    ),
    "entry null": (raw_file({"t": None}), ["'t'", "null"]),
    "a field missing": (raw_file({"t": {"dtype": "F16", "shape": [4]}}, EIGHT), ["'t'", "data_offsets"]),
    "unknown dtype": (raw_file({"t": entry("Q8_0", [8], 0, 8)}, EIGHT), ["'t'", "dtype", "Q8_0"]),
    "lower-case dtype": (raw_file({"t": entry("bf16", [4], 0, 8)}, EIGHT), ["'t'", "bf16"]),
    "dtype is a list": (raw_file({"t": entry(["F16"], [4], 0, 8)}, EIGHT), ["'t'", "dtype"]),
    "shape negative": (raw_file({"t": entry("F16", [-4], 0, 8)}, EIGHT), ["'t'", "shape", "-4"]),
    "shape twice negative": (raw_file({"t": entry("F16", [-2, -2], 0, 8)}, EIGHT), ["'t'", "shape"]),
    "shape a float": (raw_file({"t": entry("F16", [4.0], 0, 8)}, EIGHT), ["'t'", "shape", "4.0"]),
    "shape minus zero": (raw_file('{"t":{"dtype":"F16","shape":[-0],"data_offsets":[0,0]}}'), ["'t'", "shape"]),
    "shape a number": (raw_file({"t": entry("F16", 4, 0, 8)}, EIGHT), ["'t'", "shape"]),
    "shape of true": (raw_file({"t": entry("U8", [True], 0, 1)}, b"x"), ["'t'", "shape"]),
    "shape nested deep": (raw_file({"t": entry("U8", [[[[1]]]], 0, 1)}, b"x"), ["'t'", "shape", "an array"]),
    "offsets negative": (raw_file({"t": entry("F16", [4], -8, 0)}, EIGHT), ["'t'", "offsets", "-8"]),
    "offsets floats": (raw_file({"t": entry("F16", [4], 0.0, 8.0)}, EIGHT), ["'t'", "offsets"]),
    "offsets booleans": (raw_file({"t": entry("U8", [1], False, True)}, b"x"), ["'t'", "offsets", "True"]),  # noqa: FBT003
    "offsets of 65 bits": (raw_file({"t": entry("U8", [1], 0, 2**64)}, b"x"), ["'t'", "offsets"]),
    "offsets reversed": (raw_file({"t": entry("F16", [4], 8, 0)}, EIGHT), ["'t'", "offsets", "before"]),
    "offsets of three": (
        raw_file({"t": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8, 8]}}, EIGHT),
        ["'t'", "offsets"],
    ),
    "offsets are text": (raw_file({"t": {"dtype": "F16", "shape": [4], "data_offsets": "08"}}, EIGHT), ["offsets"]),
    "more shape than data": (raw_file({"t": entry("F32", [500, 2], 0, 8)}, EIGHT), ["'t'", "4000 bytes", "8 bytes"]),
    "less shape than data": (raw_file({"t": entry("F16", [3], 0, 8)}, EIGHT), ["'t'", "6 bytes", "8 bytes"]),
    "one element of no bytes": (raw_file({"t": entry("U8", [1], 0, 0)}), ["'t'", "1 bytes", "0 bytes"]),
    "product overflows": (raw_file({"t": entry("U8", [2**33, 2**33], 0, 8)}, EIGHT), ["'t'", "too large"]),
    "bits overflow": (raw_file({"t": entry("I64", [2**59], 0, 8)}, EIGHT), ["'t'", "too large"]),
    "overflow before a zero": (raw_file({"t": entry("U8", [2**60, 2**60, 0], 0, 0)}), ["'t'", "too large"]),
    "half a byte": (raw_file({"t": entry("F4", [5], 0, 3)}, b"abc"), ["'t'", "byte"]),
    "six bits": (raw_file({"t": entry("F6_E2M3", [2], 0, 2)}, b"ab"), ["'t'", "byte"]),
    "hole at the start": (raw_file({"t": entry("F16", [2], 4, 8)}, EIGHT), ["hole", "4 bytes", "'t'"]),
    "hole in the middle": (
        raw_file({"t": entry("U8", [2], 0, 2), "u": entry("U8", [1], 7, 8)}, EIGHT),
        ["hole", "'u'", "7", "'t'", "2"],
    ),
    "same bytes twice": (raw_file({"t": GOOD, "u": GOOD}, EIGHT), ["overlap", "'u'", "'t'"]),
    "bytes shared": (
        raw_file({"t": entry("U8", [5], 0, 5), "u": entry("U8", [5], 3, 8)}, EIGHT),
        ["overlap", "'u'", "'t'"],
    ),
    "data cut": (
        raw_file({"t": GOOD, "u": entry("F32", [4], 8, 24)}, EIGHT * 2),
        ["truncated", "16 of 24", "'u'", "8 to 24"],
    ),
    "data absent": (raw_file({"t": GOOD}), ["truncated", "0 of 8", "'t'"]),
    "data too long": (raw_file({"t": GOOD}, EIGHT + b"abc"), ["3 trailing bytes"]),
    "data of nobody": (raw_file({}, EIGHT), ["8 trailing bytes"]),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4711\n", ["LFS", "4711"]),
    "web page": (b"\n<!doctype HTML><html>denied", ["HTML", "not a safetensors file"]),
    "server's answer": (b'{"message": "not found"}', ["JSON", "not found"]),
    "short text": (b"no", ["plain text"]),
    "archive": (b"PK\x03\x04" + bytes(90), ["zip"]),
    "pickle": (b"\x80\x02}q\x01X\x05\x01" * 9, ["pickle"]),
    "gguf": (b"GGUF\x03\0\0\0" + bytes(90), ["GGUF"]),
}


@pytest.mark.parametrize("case", FATAL)
def test_what_nobody_can_read_is_refused_with_its_cause(case: str) -> None:
    content, words = FATAL[case]
    said = messages(content, "fatal")
    assert all(word in said for word in [NAME, *words]), said


def test_a_hole_that_a_duplicate_name_causes_is_not_what_is_named() -> None:
    assert "hole" not in messages(FATAL["twins of two ranges"][0], "fatal")


def test_everything_wrong_in_a_header_is_found_at_once() -> None:
    entries = {
        "a": entry("Q4", [2], 0, 2),
        "b": entry("U8", [-1], 2, 3),
        "c": entry("U8", [4], 5, 9),
        "__metadata__": {"n": 1},
    }
    said = messages(raw_file(entries, b"0123456789"), "fatal")
    assert all(word in said for word in ["'a'", "'b'", "hole", "trailing", "'n'"])


def test_no_more_than_the_header_is_read_of_a_file_that_lies_about_its_length() -> None:
    content = raw_file({}, bytes(10**6), length=MAX_HEADER_BYTES)
    assert len(read_raw_header(MemoryFiles({NAME: content}), NAME).raw) < 10**6


@pytest.mark.parametrize(
    "shape", [",".join(["2"] * 500_000), ",".join(["1"] * 500_000), ",".join(["9" * 4000] * 200)], ids=["2", "1", "9"]
)
def test_a_shape_of_hostile_length_takes_no_time_to_judge(shape: str) -> None:
    start = time.process_time()
    parse(raw_file('{"t":{"dtype":"U8","shape":[' + shape + '],"data_offsets":[0,1]}}', b"x"))
    assert time.process_time() - start < 5  # multiplied out it would be hours


def test_long_and_unprintable_names_do_not_flood_a_message() -> None:
    said = messages(raw_file({"x" * 100_000 + "\x1b[2J": None}), "fatal")
    assert len(said) < 1000
    assert said.isprintable()


def reference(content: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Return what safetensors' own reader finds; raises where it refuses."""
    found: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(content)  # type: ignore[no-untyped-call]  # untyped
    return found


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
# Not sub-byte: safetensors' own reader gives no view of these.
byte_dtypes = st.sampled_from([dtype for dtype, bits in BITS.items() if bits % 8 == 0])
tensor_lists = st.lists(st.builds(tensor, names, byte_dtypes, shapes), max_size=6, unique_by=lambda one: one.name)


@given(tensor_lists, st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_what_is_found_in_a_correct_file_is_what_safetensors_reads(
    tensors: list[Tensor], metadata: dict[str, str] | None
) -> None:
    content = file_of(tensors, metadata)
    header = accepted(content)
    found = {n: (i.dtype, list(i.shape), content[slice(*i.span)]) for n, i in header.tensors.items()}
    assert found == {n: (t["dtype"], t["shape"], bytes(t["data"])) for n, t in reference(content)}
    assert header.metadata == (metadata or {})


SEED = file_of(
    [tensor("a.0", "F32", (2, 3)), tensor("a.1", "BF16", (4,)), tensor("e", "U8", (0, 2)), tensor("s", "I64", ())],
    {"format": "pt", "-0": "\\u0041"},
)
changes = st.lists(st.tuples(st.integers(0, len(SEED) - 1), st.integers(0, 255)), min_size=1, max_size=4)


@given(changes, st.integers(0, 12), st.binary(max_size=6))
def test_a_damaged_file_is_never_accepted_where_safetensors_refuses_it(
    edits: list[tuple[int, int]], cut: int, tail: bytes
) -> None:
    content = bytearray(SEED)
    for position, value in edits:
        content[position] = value
    damaged = bytes(content[: len(content) - cut]) + tail
    _, problems = parse(damaged)
    if refusal(problems, "here", strict=True) is None:
        reference(damaged)


@given(
    st.sampled_from([b"{", b"}", b"[", b"]", b",", b'"', b":", b"-", b"0", b"1e9", b"null", b"\\u", b"true"]), st.data()
)
def test_damaged_json_never_raises(token: bytes, data: st.DataObject) -> None:
    length = int.from_bytes(SEED[:8], "little")
    position = data.draw(st.integers(8, 8 + length))
    text = SEED[8:position] + token + SEED[position : 8 + length]
    parse(raw_file(text, SEED[8 + length :]))


def test_a_header_of_nothing_but_wrong_entries_is_given_up_after_ten_thousand() -> None:
    raw = raw_file({str(number): number for number in range(20_000)})
    header, problems = parse_header(raw, len(raw), NAME)
    assert header is None
    assert len(problems) == 10_002
    assert "the rest of the header is not looked at" in problems[-1].message
