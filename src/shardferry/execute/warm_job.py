"""Warm the page caches of all nodes of a job, on every rank of a group.

1. open: rank 0 opens and checks the checkpoint and shares the parsed index.
2. compare: ranks match their models with it and tell what they hold, as for a save: patterns, then each name once.
3. look: the first rank of every node sees what its page cache holds and what it has room for.
4. read: the ranks of a node share what it lacks by bytes.
5. look again.

Each step succeeds on all ranks or raises on all ranks.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from shardferry.convert.ops import Stored, leaves
from shardferry.convert.table import to_model
from shardferry.convert.tensor import stored_tensors
from shardferry.errors import MismatchError
from shardferry.execute.costs import storage_cost
from shardferry.execute.job import check_given_names
from shardferry.execute.opening import Call, share_opened
from shardferry.execute.origins import check_files
from shardferry.execute.warm import look_at, page_cached_root, plan_node
from shardferry.execute.warm_read import Watch, absent_bytes, read_shares
from shardferry.execute.warm_report import Look, Tally, make_report
from shardferry.plan.catalogue import Held, inventory_to_bytes, make_catalogue, names_to_bytes, spokesmen
from shardferry.plan.costmodel import CostModel
from shardferry.plan.match import (
    Match,
    Problems,
    Rules,
    conversions_key,
    match_targets,
    merge_problems,
    raise_problems,
)
from shardferry.plan.warm import node_wants, share_of
from shardferry.transport.together import together

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from shardferry.convert.ops import Expression
    from shardferry.execute.origins import Origins
    from shardferry.execute.warm import WarmRequest
    from shardferry.execute.warm_report import NodePlan, WarmReport
    from shardferry.format.index import CheckpointIndex
    from shardferry.plan.load import Wanted
    from shardferry.plan.target import Target
    from shardferry.transport.base import Group

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What the caller asked for.

    Attributes:
        path: The checkpoint on this rank.
        checkpoint_strict: Whether the file and index rules are applied in full.
        variant: Variant of the file names, e.g. `"fp16"`.
        rules: How names and dtypes are matched, as for the load that follows.
        given_names: Names for which the caller gave shardings.
        node_of_rank: Node of every rank, instead of the detected one.
        warm: How to warm; rank 0's cost model is everyone's.
    """

    path: str
    checkpoint_strict: bool
    variant: str | None
    rules: Rules
    given_names: Collection[str]
    node_of_rank: Sequence[int] | None
    warm: WarmRequest


class _Here(NamedTuple):
    """This rank's node."""

    checkpoint: CheckpointIndex
    origins: Origins
    wanted: tuple[Wanted, ...]
    ranks: tuple[int, ...]
    cost: CostModel


def run_warm(group: Group, targets: Callable[[], Sequence[Target]], request: JobRequest) -> WarmReport:
    """Warm the page cache of every node for what its ranks hold. Collective: call on every rank of the group.

    Args:
        group: The ranks of the job.
        targets: Gives what this rank's model offers to be filled.
        request: What the caller asked for.

    Returns:
        What was done on this rank's node.

    Raises:
        ShardferryError: On every rank, if any rank cannot do its part.
    """
    begin = perf_counter()
    opened = share_opened(group, _call(request))
    nodes = opened.nodes
    # A rank's own path: nodes may keep the checkpoint in different places.
    index = replace(opened.index, root=page_cached_root(request.path))
    job, sources, cost = _compare(group, index, targets, request)
    ranks = tuple(rank for rank, node in enumerate(nodes) if node == nodes[group.rank])
    here = _Here(index, opened.origins, tuple(node_wants(job, sources, ranks)), ranks, cost)
    plan = _look(group, here, request)
    tallies = _read(group, here, plan, request)
    absent = _look_again(group, here, plan)
    seconds = perf_counter() - begin
    report = make_report(ranks, plan, tallies, absent=absent, seconds=seconds, cost_source=cost.source)
    if group.rank == 0:
        logger.info("warmed %s for ranks %s to %s: %s", request.path, ranks[0], ranks[-1], report.why)
    return report


def _call(request: JobRequest) -> Call:
    """Return what all ranks have to ask alike."""
    options = {"when_short": request.warm.when_short, "conversions": conversions_key(request.rules.conversions)}
    return Call("warm-up", request.path, request.checkpoint_strict, request.variant, request.node_of_rank, options)


