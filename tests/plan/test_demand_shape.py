"""What ranks have told is priced as the layouts are that it comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from tests.expensive import EXPENSIVE

from shardferry.convert.ops import Stored
from shardferry.geometry.region import box
from shardferry.plan.costmodel import PRESETS
from shardferry.plan.demand import make_demand, number_units, rows_from_bytes, sets_to_bytes, wants_of, wants_to_bytes
from shardferry.plan.demand_shape import shape_demand
from shardferry.plan.estimate import EXCHANGE_BYTES, choose_strategy, price_ways
from shardferry.plan.load import Wanted, plan_load
from shardferry.plan.target import region_of

from .test_estimate import WORLD, index_of, jobs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardferry.format.index import CheckpointIndex
    from shardferry.plan.catalogue import Held
    from shardferry.plan.estimate import Estimate

COST = PRESETS["network_mount"]


def priced(index: CheckpointIndex, wanted: Sequence[Sequence[Wanted]], nodes: Sequence[int]) -> Estimate:
    """Return the prices after all ranks have told what they want."""
    units = number_units(index)
    wants = [wants_of(plan_load(index, mine), units) for mine in wanted]
    rows = [rows_from_bytes(wants_to_bytes(mine)) for mine in wants]
    demand = make_demand(rows, [sets_to_bytes(mine, rows, rank) for rank, mine in enumerate(wants)])
    shape = shape_demand(demand, units, index, world_size=len(nodes), seek_bytes=COST.seek_bytes)
    return price_ways(shape, nodes, COST, read_once="auto", exchange_bytes=EXCHANGE_BYTES)


def wanted_by(index: CheckpointIndex, job: Mapping[str, Held], rank: int) -> list[Wanted]:
    found = []
    for name, held in job.items():
        region = region_of(held.layout, held.shape, rank) if rank in held.ranks else None
        if region is not None and region.num_elements:
            found.append(Wanted(name, Stored(name, index.tensors[name].shape), region))
    return found


@EXPENSIVE
@given(jobs())
def test_what_is_told_is_priced_as_the_layouts_are(
    drawn: tuple[CheckpointIndex, dict[str, Held], tuple[int, ...]],
) -> None:
    index, job, nodes = drawn
    told = priced(index, [wanted_by(index, job, rank) for rank in range(WORLD)], nodes)
    known = choose_strategy(job, index, nodes, COST)
    assert told.rank_wanted.tolist() == known.rank_wanted.tolist()
    for mine, other in zip(told.prices, known.prices, strict=True):
        assert (mine.storage_bytes, mine.over_read_bytes) == (other.storage_bytes, other.over_read_bytes)
        assert mine.exchange_bytes == pytest.approx(other.exchange_bytes, abs=WORLD)  # shares are rounded
    for mine, other in zip(told.prices[:2], known.prices[:2], strict=True):
        assert mine.node_requests.tolist() == other.node_requests.tolist()
        assert mine.seconds == pytest.approx(other.seconds)


def test_a_rank_that_wants_several_parts_of_a_tensor_reads_each_once() -> None:
    index = index_of({"w": (8, 4)})
    parts = [box((0, 0), (2, 4)), box((6, 0), (2, 4)), box((0, 0), (1, 4))]
    mine = [Wanted(f"w{at}", Stored("w", (8, 4)), part) for at, part in enumerate(parts)]
    estimate = priced(index, [mine, [Wanted("w", Stored("w", (8, 4)), box((0, 0), (8, 4)))]], (0, 1))
    assert estimate.bytes_wanted == 32
    assert estimate.price("read-once per job").storage_bytes == 32
