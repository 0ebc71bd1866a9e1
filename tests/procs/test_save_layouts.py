"""Whatever the layout and the world size, the files are the same, and they are what safetensors would have written."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import shardferry.torch as sf
from shardferry.errors import RankFailedError, ShardingError
from shardferry.execute.costs import mount_below, preset_of, remember
from shardferry.plan.costmodel import PRESETS

from .test_load_layouts import (
    SHARDERS,
    Block,
    Experts,
    Tied,
    local,
    numbered,
    shard_fsdp,
    shard_fsdp_tp,
    shard_tp,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.distributed.tensor import Placement

    from .pool import RankPool


def block(rows: int) -> Block:
    """Return a block whose tensors are numbered."""
    model = Block(rows)
    model.load_state_dict(numbered(model))
    return model


def save_sharded(folder: str, rows: int, sharder: Callable[[nn.Module], None] | None, limit: str) -> int:
    model = block(rows)
    if sharder is not None:
        sharder(model)
    report = sf.save_model(model, folder, max_shard_size=limit)
    return report.total.bytes_written


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def reference(folder: Path, rows: int) -> bytes:
    folder.mkdir()
    save_file(numbered(Block(rows)), folder / "model.safetensors", {"format": "pt"})
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("sharder", SHARDERS, ids=lambda sharder: sharder.__name__)
def test_one_file_is_what_safetensors_writes(
    ranks: RankPool, tmp_path: Path, sharder: Callable[[nn.Module], None]
) -> None:
    written = ranks(4).run(save_sharded, str(tmp_path / "out"), 10, sharder, "5GB")
    whole = sum(tensor.numel() * tensor.element_size() for tensor in numbered(Block()).values())
    assert set(written) == {whole}, "every byte is written once"
    assert contents(tmp_path / "out") == {"model.safetensors": reference(tmp_path / "reference", 10)}


@pytest.mark.parametrize(
    ("world_size", "sharder"), [(1, None), (2, shard_fsdp), (2, shard_tp), (3, shard_fsdp), (8, shard_fsdp_tp)]
)
def test_several_files_do_not_depend_on_who_saves(
    ranks: RankPool, tmp_path: Path, world_size: int, sharder: Callable[[nn.Module], None] | None
) -> None:
    ranks(world_size).run(save_sharded, str(tmp_path / "out"), 9, sharder, "300B")
    ranks(1).run(save_sharded, str(tmp_path / "alone"), 9, None, "300B")
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    want = numbered(Block(9))
    assert set(index["weight_map"]) == set(want)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in want.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], want[name])


def save_placed(folder: str, mesh_shape: tuple[int, ...], placements: list[Placement], shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape).float()
    sf.save_state_dict({"t": distribute_tensor(whole, mesh, placements)}, folder)


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "shape"),
    [
        ((4,), [Shard(0)], (7, 3)),
        ((4,), [Shard(1)], (130, 7)),
        ((4,), [Shard(-1)], (3, 200, 5)),
        ((4,), [Replicate()], (1000, 600)),
        ((2, 2), [Shard(1), Shard(0)], (130, 9)),
        ((2, 2), [Replicate(), Shard(1)], (500, 600)),
        ((2, 2), [Shard(0), Shard(0)], (5,)),
        ((4,), [Shard(0)], (0, 4)),
        ((4,), [Replicate()], ()),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], (12, 4)),
        ((2, 1, 2), [Shard(0), Shard(1), Shard(2)], (4, 6, 5)),
    ],
)
def test_every_placement_saves_the_whole_tensor(
    ranks: RankPool, tmp_path: Path, mesh_shape: tuple[int, ...], placements: list[Placement], shape: tuple[int, ...]
) -> None:
    ranks(4).run(save_placed, str(tmp_path / "out"), mesh_shape, placements, shape)
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape).float()
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["t"], whole)


def save_experts(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = Experts(2)
    model.cube.data = torch.arange(60.0).reshape(2, 6, 5) + 60 * dist.get_rank()
    sf.save_model(model, folder, shardings={"cube": (mesh, [Shard(0)])})


def test_plain_experts_that_differ_by_rank_save_with_a_sharding_given(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(save_experts, str(tmp_path / "out"))
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["cube"], torch.arange(120.0).reshape(4, 6, 5))


def save_experts_without_telling(folder: str) -> str:
    model = Experts(2)
    model.cube.data += dist.get_rank()
    with pytest.raises(ShardingError, match="cube is a plain tensor, but ranks 0 and 1 hold different bytes"):
        sf.save_model(model, folder)
    return "refused"


def test_plain_tensors_that_differ_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2).run(save_experts_without_telling, str(tmp_path / "out")) == ["refused"] * 2
    assert list(tmp_path.iterdir()) == []


def save_drifted(folder: str, replicas: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": DTensor.from_local(torch.zeros(4) + dist.get_rank(), mesh, [Replicate()], run_check=False)}
    try:
        sf.save_state_dict(state, folder, replicas=replicas)  # type: ignore[arg-type]
    except ShardingError as error:
        return str(error)
    return "saved"


def test_declared_replicas_are_trusted_or_checked(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2).run(save_drifted, str(tmp_path / "out"), "trust") == ["saved"] * 2
    for message in ranks(2).run(save_drifted, str(tmp_path / "other"), "check"):
        assert "w is declared replicated, but ranks 0 and 1 hold different bytes" in message
    assert not (tmp_path / "other").exists()


def save_stages(folder: str) -> None:
    rank = dist.get_rank()
    meshes = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    mesh = meshes[rank // 2]
    tensor = torch.arange(10.0) + (0 if rank < 2 else 100)
    sf.save_state_dict({f"layer{rank // 2}": distribute_tensor(tensor, mesh, [Shard(0)])}, folder)


def test_pipeline_stages_make_one_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    ranks(4).run(save_stages, str(tmp_path / "out"))
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor[0].item() for name, tensor in saved.items()} == {"layer0": 0, "layer1": 100}


def save_tied(folder: str) -> None:
    model = Tied()
    fully_shard(model)
    sf.save_model(model, folder)


def test_a_tied_weight_is_written_once(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(save_tied, str(tmp_path / "out"))
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"embed.weight"}


def save_partial(folder: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    state: dict[str, torch.Tensor] = {"w": DTensor.from_local(torch.zeros(4), mesh, [Partial()], run_check=False)}
    with pytest.raises(ShardingError, match="partial"):
        sf.save_state_dict(state, folder)
    return "refused"


def test_unreduced_values_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2).run(save_partial, str(tmp_path / "out")) == ["refused"] * 2


def save_cast(folder: str) -> None:
    model = block(10)
    shard_tp(model)
    sf.save_model(model, folder, dtype=torch.bfloat16)


def test_floats_are_cast_while_writing_and_nothing_else(ranks: RankPool, tmp_path: Path) -> None:
    ranks(4).run(save_cast, str(tmp_path / "out"))
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        want = numbered(Block())[name]
        assert torch.equal(tensor, want.to(torch.bfloat16) if want.is_floating_point() else want)


def save_over(folder: str, on_existing: str) -> str:
    model = block(10)
    shard_fsdp(model)
    try:
        sf.save_model(model, folder, on_existing=on_existing)  # type: ignore[arg-type]
    except FileExistsError:
        return "refused"
    except RankFailedError as error:
        return "told" if "already holds a checkpoint" in str(error) else str(error)
    return "saved"


def test_a_checkpoint_is_refused_by_all_ranks_or_replaced_as_a_whole(ranks: RankPool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    save_file({"old": torch.ones(3)}, out / "model.safetensors")
    (out / "config.json").write_text("{}")
    before = contents(out)
    assert ranks(2).run(save_over, str(out), "refuse") == ["refused", "told"]
    assert contents(out) == before
    assert ranks(2).run(save_over, str(out), "replace") == ["saved"] * 2
    assert set(contents(out)) == {"config.json", "model.safetensors"}
    assert "old" not in load_file(out / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def fail_on_rank_one(folder: str, kind: str) -> str:
    model = block(10)
    shard_tp(model)

    def progress(step: sf.Progress) -> None:
        if step.rank == 1:
            raise {"interrupt": KeyboardInterrupt, "memory": MemoryError, "plain": RuntimeError}[kind]

    try:
        sf.save_model(model, folder, on_progress=progress)
    except RankFailedError as error:
        return f"{error.rank} {error.step}"
    except (KeyboardInterrupt, MemoryError, RuntimeError):
        return "own"
    return "saved"


@pytest.mark.parametrize("kind", ["interrupt", "memory", "plain"])
def test_one_ranks_failure_publishes_nothing_and_leaves_nothing(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    told = ranks(4).run(fail_on_rank_one, str(tmp_path / "out"), kind)
    assert told == ["1 write tensors", "own", "1 write tensors", "1 write tensors"]
    assert list(tmp_path.iterdir()) == []


def save_elsewhere(folder: str) -> str:
    """Each rank saves to "out" from a working directory of its own."""
    here = Path(folder, f"rank-{dist.get_rank()}")
    here.mkdir()
    before = Path.cwd()
    os.chdir(here)
    try:
        sf.save_state_dict({"w": torch.zeros(2)}, "out")
    except ValueError as error:
        return str(error)
    finally:
        os.chdir(before)
    return "saved"


def test_ranks_in_different_working_directories_are_told_where_each_would_save(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(2).run(save_elsewhere, str(tmp_path))
    assert first == second
    assert f"rank 0 to {tmp_path}/rank-0/out, rank 1 to {tmp_path}/rank-1/out. Give every rank the same" in first
    assert [path for path in tmp_path.rglob("*") if path.parent != tmp_path] == []


def save_telling_how(folder: str, caches: tuple[str, str]) -> str:
    """Save rows and columns; each rank believes what its own cache says of the storage."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(128 * 512.0).reshape(128, 512)
    tensors = {name: distribute_tensor(whole, mesh, [Shard(dim)]) for dim, name in enumerate(("rows", "columns"))}
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = caches[dist.get_rank()]
    try:
        return sf.save_state_dict(tensors, folder).strategy
    finally:
        del os.environ["XDG_CACHE_HOME"]
        os.environ.update({} if before is None else {"XDG_CACHE_HOME": before})


