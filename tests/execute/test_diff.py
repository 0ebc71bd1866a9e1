"""Two checkpoints compared: what differs, where first, and within bounded memory."""

from __future__ import annotations

import random
import tracemalloc
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.checkpoints import Tensor, file_of, rank_file, sharded, tensor, write_files

from shardferry.errors import CheckpointChangedError
from shardferry.execute.diff import ROUND_BYTES, CheckpointDiff, Element, diff_checkpoints, diff_headers
from shardferry.execute.open import open_checkpoint
from shardferry.format.dtypes import BITS
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardferry.execute.report import Progress

ONE, TWO, THREE = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))
RANKS = [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in range(1, 5)]
LAYERS = [tensor(f"layers.{n}.w", dtype, (4, 6)) for n, dtype in enumerate(BITS)]
SINGLE = {"model.safetensors": file_of(LAYERS)}


def compared(folder: Path, a: Mapping[str, bytes], b: Mapping[str, bytes]) -> CheckpointDiff:
    one = open_checkpoint(write_files(folder / "a", a))
    two = open_checkpoint(write_files(folder / "b", b))
    return diff_checkpoints(one, two, on_progress=None)


def flipped(one: Tensor, *bits: int) -> Tensor:
    """Return the tensor with some bits changed, counted from the lowest of its first byte."""
    data = bytearray(one.data)
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    return one._replace(data=bytes(data))


def boxes_of(name: str, array: np.ndarray, rows: int, columns: int) -> dict[str, bytes]:
    """Return rank files that hold a U8 tensor in four boxes, cut at a row and a column."""
    cuts = [(0, 0, rows, columns), (0, columns, rows, None), (rows, 0, None, columns), (rows, columns, None, None)]
    contents = {}
    for file, (top, left, bottom, right) in zip(RANKS, cuts, strict=True):
        cut = array[top:bottom, left:right]
        contents[file] = rank_file((Tensor(name, "U8", cut.shape, cut.tobytes()), (top, left, *[0] * (array.ndim - 2))))
    return contents


def test_the_same_tensors_are_the_same_wherever_they_lie(tmp_path: Path) -> None:
    spread = sharded({ONE: LAYERS[7:], TWO: LAYERS[3:7], THREE: LAYERS[:3]})
    found = compared(tmp_path, SINGLE, spread)
    assert found.equal
    assert set(found.alike) == {one.name for one in LAYERS}


def test_names_dtypes_and_shapes_are_told_apart_in_natural_order(tmp_path: Path) -> None:
    same = tensor("same", "I8", (3,))
    a = [
        same,
        tensor("w.10", "F32", (2,)),
        tensor("w.9", "F32", (2,)),
        tensor("x", "F32", (2, 3)),
        tensor("y", "I8", (4,)),
    ]
    b = [same, tensor("z", "F32", (2,)), tensor("x", "BF16", (2, 3)), tensor("y", "I8", (2, 2))]
    found = compared(tmp_path, {"a.safetensors": file_of(a)}, {"b.safetensors": file_of(b)})
    assert not found.equal
    assert (found.only_in_a, found.only_in_b) == (("w.9", "w.10"), ("z",))
    assert (found.dtypes, found.shapes) == ({"x": ("F32", "BF16")}, {"y": ((4,), (2, 2))})
    assert (found.contents, found.alike) == ({}, ("same",))


@pytest.mark.parametrize("one", LAYERS, ids=lambda one: one.dtype)
def test_the_first_differing_element_is_found_in_every_dtype(one: Tensor, tmp_path: Path) -> None:
    bits, source = BITS[one.dtype], random.Random(one.dtype)  # noqa: S311 - reproducible on purpose
    chosen = [source.randrange(24 * bits) for _ in range(2)]
    changed = [flipped(other, *chosen) if other == one else other for other in LAYERS]
    offset = min(chosen) // bits
    found = compared(tmp_path, SINGLE, {"model.safetensors": file_of(changed)})
    assert found.contents == {one.name: Element(offset, divmod(offset, 6))}


def test_scalars_and_tensors_without_elements_are_compared(tmp_path: Path) -> None:
    scalar, empty = tensor("scalar", "F16", ()), tensor("empty", "F16", (3, 0))
    a = {"model.safetensors": file_of([scalar, empty])}
    assert compared(tmp_path / "1", a, a).equal
    found = compared(tmp_path / "2", a, {"model.safetensors": file_of([flipped(scalar, 9), empty])})
    assert found.contents == {"scalar": Element(0, ())}


def test_not_a_number_is_equal_to_itself_and_zero_is_not_to_minus_zero(tmp_path: Path) -> None:
    a = Tensor("w", "F32", (3,), np.array([np.nan, 0, 0], "<f4").tobytes())
    b = Tensor("w", "F32", (3,), np.array([np.nan, 0, -0.0], "<f4").tobytes())
    found = compared(tmp_path, {"model.safetensors": file_of([a])}, {"model.safetensors": file_of([b])})
    assert found.contents == {"w": Element(2, (2,))}


