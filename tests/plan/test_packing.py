"""Which tensors go into which file: every one once, in order, within the limit, as evenly as tensors allow."""

from __future__ import annotations

import json
import random
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardferry.errors import InvalidInputError
from shardferry.format.header import MAX_HEADER_BYTES
from shardferry.format.hubindex import parse_hub_index
from shardferry.format.writer import TensorSpec, lay_out_file
from shardferry.plan.match import natural_key
from shardferry.plan.packing import INDEX_NAME, SINGLE_NAME, CheckpointLayout, lay_out_checkpoint, parse_size

METADATA = {"format": "pt"}
MODEL = {f"layers.{n}.{part}": TensorSpec("U8", (10,)) for n in range(12) for part in ("up", "down")}

sizes = st.lists(st.integers(0, 9) | st.just(9) | st.integers(0, 60), min_size=1, max_size=14)
limits = st.integers(1, 70)


def laid_out(
    tensors: dict[str, TensorSpec],
    limit: int,
    files_like: dict[str, str] | None = None,
    *,
    hub_limits: bool = False,
) -> CheckpointLayout:
    return lay_out_checkpoint(
        tensors, max_shard_bytes=limit, metadata=METADATA, files_like=files_like, hub_limits=hub_limits
    )


def of_sizes(num_bytes: list[int]) -> dict[str, TensorSpec]:
    return {f"t{n}": TensorSpec("U8", (size,)) for n, size in enumerate(num_bytes)}


def held(layout: CheckpointLayout) -> list[list[str]]:
    """Return the names in each file, in natural order."""
    return [sorted(file.spans, key=natural_key) for file in layout.files]


def held_sizes(layout: CheckpointLayout) -> list[list[int]]:
    return [
        [file.spans[name][1] - file.spans[name][0] for name in sorted(file.spans, key=natural_key)]
        for file in layout.files
    ]


def fewest_files(num_bytes: list[int], limit: int) -> int:
    """Return how few files the tensors fit, found by trying every way to cut."""
    ends = {0: 0}  # tensors placed: files used
    for begin in range(len(num_bytes)):
        for end in range(begin + 1, len(num_bytes) + 1):
            if sum(num_bytes[begin:end]) <= limit or end == begin + 1:
                ends[end] = min(ends.get(end, begin + end), ends[begin] + 1)
    return ends[len(num_bytes)]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (1, 1), (4096, 4096), ("17", 17), ("17b", 17), ("5GB", 5 * 10**9), ("5gb", 5 * 10**9), ("5Gb", 5 * 10**9),
        ("200 MB", 200 * 10**6), ("  3\tkb ", 3000), ("2TB", 2 * 10**12), ("1KiB", 1024), ("1mib", 2**20),
        ("1GIB", 2**30), ("2 TiB", 2**41), ("1.5GB", 1_500_000_000), (".5GiB", 2**29), ("1.GB", 10**9),
        ("0.29GB", 290_000_000), ("1.0005KB", 1000), ("1" + "0" * 25, 10**25),
    ],
)  # fmt: skip
def test_sizes_are_understood(text: int | str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "nonsense",
    [
        0, -1, "0", "0GB", "0.0001KB", "-5GB", "", " ", "GB", "5 G B", "5G", "5iB", "5PB", "5e9", "1_000", "1,5GB",
        "0x10", "inf", "nan", "٣GB", "5GBs", "1" * 5000, 1.5, 5e9, True, False, None, b"5GB", [5],
    ],
)  # fmt: skip
def test_what_is_no_size_is_refused_saying_what_is(nonsense: object) -> None:
    with pytest.raises(InvalidInputError) as refused:
        parse_size(nonsense)  # type: ignore[arg-type]  # on purpose
    assert all(word in str(refused.value) for word in ("positive", "GB", "KiB", repr(nonsense)[:50]))


@given(sizes, limits)
def test_every_tensor_is_in_one_file_in_natural_order(num_bytes: list[int], limit: int) -> None:
    tensors = of_sizes(num_bytes)
    layout = laid_out(tensors, limit)
    assert [name for names in held(layout) for name in names] == list(tensors)
    assert layout.total_size == sum(num_bytes)
    for file in layout.files:
        assert file == lay_out_file(file.name, {name: tensors[name] for name in file.spans}, METADATA)


@given(sizes, limits)
def test_no_file_is_empty_or_above_the_limit_unless_it_is_one_tensor(num_bytes: list[int], limit: int) -> None:
    for file in held_sizes(laid_out(of_sizes(num_bytes), limit)):
        assert file
        assert sum(file) <= limit or len(file) == 1


