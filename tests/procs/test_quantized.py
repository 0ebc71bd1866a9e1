"""Quantized weights of sharded models: decoded part by part as a whole is, or kept as they are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardferry.torch as sf
from shardferry.conversions import Convert, Dequantize

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from .pool import RankPool

MEMBERS = ("{x*}.weight", "{x*}.weight_scale", "{x*}.weight_scale_2")
NVFP4 = Convert(MEMBERS, ("{x*}.weight",), (Dequantize("nvfp4"),), partial=True)
# The values of the 4-bit float E2M1 (OCP Microscaling Formats 1.0, 5.3.3).
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
GROUP = 16


class Layers(nn.Module):
    """Two layers, of which 4 ranks that cut columns hold 16 and 12: the latter begin and end within a group."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(48, 64, dtype=torch.bfloat16)


class Experts(nn.Module):
    """Experts whose weights stay as they are stored: two codes to a byte, and a scale for 32 of them."""

    def __init__(self) -> None:
        super().__init__()
        for name, rows, columns in (("gate_up_proj", 48, 64), ("down_proj", 64, 96)):
            blocks, scales = (4, rows, columns // 32, 16), (4, rows, columns // 32)
            for kind, shape in (("blocks", blocks), ("scales", scales)):
                value = torch.empty(shape, dtype=torch.uint8)
                self.register_parameter(f"{name}_{kind}", nn.Parameter(value, requires_grad=False))


def shard(model: nn.Module, kind: str, dim: int) -> None:
    """Cut every parameter's `dim` over ranks of tensor parallelism, and all parameters by FSDP2, or one of both."""
    if kind == "tp":
        cut(model, init_device_mesh("cpu", (4,)), dim)
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    if kind == "fsdp+tp":
        cut(model, mesh["tp"], dim)
    fully_shard(model, mesh=mesh["fsdp"])


def cut(model: nn.Module, mesh: DeviceMesh, dim: int) -> None:
    for module in model.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(value.detach(), mesh, [Shard(min(dim, value.ndim - 1))])
            module.register_parameter(name, nn.Parameter(placed, value.requires_grad))


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    state = {name: value.detach() for name, value in model.named_parameters()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def nvfp4_checkpoint() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    stored = {"down.bias": torch.randn(64, generator=random).bfloat16()}
    for name, rows, columns in (("up", 48, 64), ("down", 64, 48)):
        scales = torch.rand((rows, columns // GROUP), generator=random) * 400
        stored[f"{name}.weight"] = torch.randint(256, (rows, columns // 2), generator=random, dtype=torch.uint8)
        stored[f"{name}.weight_scale"] = scales.to(torch.float8_e4m3fn)
        stored[f"{name}.weight_scale_2"] = torch.rand((), generator=random) / 100
    return stored


def decoded(stored: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Decode a whole weight: the low four bits of a byte come first, the highest bit of a code is its sign."""
    packed = stored[f"{name}.weight"]
    codes = torch.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1).long()
    values = torch.where(codes >= 8, -E2M1[codes % 8], E2M1[codes % 8])
    scales = stored[f"{name}.weight_scale"].float() * stored[f"{name}.weight_scale_2"]
    return (values * scales.repeat_interleave(GROUP, 1)).bfloat16()


def load_nvfp4(folder: str, kind: str) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Layers()
    shard(model, kind, 1)
    sf.load_model(model, folder, conversions=[NVFP4])
    return whole(model)


@pytest.mark.parametrize("kind", ["tp", "fsdp", "fsdp+tp"])
def test_nvfp4_is_decoded_into_a_sharded_model(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    stored = nvfp4_checkpoint()
    save_file(stored, tmp_path / "model.safetensors")
    wanted = {f"{name}.weight": decoded(stored, name) for name in ("up", "down")} | {"down.bias": stored["down.bias"]}
    for held in ranks(4).run(load_nvfp4, str(tmp_path), kind):
        assert held.keys() == wanted.keys()
        assert [name for name, value in wanted.items() if not torch.equal(held[name], value)] == []


def keep_mxfp4(folder: str, kind: str, dim: int) -> list[str]:
    """Load what is stored into a model and into a state dict, and save it; return the names that differ."""
    with torch.device("meta"):
        model = Experts()
    shard(model, kind, dim)
    sf.load_model(model, folder)
    sf.save_model(model, f"{folder}/saved")
    state = {name: torch.empty_like(value) for name, value in model.state_dict().items()}
    sf.load_state_dict(state, f"{folder}/saved", model=model)
    wrong = [name for name, value in state.items() if not torch.equal(value, model.state_dict()[name])]
    stored = load_file(f"{folder}/model.safetensors")
    return wrong + [name for name, value in whole(model).items() if not torch.equal(value, stored[name])]


@pytest.mark.parametrize(("kind", "dim"), [("tp", 0), ("tp", 1), ("fsdp", 0), ("fsdp+tp", 1)])
def test_mxfp4_is_kept_as_it_is_stored(ranks: RankPool, tmp_path: Path, kind: str, dim: int) -> None:
    random = torch.Generator().manual_seed(5)
    stored = {
        name: torch.randint(256, value.shape, generator=random, dtype=torch.uint8)
        for name, value in Experts().state_dict().items()
    }
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    assert ranks(4).run(keep_mxfp4, str(tmp_path), kind, dim) == [[]] * 4
    saved, first = (tmp_path / name for name in ("saved/model.safetensors", "model.safetensors"))
    assert saved.read_bytes() == first.read_bytes()


def save_with_scales_on_meta(folder: str) -> None:
    """Save a weight whose scales are on another device than it, on one rank one that holds nothing."""
    device = "meta" if dist.get_rank() == 1 else "cpu"
    weight = torch.zeros(4, 8, dtype=torch.uint8)
    sf.save_state_dict({"w.weight": weight, "w.weight_scale": torch.zeros(4, 1, device=device)}, folder)


def test_scales_without_values_on_one_rank_are_refused_on_all(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks(2).outcomes(save_with_scales_on_meta, str(tmp_path / "out"))
    assert [outcome.error_type for outcome in outcomes] == ["RankFailedError", "InvalidInputError"]
    assert all("w.weight_scale is on the meta device" in outcome.error for outcome in outcomes)
    assert not (tmp_path / "out").exists()
