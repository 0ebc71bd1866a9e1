"""Open a checkpoint for a job: one rank does, and tells all others what is in it and what its storage costs.

With that exchange every rank also tells what it was called with, so that ranks that differ are told of it at once, and
not of steps that do not go together later.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from shardferry.errors import InvalidInputError
from shardferry.execute.costs import storage_cost
from shardferry.execute.open import open_checkpoint
from shardferry.execute.options import check_alike
from shardferry.execute.origins import Origin, Origins, is_in_doubt, origin_of
from shardferry.execute.topology import nodes_by_folder, nodes_of
from shardferry.format.checkpoint import sample_files
from shardferry.format.index import CheckpointIndex
from shardferry.plan.costmodel import CostModel, cost_model_from_json, cost_model_to_json
from shardferry.storage.location import locate
from shardferry.transport.together import together

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardferry.transport.base import Group

# Of jobs with more ranks, only so many nodes are told as they are, and of all a hash.
MAX_TOLD_NODES = 16


@dataclass(frozen=True, slots=True)
class Call:
    """What a rank was called with, as far as all ranks must be called alike.

    Attributes:
        what: The kind of call, in words that follow "a".
        path: The checkpoint on this rank.
        checkpoint_strict: Whether the file and index rules are applied in full.
        variant: Variant of the file names, e.g. `"fp16"`.
        node_of_rank: Node of every rank, instead of the detected one.
        options: Values of further options by name, as JSON can tell them.
    """

    what: str
    path: str
    checkpoint_strict: bool
    variant: str | None
    node_of_rank: Sequence[int] | None
    options: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint as all ranks know it.

    Attributes:
        index: What is in it. Its root is the path rank 0 was given, which need not be that of other ranks.
        cost: What its storage costs rank 0: what another has measured or detected, on a node of its own, enters no
            plan.
        origins: Where every rank reads it.
        nodes: The node of every rank: on one are those that share the checkpoint's pages in the page cache, or those
            of which the caller says so.
    """

    index: CheckpointIndex
    cost: CostModel
    origins: Origins
    nodes: tuple[int, ...]


def share_opened(group: Group, call: Call) -> Opened:
    """Return what is in a checkpoint and what its storage costs: rank 0 opens it. Collective.

    Raises:
        InvalidInputError: On every rank, if ranks were called with different options; names them and both values.
        ShardferryError: On every rank, if rank 0 cannot open it, or there is nothing at another rank's path.
    """
    nodes = nodes_of(group.hosts, call.node_of_rank)
    mine: list[tuple[CheckpointIndex, CostModel]] = []

    def work() -> bytes:
        if group.rank:
            return _said(call, nodes)
        index = open_checkpoint(
            call.path, strict=call.checkpoint_strict, variant=call.variant, timeout_s=group.timeout_s
        )
        cost = storage_cost(index)
        mine.append((index, cost))
        if group.world_size == 1:
            return _said(call, nodes)
        return b"\n".join((_said(call, nodes), json.dumps(cost_model_to_json(cost)).encode(), index.to_bytes()))

    shared = together(group, "open checkpoint", work)
    first, *opened = shared[0].split(b"\n", 2)
    origins = _check_calls([json.loads(data) for data in (first, *shared[1:])])
    index, cost = mine[0] if mine else _opened(*opened)
    samples = _share_samples(group, index) if is_in_doubt(nodes, origins) else {}
    shared_by = nodes
    if call.node_of_rank is None:
        shared_by = nodes_by_folder(nodes, [origin.identity for origin in origins])
    return Opened(index, cost, Origins(nodes, origins, samples), shared_by)


def _said(call: Call, nodes: Sequence[int]) -> bytes:
    """Return what a rank tells of its call."""
    options = {
        **call.options,
        "checkpoint_strict": call.checkpoint_strict,
        "variant": call.variant,
        "node_of_rank": _shortened(nodes),
    }
    return json.dumps([call.what, options, origin_of(call.path)]).encode()


def _shortened(nodes: Sequence[int]) -> list[object]:
    if len(nodes) <= MAX_TOLD_NODES:
        return list(nodes)
    return [*nodes[:MAX_TOLD_NODES], f"hash {blake2b(repr(nodes).encode(), digest_size=4).hexdigest()}"]


def _check_calls(said: Sequence[tuple[str, Mapping[str, object], Sequence[str]]]) -> tuple[Origin, ...]:
    """Return the origin of every rank, once it is clear that all were called alike."""
    (what, _, _), origins = said[0], [Origin(*origin) for _, _, origin in said]
    for rank, (other, _, _) in enumerate(said):
        if other != what:
            raise InvalidInputError(
                f"rank 0 calls a {what}, rank {rank} a {other}: every rank must make the same calls in the same order, "
                "and one may have left one out before"
            )
    check_alike([options for _, options, _ in said], what)
    for rank, origin in enumerate(origins):
        if origin.entry != origins[0].entry:
            here, there = origins[0].place, origin.place
            raise InvalidInputError(
                f"ranks 0 and {rank} call this {what} for different files: {here} and {there}. Give every rank the "
                "same path"
            )
    return tuple(origins)


def _opened(cost: bytes, index: bytes) -> tuple[CheckpointIndex, CostModel]:
    return CheckpointIndex.from_bytes(index), cost_model_from_json(cost, "what rank 0 told")


def _share_samples(group: Group, index: CheckpointIndex) -> dict[str, str]:
    """Return the hashes of samples of all files, as rank 0 reads them. Collective."""

    def work() -> bytes:
        files = () if group.rank else tuple(index.files)
        return json.dumps(
            sample_files(locate(index.root, timeout_s=group.timeout_s).files, index, files) if files else {}
        ).encode()

    samples: dict[str, str] = json.loads(together(group, "sample files", work)[0])
    return samples
