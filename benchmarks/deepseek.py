"""Makes a checkpoint of DeepSeek-V3's true size from headers alone.

Answers no question itself. Its 163 files are sparse: real headers, then a hole as long as the data would be. They
are 0.69 TB long and take about 20 MB of disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.checkpoints import TensorSpec, header, split_into_files, write_index

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# From the config.json and the header of the published checkpoint.
HIDDEN = 7168
VOCAB = 129_280
HEADS = 128
Q_RANK = 1536
KV_RANK = 512
NOPE = 128
ROPE = 64
VALUE = 128
DENSE_INTERMEDIATE = 18_432
EXPERT_INTERMEDIATE = 2048
NUM_EXPERTS = 256
NUM_DENSE_LAYERS = 3
NUM_LAYERS = 61
NUM_FILES = 163
FP8_BLOCK = 128


def make_sparse_checkpoint(folder: Path) -> None:
    """Write the headers and the index into `folder`, unless they are there already."""
    if (folder / "model.safetensors.index.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    specs = dict(tensors())
    files = split_into_files(specs, NUM_FILES)
    for file, names in files.items():
        first = header({name: specs[name] for name in names})
        with (folder / file).open("wb") as out:
            out.write(first)
            out.truncate(len(first) + sum(specs[name].num_bytes for name in names))
    write_index(folder, files)


def tensors() -> Iterator[tuple[str, TensorSpec]]:
    """Yield every name with its dtype and shape, in the order of the layers."""
    yield "model.embed_tokens.weight", TensorSpec("BF16", (VOCAB, HIDDEN))
    for layer in range(NUM_LAYERS):
        yield from _layer(f"model.layers.{layer}.", is_dense=layer < NUM_DENSE_LAYERS)
    yield "model.norm.weight", TensorSpec("BF16", (HIDDEN,))
    yield "lm_head.weight", TensorSpec("BF16", (VOCAB, HIDDEN))
    yield from _multi_token_prediction(f"model.layers.{NUM_LAYERS}.")


def _multi_token_prediction(prefix: str) -> Iterator[tuple[str, TensorSpec]]:
    """Yield the extra layer that predicts one more token."""
    yield prefix + "embed_tokens.weight", TensorSpec("BF16", (VOCAB, HIDDEN))
    yield prefix + "enorm.weight", TensorSpec("BF16", (HIDDEN,))
    yield prefix + "hnorm.weight", TensorSpec("BF16", (HIDDEN,))
    yield prefix + "eh_proj.weight", TensorSpec("BF16", (HIDDEN, 2 * HIDDEN))
    yield from _layer(prefix, is_dense=False)
    yield prefix + "shared_head.norm.weight", TensorSpec("BF16", (HIDDEN,))
    yield prefix + "shared_head.head.weight", TensorSpec("BF16", (VOCAB, HIDDEN))


def _layer(prefix: str, *, is_dense: bool) -> Iterator[tuple[str, TensorSpec]]:
    attention = prefix + "self_attn."
    yield prefix + "input_layernorm.weight", TensorSpec("BF16", (HIDDEN,))
    yield attention + "q_a_layernorm.weight", TensorSpec("BF16", (Q_RANK,))
    yield attention + "kv_a_layernorm.weight", TensorSpec("BF16", (KV_RANK,))
    yield from _fp8(attention + "q_a_proj", (Q_RANK, HIDDEN))
    yield from _fp8(attention + "q_b_proj", (HEADS * (NOPE + ROPE), Q_RANK))
    yield from _fp8(attention + "kv_a_proj_with_mqa", (KV_RANK + ROPE, HIDDEN))
    yield from _fp8(attention + "kv_b_proj", (HEADS * (NOPE + VALUE), KV_RANK))
    yield from _fp8(attention + "o_proj", (HIDDEN, HEADS * VALUE))
    yield prefix + "post_attention_layernorm.weight", TensorSpec("BF16", (HIDDEN,))
    if is_dense:
        yield from _mlp(prefix + "mlp.", DENSE_INTERMEDIATE)
        return
    yield prefix + "mlp.gate.weight", TensorSpec("BF16", (NUM_EXPERTS, HIDDEN))
    yield prefix + "mlp.gate.e_score_correction_bias", TensorSpec("F32", (NUM_EXPERTS,))
    for expert in range(NUM_EXPERTS):
        yield from _mlp(f"{prefix}mlp.experts.{expert}.", EXPERT_INTERMEDIATE)
    yield from _mlp(prefix + "mlp.shared_experts.", EXPERT_INTERMEDIATE)


def _mlp(prefix: str, intermediate: int) -> Iterator[tuple[str, TensorSpec]]:
    yield from _fp8(prefix + "gate_proj", (intermediate, HIDDEN))
    yield from _fp8(prefix + "up_proj", (intermediate, HIDDEN))
    yield from _fp8(prefix + "down_proj", (HIDDEN, intermediate))


def _fp8(name: str, shape: tuple[int, int]) -> Iterator[tuple[str, TensorSpec]]:
    """Yield a matrix and the scales of its blocks."""
    rows, columns = (-(-size // FP8_BLOCK) for size in shape)
    yield name + ".weight", TensorSpec("F8_E4M3", shape)
    yield name + ".weight_scale_inv", TensorSpec("F32", (rows, columns))
