"""The bytes a price states beforehand are those that the ranks' read-once plans then read and exchange."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.expensive import EXPENSIVE
from tests.plan.test_estimate import WORLD, held, index_of, jobs

from shardferry.convert.ops import Stored
from shardferry.geometry.sharding import MeshLayout, Split
from shardferry.plan.costmodel import PRESETS
from shardferry.plan.demand import make_demand, number_units, rows_from_bytes, sets_to_bytes, wants_of, wants_to_bytes
from shardferry.plan.estimate import choose_strategy, thin_bytes
from shardferry.plan.load import Wanted, plan_load
from shardferry.plan.readonce import Policy, ReadOncePlan, plan_read_once
from shardferry.plan.target import region_of
from shardferry.units import MIB

if TYPE_CHECKING:
    from shardferry.format.index import CheckpointIndex
    from shardferry.plan.catalogue import Held

COST = PRESETS["object_store"]


def plans_of(index: CheckpointIndex, job: dict[str, Held], domains: tuple[int, ...], thin: int) -> list[ReadOncePlan]:
    """Return the plan of every rank, made from what all have told."""
    units = number_units(index)
    loads = []
    for rank in range(len(domains)):
        found = [
            (name, one.shape, region_of(one.layout, one.shape, rank)) for name, one in job.items() if rank in one.ranks
        ]
        wanted = [Wanted(name, Stored(name, shape), region) for name, shape, region in found if region is not None]
        loads.append(plan_load(index, wanted))
    wants = [wants_of(load, units) for load in loads]
    rows = [rows_from_bytes(wants_to_bytes(want)) for want in wants]
    demand = make_demand(rows, [sets_to_bytes(want, rows, rank) for rank, want in enumerate(wants)])
    policy = Policy(domains, thin, MIB)
    return [plan_read_once(loads[r], units, demand, wants[r], policy, rank=r) for r in range(len(domains))]


def reads_of(plan: ReadOncePlan, rank: int) -> int:
    """Return the bytes a rank reads under its plan."""
    shares = 0
    for stream in plan.streams:
        member = stream.ranks.index(rank)
        shares += stream.bounds[member + 1] - stream.bounds[member]
    return plan.direct.bytes_wanted + shares


@EXPENSIVE
@given(jobs(), st.sampled_from(["read-once per node", "read-once per job"]))
def test_egress_is_what_the_plans_read(
    drawn: tuple[CheckpointIndex, dict[str, Held], tuple[int, ...]], strategy: str
) -> None:
    index, job, nodes = drawn
    estimate = choose_strategy(job, index, nodes, COST)
    price = next(price for price in estimate.prices if price.strategy == strategy)
    domains = nodes if strategy == "read-once per node" else (0,) * WORLD
    plans = plans_of(index, job, domains, thin_bytes(COST))
    read = [reads_of(plan, rank) for rank, plan in enumerate(plans)]
    assert sum(read) == price.storage_bytes
    wanted = estimate.rank_wanted.sum()
    if strategy == "read-once per node":
        assert np.bincount(nodes, weights=read).tolist() == price.node_bytes.tolist()
    assert price.exchange_bytes <= wanted


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 2, 3)])
def test_shares_and_volumes_of_regular_jobs_are_exact(dim: int | None, nodes: tuple[int, ...]) -> None:
    """Replicated, rows and columns over two of the axes, of which one replicates."""
    index = index_of({f"t{at}": (64, 48) for at in range(4)})
    splits = () if dim is None else (Split(1, dim),)
    layout = MeshLayout((2, 2), tuple(range(WORLD)), splits)
    job = {name: held(index, name, layout) for name in index.tensors}
    price = choose_strategy(job, index, nodes, COST).price("read-once per job")
    plans = plans_of(index, job, (0,) * WORLD, thin_bytes(COST))
    assert price.rank_bytes.tolist() == [reads_of(plan, rank) for rank, plan in enumerate(plans)]
    received = [0] * WORLD
    local = [0] * WORLD
    for rank, plan in enumerate(plans):
        for stream in plan.streams:
            for number in range(stream.num_rounds):
                for member, reader in enumerate(stream.ranks):
                    parts = [part for piece in stream.pieces(member, number) for part in piece.parts]
                    mine = sum(part.region.num_elements for part in parts if rank in part.holders)
                    received[rank] += mine if reader != rank else 0
                    local[rank] += mine if reader != rank and nodes[reader] == nodes[rank] else 0
    assert price.received_local.tolist() == local
    assert price.exchange_bytes == sum(received)


def test_a_price_is_the_same_whatever_the_bandwidths() -> None:
    """Bytes follow from the job; only seconds from the cost."""
    index = index_of({"w": (64, 48)})
    job = {"w": held(index, "w", None)}
    fast = replace(COST, node_bandwidth=2 * COST.node_bandwidth)
    volumes = [
        [price.storage_bytes for price in choose_strategy(job, index, (0, 0, 1, 1), cost).prices]
        for cost in (COST, fast)
    ]
    assert volumes[0] == volumes[1]
