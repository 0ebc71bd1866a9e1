"""A plan's copies read every wanted byte, land none twice, and put each where it belongs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardferry.convert.ops import Stored, transpose
from shardferry.errors import ShardingError
from shardferry.format.index import CheckpointIndex, FileInfo, Part, TensorInfo
from shardferry.geometry.region import Region, box, whole
from shardferry.geometry.spans import region_to_spans
from shardferry.plan.load import Copy, LoadPlan, Wanted, plan_load, split_copy
from shardferry.testing.strategies import regions, shapes

HEADER = 24


def index_of(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> CheckpointIndex:
    """Return an index of one file that holds the tensors, U8 or F4, one after another."""
    infos, at = {}, HEADER
    for name, (dtype, shape) in tensors.items():
        size = int(np.prod(shape, dtype=np.int64)) * (4 if dtype == "F4" else 8) // 8
        infos[name] = TensorInfo(dtype, shape, "f", (at, at + size))
        at += size
    return CheckpointIndex("/", infos, {"f": FileInfo(at, HEADER, "")}, {})


def execute(plan: LoadPlan, file: np.ndarray) -> dict[str, np.ndarray]:
    """Carry out a plan of U8 tensors the plainest way; an element filled twice fails."""
    out = {}
    for tensor in plan.tensors:
        local = np.full(tensor.local_shape, -1, np.int64)
        for copy in tensor.copies:
            fill(local, copy, file)
        out[tensor.name] = local
    return out


def fill(local: np.ndarray, copy: Copy, file: np.ndarray) -> None:
    spans = region_to_spans(copy.region, copy.shape, 8) + copy.start
    read = np.concatenate([file[start:stop] for start, stop in spans.tolist()] or [file[:0]])
    place = tuple(slice(*interval) for interval in copy.target)
    assert (local[place] == -1).all()
    local[place] = read.reshape(copy.region.shape).transpose(copy.axes)


@given(st.data(), st.integers(1, 40))
def test_every_wanted_byte_is_read_and_none_lands_twice(data: st.DataObject, max_bytes: int) -> None:
    wanted_shapes = {f"t{i}": data.draw(shapes()) for i in range(data.draw(st.integers(1, 3)))}
    index = index_of({name: ("U8", shape) for name, shape in wanted_shapes.items()})
    file = np.random.default_rng(0).integers(0, 256, index.files["f"].size)
    held = {name: data.draw(regions(shape)) for name, shape in wanted_shapes.items()}
    plan = plan_load(index, [Wanted(name, Stored(name, wanted_shapes[name]), region) for name, region in held.items()])
    assert plan.bytes_wanted == sum(region.num_elements for region in held.values())
    got = execute(plan, file)
    for name, region in held.items():
        start, stop = index.tensors[name].span
        array = file[start:stop].reshape(wanted_shapes[name])
        for dim, intervals in enumerate(region.dims):
            array = np.take(array, np.array([i for a, b in intervals for i in range(a, b)], np.int64), axis=dim)
        assert np.array_equal(got[name], array)
        for copy in next(tensor.copies for tensor in plan.tensors if tensor.name == name):
            pieces = list(split_copy(copy, max_bytes))
            assert all(piece.num_bytes <= max(max_bytes, 4) for piece in pieces)
            again = np.full(region.shape, -1, np.int64)
            for piece in pieces:
                fill(again, piece, file)
            assert np.array_equal(again, array)


def test_a_piece_of_a_row_is_never_larger_than_its_buffer() -> None:
    index = index_of({"w": ("U8", (100,))})
    (tensor,) = plan_load(index, [Wanted("w", Stored("w", (100,)), whole((100,)))]).tensors
    assert max(piece.num_bytes for piece in split_copy(tensor.copies[0], 9)) == 8


def test_tensors_are_planned_in_file_order() -> None:
    index = index_of({"b": ("U8", (4,)), "a": ("U8", (4,))})
    plan = plan_load(index, [Wanted(name, Stored(name, (4,)), whole((4,))) for name in ("a", "b")])
    assert [tensor.name for tensor in plan.tensors] == ["b", "a"]
    assert [copy.first_byte for tensor in plan.tensors for copy in tensor.copies] == [HEADER, HEADER + 4]


def test_a_tensor_in_boxes_is_read_from_the_files_of_those_it_needs() -> None:
    parts = (Part("f", (8, 12), (0, 0), (2, 2)), Part("g", (8, 12), (2, 0), (2, 2)))
    index = CheckpointIndex(
        "/",
        {"w": TensorInfo("U8", (4, 2), "f", (8, 12), parts)},
        {"f": FileInfo(12, 8, ""), "g": FileInfo(12, 8, "")},
        {},
    )
    (tensor,) = plan_load(index, [Wanted("w", Stored("w", (4, 2)), box((3, 0), (1, 2)))]).tensors
    assert [(copy.file, copy.first_byte, copy.num_bytes) for copy in tensor.copies] == [("g", 10, 2)]


def test_a_region_that_cuts_a_packed_byte_is_refused_with_the_tensors_name() -> None:
    index = index_of({"w": ("F4", (2, 8))})
    with pytest.raises(ShardingError, match=r"w: .*byte"):
        plan_load(index, [Wanted("w", Stored("w", (2, 8)), Region((((0, 2),), ((3, 6),))))])
    with pytest.raises(ShardingError, match="w: F4 packs"):
        plan_load(index, [Wanted("w", transpose(Stored("w", (2, 8)), (1, 0)), whole((8, 2)))])


def test_a_local_tensor_without_elements_needs_no_copy() -> None:
    index = index_of({"w": ("U8", (2, 8))})
    (tensor,) = plan_load(index, [Wanted("w", Stored("w", (2, 8)), box((2, 0), (0, 8)))]).tensors
    assert (tensor.local_shape, tensor.copies) == ((0, 8), ())
