"""What does not go with a model of diffusers cut by its plan is refused with the reason, before anything is read."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL, Flux2Transformer2DModel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardferry.torch.diffusers as sfd
from shardferry.errors import CheckpointNotFoundError, InvalidInputError, MismatchError, ShardingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Return a mesh of two ranks without processes: nothing gets as far as needing them."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def new_model(heads: int = 4) -> Any:  # noqa: ANN401 - diffusers types little
    kind: Any = Flux2Transformer2DModel
    return kind(
        in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=heads,
        joint_attention_dim=8, timestep_guidance_channels=8, axes_dims_rope=(2, 2, 2, 2),
    )  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux2")
    new_model().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device_map": "auto"}, "every rank's part is already on that rank's device"),
        ({"quantization_config": {}}, "a quantizer packs weights into a layout of its own"),
        ({"low_cpu_mem_usage": False}, "the model never has memory for more than this rank's part"),
        ({"use_flashpack": True}, "its files cannot be read by parts"),
        ({"use_safetensors": False}, "only safetensors files can be read by parts"),
    ],
)
def test_an_option_of_diffusers_that_would_be_in_the_way(
    checkpoint: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidInputError, match=f"{next(iter(options))}= does not go with .*{reason}"):
        sfd.from_pretrained(Flux2Transformer2DModel, checkpoint, **options)


def test_pickled_weights(tmp_path: Path) -> None:
    new_model().save_pretrained(tmp_path, safe_serialization=False)
    with pytest.raises(CheckpointNotFoundError, match="may hold pickled weights: convert them to safetensors"):
        sfd.from_pretrained(Flux2Transformer2DModel, tmp_path)


def test_a_quantized_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    quantized = {**config, "quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(InvalidInputError, match="is quantized: a quantizer packs weights"):
        sfd.from_pretrained(Flux2Transformer2DModel, tmp_path)


def test_a_tensor_of_another_shape(checkpoint: Path, tmp_path: Path) -> None:
    """Also if it may be left out: nothing initialises a part of a parameter."""
    (tmp_path / "config.json").write_text(
        (checkpoint / "config.json").read_text().replace('"in_channels": 8', '"in_channels": 4')
    )
    file = "diffusion_pytorch_model.safetensors"
    (tmp_path / file).write_bytes((checkpoint / file).read_bytes())
    shapes = r"x_embedder\.weight: model \[32, 4\], checkpoint \[32, 8\]"
    with pytest.raises(MismatchError, match=shapes):
        sfd.from_pretrained(Flux2Transformer2DModel, tmp_path)
    with pytest.raises(MismatchError, match=f"lacks .*{shapes}.*which nothing can initialise"):
        sfd.from_pretrained(Flux2Transformer2DModel, tmp_path, ignore_mismatched_sizes=True, strict=False)


def test_a_model_without_a_plan(mesh: DeviceMesh, tmp_path: Path) -> None:
    kind: Any = AutoencoderKL
    kind(block_out_channels=(32,), norm_num_groups=8).save_pretrained(tmp_path)
    with pytest.raises(InvalidInputError, match="AutoencoderKL has no plan for tensor parallelism"):
        sfd.from_pretrained(kind, tmp_path, mesh=mesh)


def test_heads_that_do_not_divide(mesh: DeviceMesh, tmp_path: Path) -> None:
    new_model(heads=3).save_config(tmp_path)
    with pytest.raises(ShardingError, match="3 attention heads, which do not divide over 2 ranks"):
        sfd.from_pretrained(Flux2Transformer2DModel, tmp_path, mesh=mesh)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"x_embedder": "diagonal"}, "Unsupported tensor-parallel style 'diagonal' for 'x_embedder'"),
        ({"x_embedder.*.*": "colwise"}, r"'\*' can only be used once"),
        ({"x_embedder.*": "colwise"}, "must expand over a `ModuleList`"),
    ],
)
def test_a_plan_that_is_none(
    mesh: DeviceMesh, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, plan: dict[str, str], reason: str
) -> None:
    monkeypatch.setattr(Flux2Transformer2DModel, "_tp_plan", plan)
    with pytest.raises(InvalidInputError, match=f"Flux2Transformer2DModel: .*{reason}"):
        sfd.from_pretrained(Flux2Transformer2DModel, checkpoint, mesh=mesh)


def quantize(model: Any) -> None:  # noqa: ANN401 - as above
    model.hf_quantizer = SimpleNamespace()


def offload_groups(model: Any) -> None:  # noqa: ANN401
    here = torch.device("cpu")
    model.enable_group_offload(onload_device=here, offload_device=here, offload_type="leaf_level")


def offload(model: Any) -> None:  # noqa: ANN401
    setattr(model.x_embedder, "_hf_hook", SimpleNamespace())  # noqa: B010 - as accelerate marks what it has placed


def adapt(model: Any) -> None:  # noqa: ANN401
    layer: Any = type("Linear", (nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    model.x_embedder = layer(8, 32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (quantize, "is quantized: a quantizer packs weights"),
        (offload_groups, "is offloaded by groups, so its weights move while they would be read"),
        (offload, "is placed by accelerate, which keeps some weights elsewhere"),
        (adapt, "has adapter layers, whose weights have other names than the model's"),
    ],
)
def test_a_model_to_save_whose_parameters_are_not_its_own(
    tmp_path: Path, change: Callable[[Any], None], reason: str
) -> None:
    model = new_model()
    change(model)
    with pytest.raises(InvalidInputError, match=f"Flux2Transformer2DModel {reason}"):
        sfd.save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
