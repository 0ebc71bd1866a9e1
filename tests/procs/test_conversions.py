"""Real models, sharded by torch, load and save by rules as one process does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardferry.torch as sf
from shardferry.conversions import Concatenate, Convert, Dequantize, Rope, Split, Stack, StripPrefix

if TYPE_CHECKING:
    from pathlib import Path

    from shardferry.conversions import Rule

    from .pool import RankPool

EXPERTS, WIDTH, HIDDEN, HEADS = 6, 8, 16, 4
RULES: tuple[Rule, ...] = (
    StripPrefix("module."),
    Convert(("experts.{e}.w1.weight", "experts.{e}.w3.weight"), ("experts.gate_up_proj",), (Stack(0), Concatenate(1))),
    Convert(("qkv.weight",), ("q.weight", "k.weight", "v.weight"), (Split(0, (HIDDEN, WIDTH, WIDTH)),)),
    Convert(("q.weight",), ("q.weight",), (Rope(HEADS),)),
)


class Fused(nn.Module):
    """A layer whose checkpoint has other names and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * WIDTH, HIDDEN))
        for name, rows in (("q", HIDDEN), ("k", WIDTH), ("v", WIDTH)):
            self.add_module(name, nn.Linear(HIDDEN, rows, bias=False))


def hub() -> dict[str, torch.Tensor]:
    shapes = {f"module.experts.{e}.{w}.weight": (WIDTH, HIDDEN) for e in range(EXPERTS) for w in ("w1", "w3")}
    shapes["module.qkv.weight"] = (HIDDEN + 2 * WIDTH, HIDDEN)
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def shard(model: nn.Module, kind: str) -> None:
    if kind != "tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        if kind == "fsdp+tp":
            cut(model, mesh["tp"])
        fully_shard(model, mesh=mesh["fsdp"])
    else:
        cut(model, init_device_mesh("cpu", (4,)))


def cut(model: nn.Module, mesh: object) -> None:
    """Cut experts by their rows and everything else by columns, whichever the conversion touches."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter.detach(), mesh, [Shard(1)])  # type: ignore[arg-type]
            module.register_parameter(name, nn.Parameter(placed))


def load_and_save(folder: str, kind: str) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Fused()
    shard(model, kind)
    sf.load_model(model, f"{folder}/hub", conversions=RULES)
    sf.save_model(model, f"{folder}/saved", conversions=RULES)
    full = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {name: tensor.detach() for name, tensor in full.items()}


@pytest.mark.parametrize("kind", ["fsdp", "tp", "fsdp+tp"])
def test_a_sharded_model_is_loaded_from_and_saved_as_another_spelling(
    ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "hub").mkdir()
    save_file(hub(), tmp_path / "hub/model.safetensors", {"format": "pt"})
    held = ranks(4).run(load_and_save, str(tmp_path), kind)[0]
    stored = hub()
    gate_up = [torch.cat([stored[f"module.experts.{e}.{w}.weight"] for w in ("w1", "w3")]) for e in range(EXPERTS)]
    assert torch.equal(held["experts.gate_up_proj"], torch.stack(gate_up))
    q, k, _ = stored["module.qkv.weight"].split((HIDDEN, WIDTH, WIDTH))
    rows = [h * 4 + 2 * p + t for h in range(HEADS) for t in (0, 1) for p in (0, 1)]
    assert torch.equal(held["q.weight"], q[rows])
    assert torch.equal(held["k.weight"], k)
    saved, first = (tmp_path / name / "model.safetensors" for name in ("saved", "hub"))
    assert saved.read_bytes() == first.read_bytes()


def load_quantized(folder: str) -> torch.Tensor:
    weight = torch.empty(256, 192, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (4,))
    state: dict[str, torch.Tensor] = {"w.weight": distribute_tensor(weight, mesh, [Shard(0)])}
    rule = Convert(("{x*}.weight", "{x*}.weight_scale_inv"), ("{x*}.weight",), (Dequantize("fp8"),), partial=True)
    sf.load_state_dict(state, folder, conversions=[rule])
    loaded = state["w.weight"]
    assert isinstance(loaded, DTensor)
    return loaded.full_tensor()


def test_block_scaled_weights_are_decoded_into_the_models_dtype(ranks: RankPool, tmp_path: Path) -> None:
    weight = torch.randn(256, 192, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2) + 0.5
    save_file({"w.weight": weight, "w.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    grid = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :192]
    for loaded in ranks(4).run(load_quantized, str(tmp_path)):
        assert torch.equal(loaded, (weight.float() * grid).bfloat16())
    assert load_file(tmp_path / "model.safetensors")["w.weight"].dtype == torch.float8_e4m3fn
