"""A checkpoint as what a save writes: tensors by pieces or whole, and the small files beside them as they are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardferry.convert.tensor import stored_tensors
from shardferry.errors import CheckpointChangedError
from shardferry.execute import repack
from shardferry.execute.open import open_checkpoint
from shardferry.execute.repack import RepackAdapter
from shardferry.storage.files import LocalFiles
from shardferry.transport.solo import SoloMover

if TYPE_CHECKING:
    from pathlib import Path

W = np.arange(12, dtype=np.float32).reshape(3, 4)


def adapter(folder: Path) -> RepackAdapter:
    save_file({"w": W}, folder / "model.safetensors")
    index = open_checkpoint(folder)
    tensors = stored_tensors(index.tensors)
    return RepackAdapter(index, tensors, rank=0, world_size=1, cast=None, open_mover=lambda _: nullcontext(SoloMover()))


def test_the_content_of_a_tensor_is_its_bytes(tmp_path: Path) -> None:
    assert adapter(tmp_path).content("w").tobytes() == W.tobytes()


def test_extras_are_copied_in_pieces_and_folders_of_such_names_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repack, "EXTRA_PIECE_BYTES", 7)
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "in" / "config.json").write_bytes(bytes(range(40)))
    (tmp_path / "in" / "notes.txt").mkdir()
    (tmp_path / "in" / "data.bin").write_bytes(b"left")
    adapter(tmp_path / "in").write_extras(tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {"config.json": bytes(range(40))}


def test_an_extra_that_shrinks_while_it_is_copied_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = adapter(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(LocalFiles, "size", lambda _, __: 10)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointChangedError, match=r"config\.json"):
        made.write_extras(tmp_path / "out")
