"""Models of transformers, spread over a mesh: they hold and compute what one process does, and save what it would."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import shardferry.torch as sf
import shardferry.torch.transformers as sft
from shardferry.errors import CheckpointWarning, InvalidInputError, MismatchError

if TYPE_CHECKING:
    from pathlib import Path

    from .pool import RankPool

MESHES = {
    "tp": {"tp": 2, "fsdp": 1, "dp_replicate": 2},
    "fsdp": {"fsdp": 4},
    "fsdp over tp": {"fsdp": 2, "tp": 2},
    "hsdp": {"dp_replicate": 2, "fsdp": 2},
}


def config() -> LlamaConfig:
    """Return a Llama of a few thousand parameters."""
    return LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=36,
        dtype="float32",
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    folder = str(tmp_path_factory.mktemp("llama"))
    LlamaForCausalLM(config()).save_pretrained(folder)
    return folder


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def load_compute_save(folder: str, sizes: dict[str, int], out: str) -> list[str]:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = sft.from_pretrained(AutoModelForCausalLM, folder, mesh=mesh)
    alone = AutoModelForCausalLM.from_pretrained(folder)
    wrong = [
        name for name, value in alone.state_dict().items() if not torch.equal(whole(model.state_dict()[name]), value)
    ]
    tokens = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        logits = whole(model(tokens).logits)
    if not torch.allclose(logits, alone(tokens).logits, atol=1e-5):
        wrong.append("logits")
    if model.training or all(not isinstance(tensor, DTensor) for tensor in model.parameters()):
        wrong.append("mode or layout")
    sft.save_pretrained(model, out)
    return wrong


@pytest.mark.parametrize("mesh", MESHES)
def test_a_model_on_a_mesh_is_the_model_of_one_process(
    ranks: RankPool, checkpoint: str, tmp_path: Path, mesh: str
) -> None:
    out = tmp_path / "out"
    assert ranks(4).run(load_compute_save, checkpoint, MESHES[mesh], str(out)) == [[]] * 4
    saved, original = load_file(out / "model.safetensors"), load_file(f"{checkpoint}/model.safetensors")
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in original)
    assert isinstance(AutoModelForCausalLM.from_pretrained(out), LlamaForCausalLM)


def load_and_save(folder: str, sizes: dict[str, int], out: str) -> None:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    sft.save_pretrained(sft.from_pretrained(AutoModelForCausalLM, folder, mesh=mesh), out)


def test_axes_may_come_in_any_order(ranks: RankPool, checkpoint: str, tmp_path: Path) -> None:
    """Torch itself cannot gather such tensors, so the file is compared."""
    ranks(4).run(load_and_save, checkpoint, {"tp": 2, "fsdp": 2}, str(tmp_path / "out"))
    saved, original = load_file(tmp_path / "out" / "model.safetensors"), load_file(f"{checkpoint}/model.safetensors")
    assert all(torch.equal(saved[name], original[name]) for name in original)


def load_incomplete(folder: str) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = sft.from_pretrained(AutoModelForCausalLM, folder, mesh=mesh)
    said = [str(warning.message) for warning in caught if warning.category is CheckpointWarning]
    norm = model.get_parameter("model.norm.weight")
    query = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    said.append(f"{bool((whole(norm) == 1).all())} {bool(whole(query).isfinite().all())}")
    with pytest.raises(MismatchError, match=r"model\.norm\.weight"):
        sft.from_pretrained(AutoModelForCausalLM, folder, mesh=mesh, strict=True)
    return said


def test_what_a_checkpoint_lacks_is_initialised_with_a_warning_or_refused(
    ranks: RankPool, checkpoint: str, tmp_path: Path
) -> None:
    tensors = load_file(f"{checkpoint}/model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file({**tensors, "surplus": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    config().save_pretrained(tmp_path)
    for missing, unexpected, values in ranks(2).run(load_incomplete, str(tmp_path)):
        assert "2 names are not in the checkpoint and were initialised anew: model.layers.0.self_attn.q_proj" in missing
        assert "1 names are in the checkpoint and not in the model: surplus" in unexpected
        assert values == "True True"


def test_one_process_gets_a_whole_model(checkpoint: str) -> None:
    model = sft.from_pretrained(AutoModelForCausalLM, checkpoint, dtype=torch.bfloat16)
    alone = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(model.state_dict()[name], value) for name, value in alone.state_dict().items())
    assert sft.from_pretrained(LlamaForCausalLM, checkpoint).dtype == torch.float32


def test_a_tensor_of_another_shape_is_an_error_or_counts_as_missing(checkpoint: str) -> None:
    wider = config()
    wider.vocab_size = 40
    with pytest.raises(MismatchError, match=r"lm_head\.weight: model \[40, 16\], checkpoint \[36, 16\]"):
        sft.from_pretrained(AutoModelForCausalLM, checkpoint, config=wider)
    with pytest.warns(CheckpointWarning, match=r"2 names are not .* lm_head\.weight: model \[40, 16\]"):
        model = sft.from_pretrained(AutoModelForCausalLM, checkpoint, config=wider, ignore_mismatched_sizes=True)
    assert model.lm_head.weight.shape == (40, 16)
    assert bool(model.lm_head.weight.isfinite().all())
    alone = LlamaForCausalLM.from_pretrained(checkpoint)
    assert torch.equal(model.model.norm.weight, alone.model.norm.weight)


def test_an_unknown_layout_or_conversion_is_refused(checkpoint: str, tmp_path: Path) -> None:
    model = sft.from_pretrained(LlamaForCausalLM, checkpoint)
    with pytest.raises(InvalidInputError, match="must be 'hub' or 'model'"):
        sft.save_pretrained(model, tmp_path / "out", layout="disk")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="or 'auto'"):
        sf.load_model(model, checkpoint, conversions="hub")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="Linear is none: give the rules themselves"):
        sf.load_model(torch.nn.Linear(2, 2), checkpoint, conversions="auto")


def refuse_axis(folder: str) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    try:
        sft.from_pretrained(AutoModelForCausalLM, folder, mesh=mesh)
    except InvalidInputError as error:
        return str(error)
    return "loaded"


def test_a_mesh_with_another_axis_is_refused(ranks: RankPool, checkpoint: str) -> None:
    for message in ranks(2).run(refuse_axis, checkpoint):
        assert "an axis named x" in message