def test_rank_zeros_cost_model_chooses_how_to_write_and_the_report_says_why(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a request costs little, thin rows are written by their holders; the file is the same."""
    empty, probed = str(tmp_path / "empty"), str(tmp_path / "probed")
    monkeypatch.setenv("XDG_CACHE_HOME", probed)
    mount = mount_below(tmp_path)
    remember(mount, replace(PRESETS["local"], seek_bytes=1024, source="measured for this test"))
    told = ranks(2).run(save_telling_how, str(tmp_path / "a"), (empty, probed))
    if preset_of(mount) == PRESETS["local"]:
        first, second = told
        assert first == second
        assert first.startswith("exchange for 1 of 2 tensors: rows of 1.00 KiB are below ")
        assert first.endswith("(preset local); holders write the others")
    told = ranks(2).run(save_telling_how, str(tmp_path / "b"), (probed, empty))
    assert told[0] == told[1]
    assert told[0].startswith("direct: holders write their own bytes, none in many rows below ")
    assert told[0].endswith("(measured for this test)")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def round_trip(folder: str) -> list[str]:
    """Save under one layout, load under another."""
    model = block(9)
    shard_fsdp_tp(model)
    sf.save_model(model, folder, max_shard_size="400B")
    with torch.device("meta"):
        again = Block(9)
    again.cache = torch.zeros(4)
    shard_fsdp(again)
    sf.load_model(again, folder)
    want = numbered(Block(9))
    return [
        name
        for name, tensor in again.state_dict().items()
        if not torch.equal(tensor.full_tensor() if isinstance(tensor, DTensor) else local(tensor), want[name])
    ]


def test_what_one_layout_saves_another_loads(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(4).run(round_trip, str(tmp_path / "out")) == [[]] * 4
