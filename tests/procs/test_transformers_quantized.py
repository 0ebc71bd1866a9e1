"""Quantized checkpoints of transformers: made whole by parts, as transformers does alone, or kept as stored."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import shardferry.torch as sf
import shardferry.torch.transformers as sft
from shardferry.conversions import Rename, StripPrefix
from shardferry.errors import InvalidInputError

from .test_transformers_families import MLA, TEXT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardferry.torch.conversions import GivenConversions

    from .pool import RankPool

BLOCK = 8
FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["model.layers.0.self_attn.o_proj", "lm_head"],
}
CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3Config", {**MLA, "qk_rope_head_dim": 8, "dtype": "bfloat16"}, FP8),
    "gpt_oss": (
        "GptOssConfig",
        {
            **TEXT,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "head_dim": 8,
            "num_experts_per_tok": 2,
            "dtype": "bfloat16",
        },
        {"quant_method": "mxfp4"},
    ),
}


def quantized(name: str, value: torch.Tensor, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what is stored of a weight, with scales no two of which are equal by chance."""
    random = torch.Generator().manual_seed(len(name) + value.numel())
    if kind == "deepseek_v3" and "_proj" in name and value.ndim == 2 and "layers.0.self_attn.o_proj" not in name:
        rows, columns = value.shape
        scales = torch.rand((-(-rows // BLOCK), -(-columns // BLOCK)), generator=random) + 0.5
        yield name, value.to(torch.float8_e4m3fn)
        yield f"{name}_scale_inv", scales
    elif kind == "gpt_oss" and name.endswith(("gate_up_proj", "down_proj")):
        experts, columns, rows = value.shape
        shape = (experts, rows, columns // 32)
        yield f"{name}_blocks", torch.randint(256, (*shape, 16), generator=random, dtype=torch.uint8)
        yield f"{name}_scales", torch.randint(120, 130, shape, generator=random, dtype=torch.uint8)
    else:
        yield name, value


def write_checkpoint(kind: str, folder: Path) -> None:
    torch.manual_seed(0)
    config, options, quantization = CONFIGS[kind]
    model = AutoModelForCausalLM.from_config(getattr(transformers, config)(**options))
    model.save_pretrained(folder)
    stored: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        stored.update(quantized(name, value, kind))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    model.config.quantization_config = quantization
    model.config.save_pretrained(folder)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def load_whole(folder: str, out: str) -> list[str]:
    transformers.logging.set_verbosity_error()
    alone = AutoModelForCausalLM.from_pretrained(folder)  # without a GPU, transformers makes them whole too
    wrong = []
    for at, (sizes, ep_size) in enumerate((({"fsdp": 2, "tp": 2}, 1), ({"fsdp": 4}, 4))):
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        model = sft.from_pretrained(
            AutoModelForCausalLM, folder, mesh=mesh, ep_size=ep_size, dequantize=True, strict=True
        )
        state = {name: whole(value) for name, value in model.state_dict().items()}
        wrong += [name for name, value in alone.state_dict().items() if not torch.equal(state[name], value)]
        sft.save_pretrained(model, f"{out}/{at}")
    return wrong


@pytest.mark.parametrize("kind", CONFIGS)
def test_quantized_weights_become_whole_as_in_one_process(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    write_checkpoint(kind, tmp_path / "stored")
    assert ranks(4).run(load_whole, str(tmp_path / "stored"), str(tmp_path)) == [[]] * 4
    first, second = (load_file(tmp_path / at / "model.safetensors") for at in ("0", "1"))
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "0")
    assert getattr(again.config, "quantization_config", None) is None


def keep_as_stored(folder: str, out: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = sft.from_pretrained(AutoModelForCausalLM, folder, mesh=mesh, strict=True)
    sft.save_pretrained(model, out)
    return [str(dtype) for dtype in sorted({str(value.dtype) for value in model.state_dict().values()})]


def test_fp8_is_kept_and_saved_as_stored(ranks: RankPool, tmp_path: Path) -> None:
    write_checkpoint("deepseek_v3", tmp_path / "stored")
    told = ranks(4).run(keep_as_stored, str(tmp_path / "stored"), str(tmp_path / "out"))
    assert all("torch.float8_e4m3fn" in dtypes for dtypes in told)
    configs = [json.loads((tmp_path / at / "config.json").read_text()) for at in ("stored", "out")]
    assert configs[1]["quantization_config"]["modules_to_not_convert"] == FP8["modules_to_not_convert"]
    assert len({config["quantization_config"]["quant_method"] for config in configs}) == 1
    stored, saved = (load_file(tmp_path / at / "model.safetensors") for at in ("stored", "out"))
    assert stored.keys() == saved.keys()
    assert all(torch.equal(value.view(torch.uint8), saved[name].view(torch.uint8)) for name, value in stored.items())


def test_what_a_model_cannot_keep_as_stored_is_refused_with_the_way_out(tmp_path: Path) -> None:
    write_checkpoint("gpt_oss", tmp_path)
    with pytest.raises(InvalidInputError, match="dequantize=True makes them whole"):
        sft.from_pretrained(AutoModelForCausalLM, tmp_path)


@pytest.mark.parametrize(
    ("method", "dequantize", "reason"),
    [
        ("bitsandbytes", False, "flattens a weight into blocks that no cut of the weight follows"),
        ("bitsandbytes", True, "flattens a weight into blocks that no cut of the weight follows"),
        ("gptq", True, "makes weights whole of fp8, mxfp4, nvfp4, modelopt"),
        ("gptq", False, "keeps such weights in an order of its own"),
    ],
)
def test_a_method_whose_weights_cannot_be_cut_is_refused_with_the_reason(
    tmp_path: Path, method: str, reason: str, *, dequantize: bool
) -> None:
    config = transformers.LlamaConfig(**TEXT)
    config.quantization_config = {"quant_method": method}
    config.save_pretrained(tmp_path)
    with pytest.raises(InvalidInputError, match=rf"is quantized .*{method}.*{reason}"):
        sft.from_pretrained(AutoModelForCausalLM, tmp_path, dequantize=dequantize)


def test_a_scale_that_does_not_fit_its_weight_is_named(tmp_path: Path) -> None:
    write_checkpoint("deepseek_v3", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = next(name for name in stored if name.endswith("weight_scale_inv"))
    stored[name] = torch.ones(1, 7)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInputError, match=name.replace(".", r"\.")):
        sft.from_pretrained(AutoModelForCausalLM, tmp_path, dequantize=True)


@pytest.mark.parametrize(
    ("conversions", "gate"),
    [
        ("auto", "model.layers.0.block_sparse_moe."),
        ((), "model.layers.0.mlp."),
        ((StripPrefix("module."), Rename(r"\.moe\.", ".mlp.")), "module.model.layers.0.moe."),
    ],
)
def test_a_configuration_of_quantization_names_modules_as_the_weights_are_named(
    tmp_path: Path, conversions: GivenConversions, gate: str
) -> None:
    """Their ends too, if that changes them; regular expressions and what is no module's stay."""
    options = {**TEXT, "num_hidden_layers": 1, "num_local_experts": 2}
    model = AutoModelForCausalLM.from_config(transformers.MixtralConfig(**options))
    kept = ["re:.*lm_head", "re:.*mlp.*", "gate", "*gate", "visual", "*"]
    ends = ["mlp.gate", "*.mlp.gate", "layers.0.mlp.*"]
    listed = ["model.layers.0.mlp.gate", "model.layers.0.mlp.*", "model.layers.7.mlp", *ends, *kept]
    model.config.quantization_config = {**FP8, "modules_to_not_convert": listed}
    sf.save_model(model, tmp_path / "out", conversions=conversions)
    config = json.loads((tmp_path / "out/config.json").read_text())
    moe = gate.split(".")[-2]
    names = [f"{gate}gate", f"{gate}*", gate.replace("0", "7").removesuffix(".")]
    spelled = [*names, f"{moe}.gate", f"*.{moe}.gate", f"layers.0.{moe}.*", *kept]
    assert config["quantization_config"]["modules_to_not_convert"] == spelled
    assert f"{gate}gate.weight" in load_file(tmp_path / "out/model.safetensors")
    assert model.config.quantization_config["modules_to_not_convert"] == listed
