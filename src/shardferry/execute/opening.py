"""Open a checkpoint for a job: one rank does, and tells all others what is in it and what its storage costs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from shardferry.execute.costs import storage_cost
from shardferry.execute.open import open_checkpoint
from shardferry.format.index import CheckpointIndex
from shardferry.plan.costmodel import CostModel, cost_model_from_json, cost_model_to_json
from shardferry.transport.together import together

if TYPE_CHECKING:
    from shardferry.transport.base import Group


def share_opened(group: Group, path: str, *, strict: bool, variant: str | None) -> tuple[CheckpointIndex, CostModel]:
    """Return what is in the checkpoint at `path`, and what its storage costs: rank 0 opens it. Collective.

    The index's root is the path rank 0 was given, which need not be that of other ranks. Every rank plans with rank 0's
    costs: what another has measured or detected, on a node of its own, enters no plan.

    Args:
        group: The ranks.
        path: The checkpoint on this rank.
        strict: Whether the file and index rules are applied in full.
        variant: Variant of the file names, e.g. `"fp16"`.

    Raises:
        ShardferryError: On every rank, if rank 0 cannot open it.
    """
    mine: list[tuple[CheckpointIndex, CostModel]] = []

    def work() -> bytes:
        if group.rank:
            return b""
        index = open_checkpoint(path, strict=strict, variant=variant)
        cost = storage_cost(index)
        mine.append((index, cost))
        if group.world_size == 1:
            return b""
        return json.dumps(cost_model_to_json(cost)).encode() + b"\n" + index.to_bytes()

    shared = together(group, "open checkpoint", work)
    if mine:
        return mine[0]
    cost, _, index = shared[0].partition(b"\n")
    return CheckpointIndex.from_bytes(index), cost_model_from_json(cost, "what rank 0 told")
