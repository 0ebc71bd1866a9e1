"""Agree how to read: who wants what, what each way of reading would cost, and one plan that all ranks share.

1. plan: every rank plans its own copies and tells what they read.
2. share wants: the sets of tensors behind what was told, each by one rank.
3. compare plans: every rank plans its part of the exchange, and tells a hash of what it shares with each group.

Where ranks share one page cache, or are told to, they read for themselves, and none of this is done; nor where storage
is memory.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from shardferry.errors import ShardingError
from shardferry.plan.demand import (
    make_demand,
    number_units,
    rows_from_bytes,
    sets_to_bytes,
    wants_of,
    wants_to_bytes,
)
from shardferry.plan.demand_shape import shape_demand
from shardferry.plan.estimate import may_gain, price_ways, thin_bytes
from shardferry.plan.readonce import Policy, ReadOncePlan, plan_read_once
from shardferry.transport.together import together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from shardferry.format.index import CheckpointIndex
    from shardferry.plan.costmodel import CostModel
    from shardferry.plan.demand import Demand, Units, Wants
    from shardferry.plan.estimate import Estimate, ReadOnce
    from shardferry.plan.load import LoadPlan
    from shardferry.transport.base import Group
    from shardferry.transport.bulk import Mover

_ONE_PAGE_CACHE = "independent: every rank reads its own bytes; all ranks share one page cache"
_FAST_STORAGE = (
    "independent: every rank reads its own bytes; storage gives a node ten times what other nodes can send it"
)
_AS_ASKED = "independent: every rank reads its own bytes, as asked"


class Sharing(NamedTuple):
    """What the caller asked for about reading for each other.

    Attributes:
        read_once: Whether one rank reads what several want: `"auto"` if that is predicted to be faster.
        exchange_bytes: Most bytes of memory that a rank's exchange may take.
        mover: Opens what moves bytes between ranks; takes what to call while it waits. Collective.
    """

    read_once: ReadOnce
    exchange_bytes: int
    mover: Callable[[Callable[[], None]], AbstractContextManager[Mover]]


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a rank reads with others.

    Attributes:
        plan: What it reads by itself and what it exchanges.
        units: Everything stored.
        is_needed: Whether any rank of the job has bytes to move.
    """

    plan: ReadOncePlan
    units: Units
    is_needed: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """How one rank reads.

    Attributes:
        plan: What it wants, as copies it could make by itself.
        exchange: What it reads with others; None if every rank reads for itself.
        strategy: How the job reads, and why.
    """

    plan: LoadPlan
    exchange: Exchange | None
    strategy: str


@dataclass(frozen=True, slots=True)
class View:
    """What all ranks see alike.

    Attributes:
        index: The checkpoint.
        nodes: The node of every rank.
        cost: What storage costs rank 0.
        sharing: What the caller asked for; only its mover may be another on every rank.
    """

    index: CheckpointIndex
    nodes: Sequence[int]
    cost: CostModel
    sharing: Sharing


class Agreed(NamedTuple):
    """What a rank knows when all have told what they want.

    Attributes:
        plan: What this rank would read by itself.
        units: Everything stored.
        demand: What all ranks want.
        wants: What this rank wants.
        estimate: What each way to read costs.
    """

    plan: LoadPlan
    units: Units
    demand: Demand
    wants: Wants
    estimate: Estimate


def may_share(nodes: Sequence[int], cost: CostModel, sharing: Sharing | None) -> bool:
    """Return whether ranks could read for each other; the same on all ranks that have the same options.

    Args:
        nodes: The node of every rank.
        cost: What storage costs rank 0.
        sharing: What the caller asked for.
    """
    if len(nodes) == 1 or sharing is None or sharing.read_once == "never":
        return False
    return sharing.read_once == "always" or len(set(nodes)) > 1 or not cost.has_page_cache


def read_alone(plan: LoadPlan, sharing: Sharing | None) -> Reading:
    """Return how to read where ranks do not share."""
    asked = sharing is not None and sharing.read_once == "never"
    return Reading(plan, None, _AS_ASKED if asked else _ONE_PAGE_CACHE)


