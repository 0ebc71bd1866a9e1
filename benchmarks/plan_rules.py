"""Plan a per-expert MoE checkpoint of about 92,000 tensors into fused parameters, by rules, for one rank of many.

    python -m benchmarks.plan_rules

Only headers are made. What is measured is everything a rank does with the rules: apply them to the index, match its
model, and plan its copies. Expert-parallel ranks want a few experts of every layer; a rank that wants a cut of all of
them has as many copies as the checkpoint has tensors.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from benchmarks.machine import machine

from shardferry.conversions import Concatenate, Convert, Rename, Stack, StripPrefix
from shardferry.format.index import CheckpointIndex, FileInfo, TensorInfo
from shardferry.geometry.sharding import MeshLayout, Split, region_at
from shardferry.plan.load import Wanted, plan_load
from shardferry.plan.match import Rules, match_targets
from shardferry.plan.target import Target

RESULTS = Path(__file__).parent / "results" / "plan_rules.jsonl"
LAYERS, EXPERTS, HIDDEN, WIDTH = 60, 512, 2048, 512
RANKS = 64
FILES = 160

RULES = (
    StripPrefix("module."),
    Rename(r"\.block_sparse_moe\.", ".mlp."),
    Convert(
        ("{head*}.experts.{e}.gate_proj.weight", "{head*}.experts.{e}.up_proj.weight"),
        ("{head*}.experts.gate_up_proj",),
        (Stack(0), Concatenate(1)),
    ),
    Convert(("{head*}.experts.{e}.down_proj.weight",), ("{head*}.experts.down_proj",), (Stack(0),)),
)
LAYOUTS = {
    "expert parallel": MeshLayout((RANKS,), tuple(range(RANKS)), (Split(0, 0),)),
    "tensor parallel": MeshLayout((RANKS,), tuple(range(RANKS)), (Split(0, 1, 2),)),
}


def main() -> None:
    """Measure both layouts, print and record."""
    index = make_index()
    lines = []
    for name, layout in LAYOUTS.items():
        result = {"layout": name, "tensors": len(index.tensors), **measure(index, layout)}
        print(result)
        lines.append(json.dumps(machine() | result) + "\n")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("".join(lines))


def measure(index: CheckpointIndex, layout: MeshLayout) -> dict[str, float | int]:
    """Do what one rank does, and return the seconds of each step."""
    rank = RANKS // 2
    shapes = {"gate_up_proj": (EXPERTS, 2 * WIDTH, HIDDEN), "down_proj": (EXPERTS, HIDDEN, WIDTH)}
    targets = [
        Target((f"layers.{i}.mlp.experts.{name}",), "BF16", shape, region_at(shape, layout, rank).shape, (layout,))
        for i in range(LAYERS)
        for name, shape in shapes.items()
    ]
    start = time.perf_counter()
    matching = match_targets(index, targets, Rules({}, cast=True, ignorable=lambda _: False, conversions=RULES))
    matched = time.perf_counter()
    assert len(matching.matches) == len(targets)
    wanted = (Wanted(t.name, source, region_at(source.shape, layout, rank)) for t, source, _ in matching.matches)
    plan = plan_load(index, wanted)
    done = time.perf_counter()
    return {
        "match_seconds": round(matched - start, 3),
        "plan_seconds": round(done - matched, 3),
        "total_seconds": round(done - start, 3),
        "copies": sum(len(tensor.copies) for tensor in plan.tensors),
        "bytes_wanted": plan.bytes_wanted,
    }


def make_index() -> CheckpointIndex:
    """Return the index of a checkpoint that does not exist."""
    shapes = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
    names = [
        (f"module.layers.{i}.block_sparse_moe.experts.{e}.{name}.weight", shape)
        for i in range(LAYERS)
        for e in sorted(range(EXPERTS), key=str)
        for name, shape in shapes.items()
    ]
    per_file = -(-len(names) // FILES)
    num_bytes = 2 * HIDDEN * WIDTH
    tensors = {}
    for at, (name, shape) in enumerate(names):
        start = 8 + at % per_file * num_bytes
        tensors[name] = TensorInfo("BF16", shape, f"model-{at // per_file:05}.safetensors", (start, start + num_bytes))
    files = {info.file: FileInfo(8 + per_file * num_bytes, 8, "") for info in tensors.values()}
    return CheckpointIndex("/", tensors, files, {})


if __name__ == "__main__":
    main()