def _compare(
    group: Group, index: CheckpointIndex, targets: Callable[[], Sequence[Target]], request: JobRequest
) -> tuple[dict[str, Held], Mapping[str, Expression], CostModel]:
    """Return every tensor of the job that the checkpoint has, how those are made that it has not, and rank 0's cost."""
    held: list[Target] = []
    sources = dict(request.rules.sources)

    def tell() -> bytes:
        mine = targets()
        check_given_names(index, mine, request.given_names)
        matching = match_targets(index, mine, request.rules)
        made = _made(index, request.rules)
        sources.update((_made_name(name), source) for name, source in made.items())
        held.extend(_as_held(index, match, made) for match in matching.matches)
        cost = request.warm.cost or (storage_cost(index) if group.rank == 0 else None)
        inventory = inventory_to_bytes(held, group.rank).decode()
        return json.dumps([inventory, asdict(matching.problems), None if cost is None else asdict(cost)]).encode()

    told = [json.loads(data) for data in together(group, "compare models", tell)]
    problems = merge_problems([Problems(**problems) for _, problems, _ in told])
    raise_problems(problems, strict=False)
    inventories = [inventory.encode() for inventory, _, _ in told]
    speaks = any(ranks[0] == group.rank for ranks in spokesmen(inventories).values())
    job = make_catalogue(inventories, group.exchange("share names", names_to_bytes(held) if speaks else b""))
    if not job:
        raise MismatchError(
            f"{index.root} has none of the names of the model, such as {', '.join(problems.missing[:3]) or '(none)'}: "
            "there is nothing to warm. Give the checkpoint this model is loaded from"
        )
    return job, sources, CostModel(**told[0][2])


def _made(index: CheckpointIndex, rules: Rules) -> dict[str, Expression]:
    """Return how conversions make tensors that are not stored as they are, also those that only other ranks hold."""
    if not rules.conversions:
        return {}
    tensors = to_model(stored_tensors(index.tensors), rules.conversions).tensors
    return {name: tensor.source for name, tensor in tensors.items() if not _is_stored(tensor.source, index)}


def _made_name(name: str) -> str:
    """Return how a tensor that conversions make is told of: the checkpoint may have another one of its name."""
    return f"{name} (converted)"


def _is_stored(source: Expression, index: CheckpointIndex) -> TypeGuard[Stored]:
    """Return whether a tensor is stored as it is, perhaps under another name."""
    return isinstance(source, Stored) and source.shape == index.tensors[source.key].shape


def _as_held(index: CheckpointIndex, match: Match, made: Mapping[str, Expression]) -> Target:
    """Return the target under the name by which other ranks find its bytes: the checkpoint's, if it is stored."""
    source = match.source
    if _is_stored(source, index):
        name = source.key
    else:
        name = next((_made_name(name) for name in match.target.names if name in made), match.target.name)
    return replace(match.target, names=(name,), shape=source.shape)


def _look(group: Group, here: _Here, request: JobRequest) -> NodePlan:
    def look() -> bytes:
        if here.origins.is_checker(group.rank):
            stored = {leaf.key for wanted in here.wanted for leaf in leaves(wanted.source)}
            files = sorted({file for name in stored for file in here.checkpoint.tensors[name].files})
            check_files(here.origins, group.rank, request.path, here.checkpoint, files, timeout_s=group.timeout_s)
        if group.rank != here.ranks[0]:
            return b""
        return json.dumps(look_at(here.checkpoint, here.wanted, here.cost.seek_bytes, request.warm.when_short)).encode()

    seen = together(group, "look at the page cache", look)[here.ranks[0]]
    return plan_node(here.checkpoint, here.wanted, Look(*json.loads(seen)))


def _read(group: Group, here: _Here, plan: NodePlan, request: JobRequest) -> list[Tally]:
    def read() -> bytes:
        shares = share_of(plan.files, len(here.ranks), here.ranks.index(group.rank))
        num_threads = max(1, here.cost.streams // len(here.ranks))
        watch = Watch(group.rank, request.warm.on_progress, group.check)
        return json.dumps(read_shares(here.checkpoint.root, shares, num_threads=num_threads, watch=watch)).encode()

    told = together(group, "warm the page cache", read)
    return [Tally(*json.loads(told[rank])) for rank in here.ranks]


def _look_again(group: Group, here: _Here, plan: NodePlan) -> int | None:
    def look() -> bytes:
        if group.rank != here.ranks[0]:
            return b""
        return json.dumps(absent_bytes(here.checkpoint.root, plan.files)).encode()

    absent: int | None = json.loads(together(group, "look at the page cache again", look)[here.ranks[0]])
    return absent
