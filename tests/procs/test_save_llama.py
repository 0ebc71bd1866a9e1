"""Whatever layout a Llama is saved under, safetensors and transformers read the same model, from the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, LlamaConfig

import shardferry.torch as sf

if TYPE_CHECKING:
    from pathlib import Path

    from .pool import RankPool

# No dim but the heads' divides by 2, 3, 4 and 8.
HIDDEN, INTERMEDIATE, VOCAB, HEAD, HEADS, KV_HEADS, LAYERS = 22, 27, 37, 2, 11, 11, 2
CONFIG = LlamaConfig(
    hidden_size=HIDDEN,
    intermediate_size=INTERMEDIATE,
    vocab_size=VOCAB,
    head_dim=HEAD,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    num_hidden_layers=LAYERS,
)


class Llama(nn.Module):
    """The tensors of a Llama under transformers' names: workers need not import transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.model.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.model.norm = norm()
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)


def layer() -> nn.Module:
    made = nn.Module()
    made.input_layernorm, made.post_attention_layernorm = norm(), norm()
    made.self_attn, made.mlp = nn.Module(), nn.Module()
    for name, size in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
        made.self_attn.add_module(name, nn.Linear(HIDDEN, size * HEAD, bias=False))
    made.self_attn.o_proj = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)
    made.mlp.gate_proj, made.mlp.up_proj = (nn.Linear(HIDDEN, INTERMEDIATE, bias=False) for _ in range(2))
    made.mlp.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
    return made


def norm() -> nn.Module:
    return nn.RMSNorm(HIDDEN)


def apply_tp(model: nn.Module, mesh: DeviceMesh) -> None:
    rows = {
        f"model.layers.*.{name}": ColwiseParallel() for name in ("self_attn.[qkv]_proj", "mlp.gate_proj", "mlp.up_proj")
    }
    columns = {f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    parallelize_module(
        model, mesh, {**rows, **columns, "model.embed_tokens": RowwiseParallel(), "lm_head": ColwiseParallel()}
    )


def shard(model: nn.Module, layout: str) -> None:
    size = dist.get_world_size()
    if layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    elif layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("rep", "fsdp")))
    elif layout == "tp":
        apply_tp(model, init_device_mesh("cpu", (size,)))
    elif layout == "fsdp+tp":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("fsdp", "tp"))
        apply_tp(model, mesh["tp"])
        fully_shard(model, mesh=mesh["fsdp"])


def save(source: str, folder: str, layout: str) -> None:
    model = Llama()
    model.load_state_dict(load_file(source))
    shard(model, layout)
    sf.save_model(model, folder, max_shard_size="9KB")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tensors of a Llama with random weights."""
    path = tmp_path_factory.mktemp("llama") / "model.safetensors"
    torch.manual_seed(0)
    save_file(AutoModelForCausalLM.from_config(CONFIG).state_dict(), path)
    return path


@pytest.fixture(scope="module")
def alone(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files that one process saves of the plain model."""
    folder = tmp_path_factory.mktemp("alone") / "out"
    model = Llama()
    model.load_state_dict(load_file(source))
    sf.save_model(model, folder, max_shard_size="9KB")
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        *(("plain", size) for size in (1, 2)),
        *(("fsdp", size) for size in (1, 2, 3, 4, 8)),
        *(("tp", size) for size in (2, 3, 4, 8)),
        *(("hsdp", size) for size in (2, 4, 8)),
        *(("fsdp+tp", size) for size in (2, 4, 8)),
    ],
)
def test_every_layout_saves_the_same_files_and_transformers_reads_them(
    ranks: RankPool, tmp_path: Path, source: Path, alone: dict[str, bytes], *, layout: str, world_size: int
) -> None:
    out = tmp_path / "out"
    ranks(world_size).run(save, str(source), str(out), layout)
    assert contents(out) == alone
    want = load_file(source)
    by_safetensors = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    CONFIG.save_pretrained(out)
    by_transformers = AutoModelForCausalLM.from_pretrained(out).state_dict()
    for read in (by_safetensors, by_transformers):
        assert read.keys() == want.keys()
        assert all(torch.equal(read[name], want[name]) for name in want)