@given(sizes, limits)
def test_there_are_as_few_files_as_the_limit_allows(num_bytes: list[int], limit: int) -> None:
    assert len(laid_out(of_sizes(num_bytes), limit).files) == fewest_files(num_bytes, limit)


@given(sizes, st.integers(0, 140))
def test_files_are_even_within_one_tensor(num_bytes: list[int], above: int) -> None:
    files = held_sizes(laid_out(of_sizes(num_bytes), max(1, *num_bytes) + above))
    share, largest = sum(num_bytes) / len(files), max(num_bytes)
    assert all(abs(sum(file) - share) <= largest for file in files)


@given(st.integers(1, 200), st.integers(7, 300))
def test_equal_tensors_are_spread_evenly(count: int, limit: int) -> None:
    numbers = [len(file) for file in held(laid_out(of_sizes([7] * count), limit))]
    assert max(numbers) - min(numbers) <= 1


@given(st.permutations(list(MODEL)), st.integers(1, 300))
def test_the_order_of_the_tensors_given_does_not_matter(order: list[str], limit: int) -> None:
    assert laid_out({name: MODEL[name] for name in order}, limit) == laid_out(MODEL, limit)


def test_names_that_differ_in_leading_zeros_have_an_order_too() -> None:
    names = ["w.01", "w.1", "w.001", "w.2"]
    layouts = {laid_out(dict.fromkeys(order, TensorSpec("U8", (1,))), 2).index for order in (names, names[::-1])}
    assert len(layouts) == 1


def test_layers_follow_each_other_by_number() -> None:
    assert held(laid_out(MODEL, 80))[:2] == [
        [f"layers.{n}.{part}" for n in range(4) for part in ("down", "up")],
        [f"layers.{n}.{part}" for n in range(4, 8) for part in ("down", "up")],
    ]


def test_a_tensor_above_the_limit_is_alone_and_leaves_no_empty_file() -> None:
    assert held_sizes(laid_out(of_sizes([500, 10, 10]), 100)) == [[500], [10, 10]]
    assert held_sizes(laid_out(of_sizes([10, 500, 500, 10]), 100)) == [[10], [500], [500], [10]]
    assert held_sizes(laid_out(of_sizes([0, 500, 0]), 100)) == [[0], [500], [0]]


def test_one_file_has_the_plain_name_and_no_index() -> None:
    layout = laid_out(MODEL, 240)
    assert [file.name for file in layout.files] == [SINGLE_NAME]
    assert (layout.index_name, layout.index, layout.total_size) == (None, None, 240)


def test_several_files_are_numbered_and_the_index_is_as_transformers_writes_it() -> None:
    tensors = {**MODEL, 'odd "\\\n\x7f\u2028é🙂': TensorSpec("F4", (2, 2))}
    layout = laid_out(tensors, 100)
    assert [file.name for file in layout.files] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    weight_map = {name: file.name for file in layout.files for name in file.spans}
    wanted = {"metadata": {"total_size": 242}, "weight_map": weight_map}
    assert layout.index_name == INDEX_NAME
    assert layout.index == (json.dumps(wanted, indent=2, sort_keys=True) + "\n").encode()
    assert parse_hub_index(layout.index, INDEX_NAME) == ((weight_map, 242), [])


def test_no_tensors_make_one_file_with_an_empty_header() -> None:
    for layout in (laid_out({}, 100), laid_out({}, 100, {})):
        assert layout.files == (lay_out_file(SINGLE_NAME, {}, METADATA),)
        assert (layout.index_name, layout.total_size) == (None, 0)


def test_a_header_above_the_cap_becomes_more_files() -> None:
    name = "n" * 34_000_000
    layout = laid_out({f"{name}{n}": TensorSpec("U8", (1,)) for n in range(3)}, 1000)
    assert [len(file.spans) for file in layout.files] == [1, 2]
    assert max(len(file.header) for file in layout.files) <= MAX_HEADER_BYTES


def test_ninety_thousand_tensors_are_laid_out_quickly() -> None:
    tensors = {
        f"model.layers.{n // 768}.experts.{n % 768}.up.weight": TensorSpec("BF16", (7168, 2048)) for n in range(92_160)
    }
    start = time.process_time()
    layout = laid_out(tensors, 5 * 10**9)
    assert time.process_time() - start < 5  # 0.6 s on a quiet machine
    assert len(layout.files) == 543
    assert {len(one.spans) - len(two.spans) for one, two in pairwise(layout.files)} <= {-1, 0, 1}


