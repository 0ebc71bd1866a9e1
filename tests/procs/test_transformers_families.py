"""Families whose checkpoints are not spelled like their models, on meshes: what transformers loads in one process."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import shardferry.torch as sf
import shardferry.torch.transformers as sft
from shardferry.errors import InvalidInputError
from shardferry.torch.shardings import local_part

if TYPE_CHECKING:
    from pathlib import Path

    from .pool import RankPool

TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 36,
    "dtype": "float32",
}
MOE = {**TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
MLA = {
    **TEXT,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "n_shared_experts": 1,
}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
QWEN_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "depth": 1,
    "num_heads": 4,
    "out_hidden_size": 16,
    "patch_size": 4,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
# Class of the configuration, and what it is made with.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", TEXT),
    "qwen3": ("Qwen3Config", {**TEXT, "head_dim": 8}),
    "qwen3_moe": ("Qwen3MoeConfig", MOE),
    "mixtral": ("MixtralConfig", {**TEXT, "num_local_experts": 4}),
    "deepseek_v3": ("DeepseekV3Config", MLA),
    "gpt_oss": ("GptOssConfig", {**TEXT, "num_local_experts": 4, "head_dim": 8, "num_experts_per_tok": 2}),
    "gemma3": (
        "Gemma3Config",
        {
            "text_config": {**TEXT, "head_dim": 8},
            "vision_config": {**VISION, "image_size": 28, "patch_size": 14},
            "dtype": "float32",
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        {
            "text_config": {**MOE, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
            "vision_config": QWEN_VISION,
            "dtype": "float32",
        },
    ),
    "step3p7": (  # transformers itself shards this one wrongly: experts stored together, gate and up joined
        "Step3p7Config",
        {
            "text_config": {
                **MOE,
                "n_routed_experts": 4,
                "num_local_experts": 4,
                "share_expert_dim": 8,
                "mlp_layer_types": ["dense", "sparse"],
                "layer_types": ["full_attention", "full_attention"],
            },
            "vision_config": {**VISION, "image_size": 28, "patch_size": 14},
            "dtype": "float32",
        },
    ),
}
EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_vl_moe", "step3p7")
# Sizes of the axes, and ranks over which experts are dealt.
LAYOUTS: dict[str, tuple[dict[str, int], int]] = {
    "fsdp": ({"fsdp": 4}, 1),
    "tp": ({"tp": 2, "dp_replicate": 2}, 1),
    "fsdp over tp": ({"fsdp": 2, "tp": 2}, 1),
    "ep": ({"fsdp": 4}, 4),
    "ep and tp": ({"fsdp": 2, "tp": 2}, 2),
}


def auto_class(family: str) -> Any:  # noqa: ANN401 - auto classes have no types
    return AutoModelForImageTextToText if family in {"gemma3", "qwen3_vl_moe", "step3p7"} else AutoModelForCausalLM


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    if ours.keys() != theirs.keys():
        return sorted(ours.keys() ^ theirs.keys())
    return [name for name, value in theirs.items() if not torch.equal(ours[name], value)]


def load_and_save_in_every_layout(family: str, folder: str, out: str) -> dict[str, list[str]]:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    alone = auto_class(family).from_pretrained(folder)
    wrong = {}
    for layout, (sizes, ep_size) in LAYOUTS.items():
        if ep_size > 1 and family not in EXPERTS:
            continue
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        model = sft.from_pretrained(auto_class(family), folder, mesh=mesh, ep_size=ep_size)
        state = {name: whole(value) for name, value in model.state_dict().items()}
        wrong[layout] = differing(state, alone.state_dict())
        sft.save_pretrained(model, f"{out}/{layout}")
        sft.save_pretrained(model, f"{out}/{layout} as in memory", layout="model")
    return {layout: names for layout, names in wrong.items() if names}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_loaded_and_saved_in_every_layout_as_in_one_process(
    ranks: RankPool, tmp_path: Path, family: str
) -> None:
    torch.manual_seed(0)
    config, options = FAMILIES[family]
    model = auto_class(family).from_config(getattr(transformers, config)(**options))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):  # none is all zeros or all ones
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) * 0.001 + number)
    folder = tmp_path / "original"
    model.save_pretrained(folder)
    assert ranks(4).run(load_and_save_in_every_layout, family, str(folder), str(tmp_path / "out")) == [{}] * 4
    original = load_file(folder / "model.safetensors")
    saved = sorted((tmp_path / "out").iterdir())
    assert len(saved) == 2 * (len(LAYOUTS) if family in EXPERTS else 3)
    for path in saved:
        if "in memory" in path.name:
            state = auto_class(family).from_pretrained(path).state_dict()
            assert differing(state, model.state_dict()) == [], path.name
        else:
            assert differing(load_file(path / "model.safetensors"), original) == [], path.name


def load_and_save(family: str, folder: str, out: str, sizes: dict[str, int], ep_size: int) -> None:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = sft.from_pretrained(auto_class(family), folder, mesh=mesh, ep_size=ep_size, strict=True)
    sft.save_pretrained(model, out)


def test_files_stay_the_same_through_any_layouts_and_numbers_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """Each loads what the one before has saved; 3 ranks cut nothing evenly."""
    torch.manual_seed(0)
    config, options = FAMILIES["deepseek_v3"]
    AutoModelForCausalLM.from_config(getattr(transformers, config)(**options)).save_pretrained(tmp_path / "0")
    steps: tuple[tuple[dict[str, int], int], ...] = (
        ({"fsdp": 2, "tp": 2}, 2),
        ({"fsdp": 3}, 1),
        ({"tp": 2}, 1),
        ({"fsdp": 2}, 2),
    )
    for at, (sizes, ep_size) in enumerate(steps):
        here, there = (str(tmp_path / str(number)) for number in (at, at + 1))
        ranks(math.prod(sizes.values())).run(load_and_save, "deepseek_v3", here, there, sizes, ep_size)
    first, *saved = ((tmp_path / str(at) / "model.safetensors") for at in range(len(steps) + 1))
    assert differing(load_file(saved[0]), load_file(first)) == []
    assert {path.read_bytes() for path in saved} == {saved[0].read_bytes()}


MANY: dict[str, Any] = {
    **TEXT,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_local_experts": 4,
}


def bytes_of_experts(folder: str) -> tuple[int, int]:
    """Return the bytes a load reads, and those of the experts that are held."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    model = sft.from_pretrained(AutoModelForCausalLM, folder, mesh=mesh, ep_size=4)
    report = sf.load_model(model, folder, conversions="auto")
    experts = sum(local_part(value).nbytes for name, value in model.state_dict().items() if ".experts." in name)
    return report.ranks[dist.get_rank()].bytes_read, experts


