"""What is told of a load beforehand, and done for it, in real JAX jobs of several processes with several devices."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import shardferry.jax as sf

if TYPE_CHECKING:
    from pathlib import Path

    from .pool import JaxJobs

SHAPE = (64, 64)


def warm(path: str, order: list[int]) -> int:
    mesh = Mesh(np.array(jax.devices())[order].reshape(2, 4), ("a", "b"))
    cut = NamedSharding(mesh, PartitionSpec("a", "b"))
    report = sf.warm(path, {"w": jax.ShapeDtypeStruct((2, *SHAPE), np.float32, sharding=cut)}, names={"w": ["x", "y"]})
    return sum(file.bytes_wanted for file in report.files)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 4, 3, 5, 6, 7]], ids=["in rows", "strewn"])
def test_what_all_processes_of_a_node_want_is_warmed(jax_job: JaxJobs, tmp_path: Path, order: list[int]) -> None:
    save_file({name: np.ones(SHAPE, np.float32) for name in "xy"}, tmp_path / "model.safetensors")
    assert jax_job(2, 4).run(warm, str(tmp_path), order) == [2 * 64 * 64 * 4] * 2


def plan(path: str) -> tuple[str, dict[str, Any]]:
    cut = NamedSharding(Mesh(np.array(jax.devices()), ("all",)), PartitionSpec("all"))
    target = {name: jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=cut) for name in "xy"}
    estimate = sf.plan_load(path, target, node_of_rank=[0] * jax.process_count())
    return estimate.chosen, json.loads(estimate.to_json())


def test_all_processes_are_told_the_same_plan(jax_job: JaxJobs, tmp_path: Path) -> None:
    save_file({name: np.ones(SHAPE, np.float32) for name in "xy"}, tmp_path / "model.safetensors")
    told = jax_job(2, 4).run(plan, str(tmp_path))
    assert told[0] == told[1]
    assert told[0][0] == "independent"
