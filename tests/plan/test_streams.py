"""Plans for places where a file is written from its beginning to its end."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardferry.format.dtypes import BITS
from shardferry.format.writer import FileLayout, TensorSpec, lay_out_file
from shardferry.geometry.spans import collapse
from shardferry.plan.catalogue import Held
from shardferry.plan.streams import plan_owners, plan_streams

SHAPES = st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=6)


def laid_out(shapes: list[tuple[int, ...]], num_files: int, dtype: str) -> list[FileLayout]:
    files = []
    for at in range(num_files):
        specs = {f"t{i}": TensorSpec(dtype, shape) for i, shape in enumerate(shapes) if i % num_files == at}
        files.append(lay_out_file(f"{at}.safetensors", specs, {}))
    return files


@given(SHAPES, st.integers(1, 3), st.integers(1, 3), st.integers(8, 400), st.sampled_from(["F32", "I8", "F4"]))
def test_every_owner_gets_its_files_from_the_first_byte_to_the_last(
    shapes: list[tuple[int, ...]], num_files: int, world_size: int, round_bytes: int, dtype: str
) -> None:
    shapes = [(*shape[:2], shape[2] * 2) for shape in shapes]  # a packed dtype ends on a byte
    files = laid_out(shapes, num_files, dtype)
    owners = plan_owners(files, world_size)
    catalogue = {f"t{i}": Held(dtype, shape, None, (0,)) for i, shape in enumerate(shapes)}

    rounds = plan_streams(catalogue, files, dict.fromkeys(catalogue, dtype), owners=owners, round_bytes=round_bytes)

    at = {file.name: len(file.header) for file in files}
    for boxes in rounds:
        taken = np.zeros(world_size, int)
        for box in boxes:
            sizes, dims = collapse(box.region, catalogue[box.name].shape, BITS[dtype])
            ((start, stop),) = dims[-1]
            assert all(len(dim) == 1 for dim in dims)
            offset = 0
            for size, ((begin, _),) in zip(sizes, dims, strict=True):
                offset = offset * size + begin
            length = int(np.prod([b - a for ((a, b),) in dims]))
            assert (stop - start) <= length
            assert box.start + offset == at[box.file]
            assert box.owner == owners[box.file]
            at[box.file] += length
            taken[box.owner] += length
        assert max(taken) <= max(round_bytes, 16)  # four elements of a row are not cut
    assert at == {file.name: file.size for file in files}


def test_files_are_dealt_out_so_that_every_rank_writes_about_as_much() -> None:
    files = [FileLayout(f"{at}", b"", {}, size) for at, size in enumerate([10, 10, 4, 3, 3])]

    owners = plan_owners(files, 3)

    assert owners == {"0": 0, "1": 1, "2": 2, "3": 2, "4": 2}