def agree_on_reading(group: Group, view: View, make_plan: Callable[[], LoadPlan]) -> Reading:
    """Return how this rank reads, once all have agreed. Collective: call it if `may_share` says so.

    Args:
        group: The ranks.
        view: What all ranks see alike.
        make_plan: Returns what this rank would read by itself; may raise.

    Raises:
        ShardingError: If ranks do not plan the same, which is a fault of ours; names them.
    """
    if view.sharing.read_once == "auto" and not may_gain(view.nodes, view.cost):
        return Reading(plan_together(group, make_plan), None, _FAST_STORAGE)
    agreed = agree_on_estimate(group, view, make_plan)
    estimate = agreed.estimate
    if estimate.chosen == "independent":
        return Reading(agreed.plan, None, estimate.why)
    domains = (0,) * len(view.nodes) if estimate.chosen == "read-once per job" else tuple(view.nodes)
    policy = Policy(domains, thin_bytes(estimate.cost), view.sharing.exchange_bytes)
    once: list[ReadOncePlan] = []

    def plan() -> bytes:
        planned = plan_read_once(agreed.plan, agreed.units, agreed.demand, agreed.wants, policy, rank=group.rank)
        once.append(planned)
        return _digests(planned)

    digests = together(group, "compare plans", plan)
    is_needed = check_plans(digests)
    return Reading(agreed.plan, Exchange(once[0], agreed.units, is_needed), estimate.why)


def plan_together(group: Group, make_plan: Callable[[], LoadPlan]) -> LoadPlan:
    """Return this rank's plan, once all ranks have theirs. Collective."""
    plans: list[LoadPlan] = []

    def plan() -> bytes:
        plans.append(make_plan())
        return b""

    together(group, "plan", plan)
    return plans[0]


def agree_on_estimate(group: Group, view: View, make_plan: Callable[[], LoadPlan]) -> Agreed:
    """Return what each way of reading would cost, the same on all ranks, and what it was computed from. Collective.

    Args:
        group: The ranks.
        view: What all ranks see alike.
        make_plan: Returns what this rank would read by itself; may raise.
    """
    index, nodes, cost, sharing = view.index, view.nodes, view.cost, view.sharing
    units = number_units(index)
    plans: list[LoadPlan] = []
    wants: list[Wants] = []

    def tell() -> bytes:
        plans.append(make_plan())
        wants.append(wants_of(plans[0], units))
        return wants_to_bytes(wants[0])

    rows = [rows_from_bytes(data) for data in together(group, "plan", tell)]
    sets = together(group, "share wants", lambda: sets_to_bytes(wants[0], rows, group.rank))
    demand = make_demand(rows, sets)
    shape = shape_demand(demand, units, index, world_size=len(nodes), seek_bytes=cost.seek_bytes)
    estimate = price_ways(shape, nodes, cost, read_once=sharing.read_once, exchange_bytes=sharing.exchange_bytes)
    return Agreed(plans[0], units, demand, wants[0], estimate)


def check_plans(told: Sequence[bytes]) -> bool:
    """Return whether any rank has bytes to move, once it is clear that all members of every group plan the same.

    Args:
        told: By rank, for each of its groups a hash of the group, its size, and a hash of its plan.

    Raises:
        ShardingError: If they do not; names the ranks.
    """
    groups: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, data in enumerate(told):
        for group, size, digest in json.loads(data):
            groups[group, size][digest].append(rank)
    for (_, size), plans in groups.items():
        first = next(iter(plans.values()))
        if len(first) != size:
            others = sorted(rank for ranks in plans.values() for rank in ranks if rank not in first)
            said = f"ranks {first} plan another exchange than ranks {others}" if others else f"only ranks {first} plan"
            raise ShardingError(
                f"{said} of a group of {size}. All ranks need the same version of shardferry; with that, this is a "
                'fault in it, and read_once="never" goes around it'
            )
    return any(size > 1 for _, size in groups)


def _digests(plan: ReadOncePlan) -> bytes:
    rows = [
        [_hash(repr((stream.ranks, stream.is_common)).encode()), len(stream.ranks), _hash(stream.digest())]
        for stream in plan.streams
    ]
    return json.dumps(rows).encode()


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
