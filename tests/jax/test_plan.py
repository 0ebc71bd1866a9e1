"""What is told of a load beforehand, and done for it, in one process with eight devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import shardferry.jax as sf
from shardferry import MismatchError

if TYPE_CHECKING:
    from pathlib import Path


def target() -> dict[str, jax.ShapeDtypeStruct]:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    return {"w": jax.ShapeDtypeStruct((2, 64, 64), np.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "a")))}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file({f"w{at}": np.ones((64, 64), np.float32) for at in (0, 1)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_load_is_told_beforehand_as_it_reads(checkpoint: Path) -> None:
    estimate = sf.plan_load(checkpoint, target(), names={"w": ["w0", "w1"]})
    assert "independent" in str(estimate)
    with pytest.raises(MismatchError):
        sf.plan_load(checkpoint, target())


def test_what_a_load_will_read_is_warmed(checkpoint: Path) -> None:
    report = sf.warm(checkpoint, target(), names={"w": ["w0", "w1"]})
    assert sum(file.bytes_wanted for file in report.files) == 2 * 64 * 64 * 4
