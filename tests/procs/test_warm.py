"""Warming for real sharded models, on real processes that see a checkpoint through the mounts of two nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardferry.torch as sf
from shardferry.conversions import StripPrefix

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.tools.mounts import MakeMounts, SlowMounts

    from .pool import RankPool

NODES = (0, 0, 1, 1)
WIDTH = 1024
UP_BYTES = 4 * WIDTH * WIDTH * 4


def sharded_model() -> nn.Module:
    """Return FSDP2 within each node over tensor parallelism across them, on the meta device."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "fsdp"))  # ranks 0 and 1 are one node
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    return model


@pytest.fixture
def mounts(make_mounts: MakeMounts, tmp_path: Path) -> Iterator[SlowMounts]:
    tensors = {
        "0.weight": torch.arange(4 * WIDTH * WIDTH, dtype=torch.float32).reshape(4 * WIDTH, WIDTH),
        "1.weight": torch.arange(4 * WIDTH * WIDTH, dtype=torch.float32).reshape(WIDTH, 4 * WIDTH),
        "1.bias": torch.ones(WIDTH),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with make_mounts(tmp_path, nodes=2) as mounts:
        yield mounts


def warm_then_load(mounts: SlowMounts) -> tuple[sf.WarmReport, int, bool]:
    """Return what warming did, what the load after it fetched on this node, and whether the values are right."""
    rank = dist.get_rank()
    path = mounts.paths[NODES[rank]]
    model = sharded_model()
    report = sf.warm(model, path, node_of_rank=NODES)
    assert all(parameter.is_meta for parameter in model.parameters())
    if rank == 0:
        mounts.reset()
    dist.barrier()
    sf.load_model(model, path, node_of_rank=NODES)
    dist.barrier()
    fetched = mounts.counts(NODES[rank])["read_bytes"]
    weight = model.state_dict()["0.weight"]
    assert isinstance(weight, DTensor)
    first = float(weight.to_local().flatten()[0])
    return report, fetched, first == {0: 0, 1: 1024, 2: 2048, 3: 3072}[rank] * WIDTH


def test_a_load_after_warming_fetches_nothing(ranks: RankPool, mounts: SlowMounts) -> None:
    results = ranks(4).run(warm_then_load, mounts)
    for rank, (report, fetched, right) in enumerate(results):
        assert right
        assert report.ranks == ((0, 1), (0, 1), (2, 3), (2, 3))[rank]
        # Half the rows of one weight; of the other half the columns, whose holes are cheaper read than skipped.
        assert report.bytes_wanted == UP_BYTES // 2 + UP_BYTES // 2 + 4 * WIDTH
        assert report.bytes_absent == 0
        assert fetched <= UP_BYTES // 50


def warm_alone(path: str) -> tuple[sf.WarmReport, str]:
    state = {"bias": torch.zeros(WIDTH), "not.stored": torch.zeros(1)}
    message = ""
    try:
        sf.warm(state, path, stric=False)  # type: ignore[call-arg]  # a typing error
    except TypeError as error:
        message = str(error)
    return sf.warm(state, path, when_short="refuse", conversions=[StripPrefix("1.")]), message


def test_a_state_dict_under_other_names_is_warmed_for_and_a_wrong_option_refused(
    ranks: RankPool, mounts: SlowMounts
) -> None:
    for report, message in ranks(2).run(warm_alone, str(mounts.paths[0])):
        assert report.ranks == (0, 1)
        assert report.bytes_wanted == 4 * WIDTH
        assert message.startswith("unknown option stric; warming takes checkpoint_strict, conversions, cost,")
