"""Regions of tensors as plain bytes, wherever and in however many boxes they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoints import Tensor, file_of, rank_file, write_files
from tests.expensive import EXPENSIVE

from shardferry.convert.tensor import stored_tensor
from shardferry.errors import CheckpointChangedError
from shardferry.execute.gather import Part, gather
from shardferry.execute.open import open_checkpoint
from shardferry.geometry.region import Region, whole
from shardferry.testing.strategies import regions

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = (6, 4, 5)
ARRAY = np.arange(120, dtype="<u2").reshape(SHAPE)


def box_of(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    cut = ARRAY[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    return Tensor(name, "U16", sizes, cut.tobytes()), offsets


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tensor in three boxes over two files, and one in a single box."""
    return write_files(
        tmp_path_factory.mktemp("boxes"),
        {
            "shard-00001-model-00001-of-00001.safetensors": rank_file(
                box_of("cut", (0, 0, 0), (6, 4, 2)), box_of("one", (0, 0, 0), SHAPE)
            ),
            "shard-00002-model-00001-of-00001.safetensors": rank_file(box_of("cut", (0, 0, 2), (4, 4, 3))),
            "shard-00003-model-00001-of-00001.safetensors": rank_file(box_of("cut", (4, 0, 2), (2, 4, 3))),
        },
    )


def as_numpy(region: Region) -> np.ndarray:
    """Return the region's elements as NumPy picks them."""
    return ARRAY[np.ix_(*([i for a, b in dim for i in range(a, b)] for dim in region.dims))]


@EXPENSIVE
@given(data=st.data())
def test_any_region_comes_in_row_major_order(checkpoint: Path, data: st.DataObject) -> None:
    index = open_checkpoint(checkpoint)
    wanted = {key: (name, data.draw(regions(SHAPE))) for key, name in (("a", "cut"), ("b", "one"), ("c", "cut"))}
    parts = {
        key: Part(stored_tensor(name, index.tensors[name]), region, np.zeros(region.num_elements * 2, np.uint8))
        for key, (name, region) in wanted.items()
    }
    gather(index, parts)
    for key, (_, region) in wanted.items():
        assert parts[key].out.tobytes() == as_numpy(region).tobytes()


def test_a_file_that_changed_since_it_was_opened_is_refused(tmp_path: Path) -> None:
    content = file_of([Tensor("w", "U8", (3,), b"abc")])
    index = open_checkpoint(write_files(tmp_path, {"model.safetensors": content}))
    write_files(tmp_path, {"model.safetensors": content + b"d"})
    with pytest.raises(CheckpointChangedError, match=r"model\.safetensors"):
        gather(index, {"w": Part(stored_tensor("w", index.tensors["w"]), whole((3,)), np.zeros(3, np.uint8))})
