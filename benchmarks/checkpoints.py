"""Makes the checkpoints that the benchmarks load, and says where their bytes are.

Answers no question itself. Kinds with random values, sized by `--scale-gb` in bf16; `deepseek.py` has one of true size
that takes no room on disk.
"""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

Kind = Literal["dense", "dense_fp8", "moe", "moe_packed", "wide"]
Shapes = dict[str, tuple[int, ...]]

ITEMSIZES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
NUM_FILES = 4
# Rows and columns that share a scale, as in DeepSeek-V3.
FP8_BLOCK = 128


class TensorSpec(NamedTuple):
    """What a header says of a tensor, but for its place."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return ITEMSIZES[self.dtype] * math.prod(self.shape)


class StoredTensor(NamedTuple):
    """Where a tensor's bytes are: `num_bytes` from `start` in `file`."""

    file: Path
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def make_checkpoint(folder: Path, kind: Kind, scale_gb: float) -> None:
    """Write a checkpoint of about `scale_gb` * 10**9 bytes in bf16 into `folder`, unless it is there already."""
    if (folder / "model.safetensors.index.json").exists():
        return
    shapes, config = _shapes(kind, scale_gb)
    specs = {name: TensorSpec("BF16", shape) for name, shape in shapes.items()}
    if kind == "dense_fp8":
        specs = _in_fp8(specs)
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    files = split_into_files(specs, NUM_FILES)
    for file, names in files.items():
        with (folder / file).open("wb") as out:
            out.write(header({name: specs[name] for name in names}))
            for name in names:
                out.write(_values(rng, specs[name]).data)
    (folder / "config.json").write_text(json.dumps(config))
    write_index(folder, files)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the checkpoint in `folder`, by name."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            entries = json.loads(stream.read(length))
        for name, entry in entries.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                found[name] = StoredTensor(file, tuple(entry["shape"]), 8 + length + start, stop - start)
    return found


def split_into_files(specs: Mapping[str, TensorSpec], num_files: int) -> dict[str, list[str]]:
    """Deal names, in order, to files of about equal bytes; returns names by file name."""
    limit = 1.01 * sum(spec.num_bytes for spec in specs.values()) / num_files
    parts: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if size > 0 and limit < size + spec.num_bytes and len(parts) < num_files:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += spec.num_bytes
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, start=1)}


def header(specs: Mapping[str, TensorSpec]) -> bytes:
    """Return a safetensors file's first bytes: the length, and the header padded to 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, spec in specs.items():
        stop = start + spec.num_bytes
        entries[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_index(folder: Path, files: Mapping[str, Iterable[str]]) -> None:
    """Write `model.safetensors.index.json` for names by file name."""
    weight_map = {name: file for file, names in files.items() for name in names}
    total = sum(tensor.num_bytes for tensor in stored_tensors(folder).values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _values(rng: np.random.Generator, spec: TensorSpec) -> np.ndarray[Any, np.dtype[np.generic]]:
    if spec.dtype == "F32":
        return rng.random(math.prod(spec.shape), np.float32) + np.float32(0.5)
    if spec.dtype == "F8_E4M3":
        return _fp8_codes(rng, math.prod(spec.shape))
    bits = rng.integers(0, 1 << 16, size=spec.num_bytes // 2, dtype=np.uint16)
    # Clears an exponent bit: every value is finite.
    return bits & np.uint16(0xBFFF)


def _fp8_codes(rng: np.random.Generator, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return codes as weights have them: normally distributed, the largest about 448, which scales are made for."""
    import torch  # the planning benchmarks do without

    codes = np.empty(count, np.uint8)
    for start in range(0, count, FP8_BLOCK**2):
        weights = torch.from_numpy(rng.standard_normal(min(FP8_BLOCK**2, count - start), np.float32))
        values = (weights * (torch.finfo(torch.float8_e4m3fn).max / weights.abs().max())).to(torch.float8_e4m3fn)
        codes[start : start + FP8_BLOCK**2] = values.view(torch.uint8).numpy()
    return codes


def _in_fp8(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return projections as block-scaled FP8, each followed by its scales."""
    made = {}
    for name, spec in specs.items():
        if "_proj." not in name:
            made[name] = spec
            continue
        made[name] = TensorSpec("F8_E4M3", spec.shape)
        made[f"{name}_scale_inv"] = TensorSpec("F32", tuple(-(-size // FP8_BLOCK) for size in spec.shape))
    return made


def _shapes(kind: Kind, scale_gb: float) -> tuple[Shapes, dict[str, Any]]:
    if kind in {"dense", "dense_fp8"}:
        return _dense(scale_gb)
    if kind == "wide":
        return _wide(scale_gb), {}
    return _moe(scale_gb, packed=kind == "moe_packed")


def _dense(scale_gb: float) -> tuple[Shapes, dict[str, Any]]:
    """Llama-like, with as many layers as make `scale_gb`."""
    hidden, intermediate, vocab, heads, kv_heads, head = 2048, 5632, 32_000, 32, 8, 64
    layer_gb = 90.2e-3
    layers = max(1, round((scale_gb - 4 * vocab * hidden / 1e9) / layer_gb))
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= _attention(prefix, hidden, heads * head, kv_heads * head)
        shapes |= _mlp(prefix + "mlp.", hidden, intermediate)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    return shapes, config


def _wide(scale_gb: float) -> Shapes:
    """No model: tensors whose rows have 2 and 4 KiB on each of 4 ranks that cut the inner dim."""
    shapes = ((4096, 8192), (8192, 4096))
    return {f"layers.{at}.weight": shapes[at % 2] for at in range(max(2, round(scale_gb * 1e9 / (2 * 4096 * 8192))))}


def _moe(scale_gb: float, *, packed: bool) -> tuple[Shapes, dict[str, Any]]:
    """Qwen3-MoE-like, 32 experts a layer; one tensor per expert and projection, or two packed ones per layer."""
    hidden, intermediate, experts, vocab, heads, kv_heads, head = 1024, 512, 32, 16_000, 16, 4, 64
    layer_gb = 106e-3
    layers = max(1, round((scale_gb - 4 * vocab * hidden / 1e9) / layer_gb))
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= _attention(prefix, hidden, heads * head, kv_heads * head)
        shapes |= {prefix + f"self_attn.{name}_norm.weight": (head,) for name in "qk"}
        shapes[prefix + "mlp.gate.weight"] = (experts, hidden)
        if packed:
            shapes[prefix + "mlp.experts.gate_up_proj"] = (experts, 2 * intermediate, hidden)
            shapes[prefix + "mlp.experts.down_proj"] = (experts, hidden, intermediate)
        else:
            for expert in range(experts):
                shapes |= _mlp(prefix + f"mlp.experts.{expert}.", hidden, intermediate)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "num_experts": experts,
        "num_experts_per_tok": 4,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    return shapes, config


def _attention(prefix: str, hidden: int, queries: int, keys: int) -> Shapes:
    return {
        prefix + "input_layernorm.weight": (hidden,),
        prefix + "self_attn.q_proj.weight": (queries, hidden),
        prefix + "self_attn.k_proj.weight": (keys, hidden),
        prefix + "self_attn.v_proj.weight": (keys, hidden),
        prefix + "self_attn.o_proj.weight": (hidden, queries),
        prefix + "post_attention_layernorm.weight": (hidden,),
    }


def _mlp(prefix: str, hidden: int, intermediate: int) -> Shapes:
    return {
        prefix + "gate_proj.weight": (intermediate, hidden),
        prefix + "up_proj.weight": (intermediate, hidden),
        prefix + "down_proj.weight": (hidden, intermediate),
    }
