"""The parsed index as data: it survives the way to another rank, fast."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from shardferry.format.dtypes import BITS
from shardferry.format.index import CheckpointIndex, FileInfo, Part, TensorInfo

numbers = st.integers(0, 2**63)
spans = st.tuples(numbers, numbers)
shapes = st.lists(numbers, max_size=3).map(tuple)
file_names = st.sampled_from(["a.safetensors", "ü/b.safetensors"])
parts = st.lists(st.builds(Part, file_names, spans, shapes, shapes), max_size=2).map(tuple)
infos = st.builds(TensorInfo, st.sampled_from(list(BITS)), shapes, file_names, spans, parts)
texts = st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3)
files = st.builds(FileInfo, numbers, numbers, st.text("0123456789abcdef", min_size=64, max_size=64))
indexes = st.builds(
    CheckpointIndex,
    root=st.text(max_size=5),
    tensors=st.dictionaries(st.text(max_size=5), infos, max_size=4),
    files=st.fixed_dictionaries({"a.safetensors": files, "ü/b.safetensors": files}),
    metadata=texts,
    warnings=st.lists(st.text(max_size=4), max_size=2).map(tuple),
)


@given(indexes)
def test_an_index_comes_back_from_its_bytes_in_the_same_order(index: CheckpointIndex) -> None:
    copy = CheckpointIndex.from_bytes(index.to_bytes())
    assert copy == index
    assert list(copy.tensors) == list(index.tensors)


def test_the_bytes_of_a_tensor_count_all_its_parts() -> None:
    part = Part("a", (8, 12), (0, 0), (2, 1))
    assert TensorInfo("F16", (2, 2), "a", (8, 12), (part, part)).num_bytes == 8


def test_an_index_of_a_hundred_thousand_tensors_is_packed_quickly() -> None:
    tensors = {
        f"model.layers.{n // 1000}.mlp.experts.{n}.weight": TensorInfo("F8_E4M3", (7168, n % 9), "f", (n, n + 5))
        for n in range(100_000)
    }
    index = CheckpointIndex("/ckpt", tensors, {"f": FileInfo(1, 1, "0")}, {})
    start = time.process_time()
    CheckpointIndex.from_bytes(index.to_bytes())
    assert time.process_time() - start < 4  # 0.6 s on a quiet machine
