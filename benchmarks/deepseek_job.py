"""How a job of 1,024 ranks cuts DeepSeek-V3: pipeline x (FSDP over tensor parallel | experts x FSDP).

Answers no question itself. Sixteen pipeline stages of 64 ranks. A stage's dense tensors are cut by tensor parallel
over 8 and then by FSDP over 8; its experts are dealt to 16 groups of 4, which cut each expert's rows.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from benchmarks.deepseek import NUM_EXPERTS, NUM_LAYERS

from shardferry.geometry.sharding import MeshLayout, Split, region_at
from shardferry.plan.target import Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardferry.format.index import CheckpointIndex

NUM_STAGES = 16
STAGE_RANKS = 64
NUM_RANKS = NUM_STAGES * STAGE_RANKS
TENSOR_RANKS = 8
EXPERT_GROUPS = 16
EXPERT_RANKS = STAGE_RANKS // EXPERT_GROUPS

LAYER = re.compile(r"layers\.(\d+)\.")
EXPERT = re.compile(r"\.experts\.(\d+)\.")
ROWS = re.compile(r"(q_b_proj|kv_b_proj|gate_proj|up_proj|embed_tokens|head)\.weight")
COLUMNS = re.compile(r"(o_proj|down_proj)\.weight")


def targets_of(index: CheckpointIndex, rank: int) -> Iterator[Target]:
    """Yield what the model of one rank offers to be filled."""
    for name, info in index.tensors.items():
        layout = layout_of(name)
        if rank in layout.ranks:
            region = region_at(info.shape, layout, layout.ranks.index(rank))
            yield Target((name,), info.dtype, info.shape, region.shape, (layout,))


@lru_cache(maxsize=200_000)
def layout_of(name: str) -> MeshLayout:
    """Return how a tensor is cut, by its name."""
    first = STAGE_RANKS * _stage(name)
    expert = EXPERT.search(name)
    if expert:
        first += EXPERT_RANKS * (int(expert[1]) * EXPERT_GROUPS // NUM_EXPERTS)
        return _mesh((EXPERT_RANKS,), first, (Split(0, 0),))
    tensor_dim = 0 if ROWS.search(name) else 1 if COLUMNS.search(name) else None
    tensor_cut = () if tensor_dim is None else (Split(1, tensor_dim),)
    return _mesh((STAGE_RANKS // TENSOR_RANKS, TENSOR_RANKS), first, (*tensor_cut, Split(0, 0)))


def _stage(name: str) -> int:
    layer = LAYER.search(name)
    if layer:
        return int(layer[1]) * NUM_STAGES // (NUM_LAYERS + 1)
    return 0 if "embed_tokens" in name else NUM_STAGES - 1


@lru_cache(maxsize=1024)
def _mesh(shape: tuple[int, ...], first: int, splits: tuple[Split, ...]) -> MeshLayout:
    """Return a layout over consecutive ranks; equal ones are one object."""
    count = 1
    for size in shape:
        count *= size
    return MeshLayout(shape, tuple(range(first, first + count)), splits)
