"""A Llama in its first spelling, whose query and key rows lie in pairs, on meshes: loaded, saved and loaded again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

import shardferry.torch.transformers as sft
from shardferry.conversions import Convert, Rope, Step

if TYPE_CHECKING:
    from pathlib import Path

    from .pool import RankPool

HIDDEN, HEADS, KV_HEADS, HEAD, WIDTH, VOCAB = 32, 4, 2, 8, 48, 36
CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
LAYER, HUB = "layers.{i}.", "model.layers.{i}."
# Names of the first release, those of transformers, and the shape.
SPELLED: dict[str, tuple[str, tuple[int, ...]]] = {
    "tok_embeddings.weight": ("model.embed_tokens.weight", (VOCAB, HIDDEN)),
    f"{LAYER}attention.wq.weight": (f"{HUB}self_attn.q_proj.weight", (HEADS * HEAD, HIDDEN)),
    f"{LAYER}attention.wk.weight": (f"{HUB}self_attn.k_proj.weight", (KV_HEADS * HEAD, HIDDEN)),
    f"{LAYER}attention.wv.weight": (f"{HUB}self_attn.v_proj.weight", (KV_HEADS * HEAD, HIDDEN)),
    f"{LAYER}attention.wo.weight": (f"{HUB}self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD)),
    f"{LAYER}feed_forward.w1.weight": (f"{HUB}mlp.gate_proj.weight", (WIDTH, HIDDEN)),
    f"{LAYER}feed_forward.w2.weight": (f"{HUB}mlp.down_proj.weight", (HIDDEN, WIDTH)),
    f"{LAYER}feed_forward.w3.weight": (f"{HUB}mlp.up_proj.weight", (WIDTH, HIDDEN)),
    f"{LAYER}attention_norm.weight": (f"{HUB}input_layernorm.weight", (HIDDEN,)),
    f"{LAYER}ffn_norm.weight": (f"{HUB}post_attention_layernorm.weight", (HIDDEN,)),
    "norm.weight": ("model.norm.weight", (HIDDEN,)),
    "output.weight": ("lm_head.weight", (VOCAB, HIDDEN)),
}
STEPS: dict[str, tuple[Step, ...]] = {"wq": (Rope(HEADS),), "wk": (Rope(KV_HEADS),)}
RULES = tuple(
    Convert((first,), (hub,), next((steps for name, steps in STEPS.items() if f".{name}." in first), ()))
    for first, (hub, _) in SPELLED.items()
)


def halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows in the order that transformers' own script for this release (convert_llama_weights_to_hf) gives."""
    return weight.view(heads, HEAD // 2, 2, HIDDEN).transpose(1, 2).reshape(heads * HEAD, HIDDEN)


def first_release() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    names = {first.format(i=i): shape for first, (_, shape) in SPELLED.items() for i in range(2)}
    return {name: torch.randn(shape, generator=random) for name, shape in names.items()}


def of_transformers(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made = {}
    for first, (hub, _) in SPELLED.items():
        for i in range(2):
            value = stored[first.format(i=i)]
            heads = {"wq": HEADS, "wk": KV_HEADS}.get(first.split(".")[-2])
            made[hub.format(i=i)] = value if heads is None else halves(value, heads)
    return made


def differing(folder: str, sizes: dict[str, int], out: str | None) -> list[str]:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = sft.from_pretrained(AutoModelForCausalLM, folder, mesh=mesh, strict=True, conversions=RULES)
    if out is not None:
        sft.save_pretrained(model, out, conversions=RULES)
    wanted = of_transformers(first_release())
    state = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in model.state_dict().items()}
    return [name for name in state.keys() | wanted.keys() if not torch.equal(state[name], wanted[name])]


def load_save_and_load(folder: str) -> list[str]:
    wrong = differing(f"{folder}/first", {"fsdp": 2, "tp": 2}, f"{folder}/saved")
    return wrong + differing(f"{folder}/saved", {"tp": 2, "dp_replicate": 2}, None)


def test_rows_in_pairs_become_halves_and_pairs_again(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    stored = first_release()
    save_file(stored, tmp_path / "first/model.safetensors", {"format": "pt"})
    LlamaConfig(**CONFIG).save_pretrained(tmp_path / "first")
    assert ranks(4).run(load_save_and_load, str(tmp_path)) == [[]] * 4
    saved, first = (tmp_path / name / "model.safetensors" for name in ("saved", "first"))
    assert saved.read_bytes() == first.read_bytes()