def test_a_rank_reads_its_experts_and_the_dense_part_only(ranks: RankPool, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(transformers.MixtralConfig(**MANY)).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    experts = sum(value.nbytes for name, value in stored.items() if ".experts." in name)
    dense = sum(value.nbytes for value in stored.values()) - experts
    for read, held in ranks(4).run(bytes_of_experts, str(tmp_path)):
        assert held == experts // 4
        assert held <= read <= held + dense


def load_lazily(family: str, folder: str) -> list[str]:
    from transformers.distributed.configuration_utils import DistributedConfig

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        empty = auto_class(family).from_config(config)
    state = sft.lazy_state_dict(folder, model=empty)
    model = type(empty).from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=torch.float32,
        distributed_config=DistributedConfig(tp_plan="auto", tp_size=2),
    )
    alone = auto_class(family).from_pretrained(folder)
    return differing({name: whole(value) for name, value in model.state_dict().items()}, alone.state_dict())


@pytest.mark.parametrize("family", ["mixtral", "step3p7"])
def test_transformers_own_loader_reads_the_right_parts_lazily(ranks: RankPool, tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    config, options = FAMILIES[family]
    auto_class(family).from_config(getattr(transformers, config)(**options)).save_pretrained(tmp_path)
    assert ranks(2).run(load_lazily, family, str(tmp_path)) == [[]] * 2


def test_parts_of_a_lazy_tensor_are_those_of_the_tensor(tmp_path: Path) -> None:
    value = torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4)
    save_file({"w": value, "s": torch.tensor(2.5)}, tmp_path / "model.safetensors", {"format": "pt"})
    lazy = sft.lazy_state_dict(tmp_path)
    assert (lazy["w"].get_shape(), lazy["w"].get_dtype()) == ([2, 3, 4], "BF16")
    for key in (..., 1, slice(1, 2), (..., slice(1, 3)), (0, slice(None), -1), (slice(None), slice(2, 1))):
        assert torch.equal(lazy["w"][key], value[key]), key
    assert lazy["s"][...] == 2.5
    for wrong in ((0, 0, 0, 0), slice(None, None, 2), 5):
        with pytest.raises(InvalidInputError):
            lazy["w"][wrong]


def test_a_list_of_experts_with_a_gap_and_two_tensors_for_one_are_refused_by_name(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(transformers.MixtralConfig(**MANY)).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    one = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    save_file({name: value for name, value in stored.items() if name != one}, path, {"format": "pt"})
    with pytest.raises(
        InvalidInputError, match=r"experts\.0\.w1\.weight.*Wanted for .*gate_up_proj, by MergeModulelist"
    ):
        sft.from_pretrained(AutoModelForCausalLM, tmp_path)
    twice = "model.layers.0.mlp.gate.weight"
    save_file({**stored, twice: torch.ones(4, 64)}, path, {"format": "pt"})
    with pytest.raises(InvalidInputError, match=r"block_sparse_moe\.gate\.weight and .* would both become .*mlp\.gate"):
        sft.from_pretrained(AutoModelForCausalLM, tmp_path)