@pytest.mark.parametrize("shape", [(5, 7), (3, 4, 6), (2, 3, 0)])
def test_a_tensor_in_boxes_is_compared_with_a_whole_one(shape: tuple[int, ...], tmp_path: Path) -> None:
    source = np.random.default_rng(1)
    array = source.integers(0, 256, shape, np.uint8)
    single = {"model.safetensors": file_of([Tensor("w", "U8", shape, array.tobytes())])}
    assert compared(tmp_path, single, boxes_of("w", array, 1, 2)).equal
    for trial in range(min(20, array.size)):
        changed = array.copy()
        places = source.integers(0, array.size, 2)
        changed.reshape(-1)[places] ^= np.uint8(source.integers(1, 256))
        first = int(np.flatnonzero(array != changed)[0]) if (array != changed).any() else None
        for order in (1, -1):
            sides = (single, boxes_of("w", changed, 2, 1))[::order]
            offsets = [at.offset for at in compared(tmp_path / f"{trial}{order}", *sides).contents.values()]
            assert offsets == ([] if first is None else [first])


# Rows longer than a round, rows of which some fit, one row, and one dim.
@pytest.mark.parametrize("shape", [(2, 9, MIB), (20, 3, MIB // 3), (1, 20 * MIB), (20 * MIB,)])
@pytest.mark.parametrize("at", [0.3, 0.99])
def test_tensors_larger_than_a_round_are_compared_in_bounded_memory(
    shape: tuple[int, ...], at: float, tmp_path: Path
) -> None:
    array = np.random.default_rng(2).integers(0, 256, shape, np.uint8)
    single = {"model.safetensors": file_of([Tensor("w", "U8", shape, array.tobytes()), tensor("z", "U8", (3,))])}
    place = int(array.size * at)
    array.reshape(-1)[[place, array.size - 1]] ^= 1
    if len(shape) == 3:
        other = boxes_of("w", array, 1, 1)
        other[RANKS[0]] = rank_file(
            (Tensor("w", "U8", (1, 1, shape[2]), array[:1, :1].tobytes()), (0, 0, 0)), (tensor("z", "U8", (3,)), (0,))
        )
    else:
        other = {"model.safetensors": file_of([Tensor("w", "U8", shape, array.tobytes()), tensor("z", "U8", (3,))])}
    one = open_checkpoint(write_files(tmp_path / "a", single))
    two = open_checkpoint(write_files(tmp_path / "b", other))
    tracemalloc.start()
    try:
        found = diff_checkpoints(one, two, on_progress=None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    position = tuple(int(n) for n in np.unravel_index(place, shape))
    assert found.contents == {"w": Element(place, position)}
    assert peak < 5 * ROUND_BYTES  # two buffers, what compares them, and boxes on their way into one


def test_progress_counts_the_bytes_compared_up_to_all_of_them(tmp_path: Path) -> None:
    tensors = [tensor("big", "U8", (20 * MIB,)), tensor("small", "U8", (5,))]
    contents = {"model.safetensors": file_of(tensors)}
    index = open_checkpoint(write_files(tmp_path, contents))
    steps: list[Progress] = []
    diff_checkpoints(index, index, on_progress=steps.append)
    done = [step.bytes_done for step in steps]
    assert done == sorted(done)
    assert len(done) == 3
    assert {step.bytes_total for step in steps} == {done[-1]} == {20 * MIB + 5}


def test_many_small_tensors_are_compared_over_several_rounds(tmp_path: Path) -> None:
    tensors = [tensor(f"w.{n}", "U8", (3,)) for n in range(5000)]
    a = {"model.safetensors": file_of(tensors)}
    b = {"model.safetensors": file_of([flipped(tensors[0], 8), *tensors[1:-1], flipped(tensors[-1], 23)])}
    assert compared(tmp_path, a, b).contents == {"w.0": Element(1, (1,)), "w.4999": Element(2, (2,))}


def test_headers_alone_can_be_compared(tmp_path: Path) -> None:
    changed = {"model.safetensors": file_of([flipped(LAYERS[0], 0), *LAYERS[1:]])}
    one = open_checkpoint(write_files(tmp_path / "a", SINGLE))
    two = open_checkpoint(write_files(tmp_path / "b", changed))
    assert diff_headers(one, two).equal


def test_a_file_that_changes_meanwhile_is_an_error_not_a_difference(tmp_path: Path) -> None:
    one = open_checkpoint(write_files(tmp_path / "a", SINGLE))
    two = open_checkpoint(write_files(tmp_path / "b", SINGLE))
    write_files(tmp_path / "b", {"model.safetensors": SINGLE["model.safetensors"][:-1]})
    with pytest.raises(CheckpointChangedError, match=r"model\.safetensors"):
        diff_checkpoints(one, two, on_progress=None)


def test_no_tensors_are_the_same(tmp_path: Path) -> None:
    empty = {"model.safetensors": file_of([])}
    assert compared(tmp_path, empty, empty) == CheckpointDiff((), (), {}, {}, {}, ())
