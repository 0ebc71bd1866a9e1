"""Price the ways of reading a checkpoint for a job, and choose the cheapest.

Four ways: *independent*, every rank reads its own bytes; *whole files*, every node reads all of each file it needs
anything of (only for comparison: independent reading bridges holes that are cheaper than a seek, and so never costs
more); *read-once per node* and *read-once per job*, in which each byte is read by one rank of the node or the job
and then exchanged. A price is bytes, requests and seconds, computed from the job's patterns and a `CostModel`.

The time to read is the longest of what one node's link, all nodes together, and the request streams of one node take;
a request costs `seek_bytes` of one stream. The time to exchange is the longest of what a node receives from others
and a rank from anywhere. Both overlap but for one round. This is a model: it ranks ways of reading, and it does
not promise seconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from shardferry.plan.bridges import find_bridges
from shardferry.plan.cost import EXACT_PIECE_BYTES, MAX_ROW_BYTES
from shardferry.plan.describe import estimate_to_json, summary
from shardferry.plan.patterns import shape_job
from shardferry.plan.readonce import PARTS_OF_MEMORY
from shardferry.plan.volumes import (
    holdings_of,
    volume_independent,
    volume_once,
    volume_whole,
    wanted_by_group,
    wanted_by_rank,
)
from shardferry.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardferry.format.index import CheckpointIndex
    from shardferry.plan.catalogue import Held
    from shardferry.plan.costmodel import CostModel
    from shardferry.plan.patterns import Ints, JobShape
    from shardferry.plan.volumes import Volume

Strategy = Literal["independent", "whole files", "read-once per node", "read-once per job"]
ReadOnce = Literal["auto", "always", "never"]

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
# A node that gets this many times from storage what other nodes can send it, reads for itself.
FAST_STORAGE = 10
# Memory of a process for exchanging.
EXCHANGE_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True, eq=False)
class Price:
    """What one way of reading costs.

    Attributes:
        strategy: The way.
        storage_bytes: Bytes that cross the storage link, over the job: the egress.
        over_read_bytes: Of these, bytes that nobody wants where they arrive: holes, rest of rows, rest of files.
        node_bytes: Shape (num_nodes,): storage bytes by node.
        node_requests: Shape (num_nodes,): runs of bytes read from storage; a long run is one however it is cut.
        rank_bytes: Shape (world_size,): bytes each rank reads, out of a page cache included.
        received_remote: Shape (num_nodes,): bytes that ranks of a node receive from other nodes.
        received_local: Shape (world_size,): bytes a rank receives from ranks of its own node.
        received: Shape (world_size,): bytes a rank receives from any other.
        storage_s: Predicted seconds to read.
        exchange_s: Predicted seconds to exchange.
        seconds: Predicted seconds of both, overlapped.
    """

    strategy: Strategy
    storage_bytes: int
    over_read_bytes: int
    node_bytes: Ints
    node_requests: Ints
    rank_bytes: Ints
    received_remote: Ints
    received_local: Ints
    received: Ints
    storage_s: float
    exchange_s: float
    seconds: float

    @property
    def exchange_bytes(self) -> int:
        """Bytes received over the job, from other nodes and from the own."""
        return int(self.received.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """The ways to read a checkpoint for a job, and which one to take.

    Attributes:
        nodes: Node of every rank.
        cost: The numbers it was priced with.
        bytes_wanted: Bytes that some rank wants, each counted once: less can't cross the storage link.
        rank_wanted: Shape (world_size,): bytes each rank wants.
        prices: One per strategy.
        chosen: The way to take.
        why: The numbers that decided, in a sentence.
    """

    nodes: tuple[int, ...]
    cost: CostModel
    bytes_wanted: int
    rank_wanted: Ints
    prices: tuple[Price, ...]
    chosen: Strategy
    why: str

    def price(self, strategy: Strategy) -> Price:
        """Return the price of one way."""
        return self.prices[STRATEGIES.index(strategy)]

    def __str__(self) -> str:
        return "\n".join(summary(self))

    def to_json(self) -> str:
        """Return everything as JSON; `shardferry plan --json` prints the same."""
        return json.dumps(estimate_to_json(self), allow_nan=False)

    @property
    def num_nodes(self) -> int:
        """Nodes of the job."""
        return max(self.nodes, default=-1) + 1

    @property
    def egress_bytes(self) -> int:
        """Bytes that will cross the storage link."""
        return self.price(self.chosen).storage_bytes


def choose_strategy(
    job: Mapping[str, Held],
    index: CheckpointIndex,
    nodes: Sequence[int],
    cost: CostModel,
    *,
    read_once: ReadOnce = "auto",
    exchange_bytes: int = EXCHANGE_BYTES,
) -> Estimate:
    """Return what each way of reading costs a job, and the one to take. The same on every rank.

    Args:
        job: What every rank holds, by checkpoint name, in any order.
        index: Where it is stored.
        nodes: Node of every rank, counted from 0.
        cost: Of storage and interconnect; the same on every rank.
        read_once: `"auto"` takes the cheapest way, `"always"` the cheapest that reads each byte once, `"never"`
            independent reading. `"auto"` never lets ranks that share a page cache read for each other alone.
        exchange_bytes: Memory of a process for exchanging.

    Raises:
        ShardingError: If a rank's part cannot be read; names the tensor.
    """
    shape = shape_job(job, index, world_size=len(nodes), seek_bytes=cost.seek_bytes)
    return price_ways(shape, nodes, cost, read_once=read_once, exchange_bytes=exchange_bytes)


def price_ways(
    shape: JobShape, nodes: Sequence[int], cost: CostModel, *, read_once: ReadOnce, exchange_bytes: int
) -> Estimate:
    """Return the same for a job that is arrays already; see `choose_strategy`."""
    node_of = np.array(nodes, np.int64)
    bridges = tuple(find_bridges(shape, max(1, cost.seek_bytes)))
    holdings = holdings_of(shape)
    volumes = (
        volume_independent(holdings, node_of, bridges if cost.seek_bytes else (), has_page_cache=cost.has_page_cache),
        volume_whole(shape, node_of, has_page_cache=cost.has_page_cache),
        volume_once(holdings, node_of, node_of, bridges, thin_bytes=thin_bytes(cost)),
        volume_once(holdings, node_of, np.zeros_like(node_of), bridges, thin_bytes=thin_bytes(cost)),
    )
    wanted, by_node = wanted_by_rank(holdings, len(nodes)), int(wanted_by_group(holdings, node_of).sum())
    total = int(wanted_by_group(holdings, np.zeros_like(node_of)).sum())
    alone = by_node if cost.has_page_cache else int(wanted.sum())
    prices = tuple(
        _priced(strategy, volume, cost, exchange_bytes, least)
        for strategy, volume, least in zip(STRATEGIES, volumes, (alone, alone, by_node, total), strict=True)
    )
    candidates = [prices[STRATEGIES.index(strategy)] for strategy in _candidates(read_once, nodes, cost)]
    best = min(candidates, key=lambda price: price.seconds)
    return Estimate(tuple(nodes), cost, total, wanted, prices, best.strategy, _why(best, candidates))


def may_gain(nodes: Sequence[int], cost: CostModel) -> bool:
    """Return whether reading for each other could save as much as a tenth, seeks apart.

    With a page cache a node reads each byte once; one that it does not read, another node must send it. So at best it
    gets bytes at both bandwidths together instead of storage's alone.

    Args:
        nodes: Node of every rank.
        cost: Of storage and interconnect.
    """
    of_node = min(cost.node_bandwidth, cost.stream_bandwidth * cost.streams, cost.shared_bandwidth / len(set(nodes)))
    return not cost.has_page_cache or of_node < FAST_STORAGE * cost.interconnect_bandwidth


def _candidates(read_once: ReadOnce, nodes: Sequence[int], cost: CostModel) -> tuple[Strategy, ...]:
    """Return what a load may take; of equal prices the first.

    Ranks of a node with a page cache already fetch each byte once. To exchange it as well was measured to be 3.2 to
    4.4 times slower, warm or cold (4 processes, gloo, a local disk), whatever a model of storage says. Nor is it a way
    where it could hardly gain: a load reads there without asking what other ranks want.
    """
    if read_once == "never":
        return ("independent",)
    if read_once == "always":
        return ("read-once per node", "read-once per job")
    if (len(set(nodes)) == 1 and cost.has_page_cache) or not may_gain(nodes, cost):
        return ("independent",)
    if cost.has_page_cache:
        return "independent", "read-once per job"
    return ("independent", "read-once per node", "read-once per job")


def thin_bytes(cost: CostModel) -> int:
    """Return below how many bytes, on average, runs are read in whole rows and exchanged."""
    return max(EXACT_PIECE_BYTES, min(cost.seek_bytes, MAX_ROW_BYTES))


def _priced(strategy: Strategy, volume: Volume, cost: CostModel, exchange_bytes: int, least: int) -> Price:
    streams = cost.stream_bandwidth * cost.streams
    seeking = volume.node_bytes + volume.node_requests * float(cost.seek_bytes)
    storage_s = max(
        float(np.max(volume.node_bytes, initial=0)) / cost.node_bandwidth,
        float(np.max(seeking, initial=0)) / streams,
        float(volume.node_bytes.sum()) / cost.shared_bandwidth,
    )
    exchange_s = max(
        float(np.max(volume.received_remote, initial=0)) / cost.interconnect_bandwidth,
        float(np.max(volume.received, initial=0)) / cost.rank_bandwidth,
    )
    most = int(np.max(volume.rank_bytes, initial=0))
    rounds = max(1, -(-most * PARTS_OF_MEMORY // exchange_bytes))
    seconds = max(storage_s, exchange_s) + min(storage_s, exchange_s) / rounds
    total = int(volume.node_bytes.sum())
    return Price(strategy, total, total - least, *volume, storage_s, exchange_s, seconds)


def _why(best: Price, candidates: Sequence[Price]) -> str:
    """Say what decided: where the time goes on the way taken, and on the best of the others."""
    others = sorted((price for price in candidates if price is not best), key=lambda price: price.seconds)
    if not others:
        return f"{best.strategy}: {_spent(best)}"
    return f"{best.strategy}: {_spent(best)}; {others[0].strategy} would take {_spent(others[0])}"


def _spent(price: Price) -> str:
    exchange = ""
    if price.exchange_bytes:
        exchange = f" and {format_bytes(price.exchange_bytes)} exchanged ({price.exchange_s:.3g} s)"
    read = f"{format_bytes(price.storage_bytes)} from storage ({price.storage_s:.3g} s)"
    return f"{price.seconds:.3g} s, {read}{exchange}"