def test_files_are_kept_as_in_another_checkpoint_whatever_their_sizes() -> None:
    source = {name: f"model-0000{1 + n % 3}-of-00003.safetensors" for n, name in enumerate(MODEL)}
    layout = laid_out(MODEL, 1, {**source, "not.saved": "model-00009-of-00003.safetensors"})
    assert {name: file.name for file in layout.files for name in file.spans} == source
    assert layout.index_name == INDEX_NAME


def test_a_new_tensor_goes_where_its_natural_neighbour_is() -> None:
    source = {"layers.1.w": "a.safetensors", "layers.9.w": "sub/b.safetensors"}
    names = ["bias", "layers.1.w", "layers.2.w", "layers.9.w", "layers.10.w"]
    layout = laid_out(dict.fromkeys(names, TensorSpec("U8", (1,))), 100, source)
    assert [(file.name, sorted(file.spans)) for file in layout.files] == [
        ("a.safetensors", ["bias", "layers.1.w", "layers.2.w"]),
        ("sub/b.safetensors", ["layers.10.w", "layers.9.w"]),
    ]


def test_a_single_file_of_another_checkpoint_needs_an_index_unless_readers_find_it_by_name() -> None:
    one = {"w": TensorSpec("U8", (1,))}
    assert laid_out(one, 100, {"w": f"./{SINGLE_NAME}"}).index_name is None
    assert laid_out(one, 100, {"w": "model-00001-of-00001.safetensors"}).index_name == INDEX_NAME


@pytest.mark.parametrize(
    ("files_like", "words"),
    [
        ({"a": "../x.safetensors", "b": "x.safetensors"}, ["'a'", "leads out"]),
        ({"a": "x.safetensors", "b": "/x.safetensors"}, ["'b'", "absolute"]),
        ({"a": "x.bin"}, ["'a'", "x.bin", ".safetensors"]),
        ({"other": "x.safetensors"}, ["names none of the 2 tensors", "'a'"]),
        ({}, ["names none"]),
        ({"a": SINGLE_NAME, "b": "x.safetensors"}, [SINGLE_NAME, "1 more"]),
    ],
)
def test_an_assignment_nobody_can_read_is_refused(files_like: dict[str, str], words: list[str]) -> None:
    with pytest.raises(InvalidInputError) as refused:
        laid_out(dict.fromkeys("ab", TensorSpec("U8", (1,))), 100, files_like)
    assert all(word in str(refused.value) for word in ["files_like", *words]), str(refused.value)


def test_what_cannot_be_written_is_refused_before_files_are_chosen() -> None:
    with pytest.raises(InvalidInputError, match="tensor 'w': the format has no dtype C128"):
        laid_out({"w": TensorSpec("C128", (2,))}, 100)
    with pytest.raises(InvalidInputError, match="metadata 'step'"):
        lay_out_checkpoint({}, max_shard_bytes=1, metadata={"step": 3}, files_like=None, hub_limits=False)  # type: ignore[dict-item]


def test_an_index_above_the_hubs_limit_is_a_warning_or_refused_on_request() -> None:
    tensors = {f"{n}{'x' * 1_100_000}": TensorSpec("U8", (1,)) for n in range(10)}
    warnings = laid_out(tensors, 5).warnings
    assert [INDEX_NAME in text and "10485760" in text for text in warnings] == [True]
    with pytest.raises(InvalidInputError, match=r"index.json takes 110\d+ bytes"):
        laid_out(tensors, 5, hub_limits=True)
    assert laid_out(MODEL, 100, hub_limits=True).warnings == ()


def test_an_index_nobody_could_read_back_is_refused() -> None:
    tensors = {f"{n}{'é' * 23_000_000}": TensorSpec("U8", (1,)) for n in range(2)}  # takes 6 bytes each there
    with pytest.raises(InvalidInputError, match="fewer tensors"):
        laid_out(tensors, 1)


def test_any_order_of_many_runs_keeps_the_properties() -> None:
    source = random.Random(3)  # noqa: S311 - reproducible on purpose
    for _ in range(200):
        num_bytes = [source.choice([0, 1, 5, 40, 200]) for _ in range(source.randrange(1, 40))]
        files = held_sizes(laid_out(of_sizes(num_bytes), 60))
        assert [size for file in files for size in file] == num_bytes
        assert len(files) == fewest_files(num_bytes, 60)
