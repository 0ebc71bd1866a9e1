"""An estimate in words and as plain data, for people and for scripts. Pure: who prints it is not its matter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardferry.plan.costmodel import cost_model_to_json
from shardferry.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardferry.format.strictjson import Json
    from shardferry.plan.estimate import Estimate, Price

# A second way that is hardly slower is no reason to think about the choice.
_CLOSE = 1.05


def estimate_to_json(estimate: Estimate) -> dict[str, Json]:
    """Return everything an estimate holds, in JSON's types.

    The keys are world_size, num_nodes, node_of_rank, bytes_wanted (over the job, each byte once), rank_wanted (by
    rank), egress_bytes, chosen, why, advice, cost, and strategies: by name storage_bytes, over_read_bytes, requests,
    exchange_bytes, storage_s, exchange_s, seconds, and by node and rank node_bytes, node_requests, rank_bytes,
    received_remote, received_local and received.
    """
    return {
        "world_size": len(estimate.nodes),
        "num_nodes": estimate.num_nodes,
        "node_of_rank": list(estimate.nodes),
        "bytes_wanted": estimate.bytes_wanted,
        "rank_wanted": estimate.rank_wanted.tolist(),
        "egress_bytes": estimate.egress_bytes,
        "chosen": estimate.chosen,
        "why": estimate.why,
        "advice": advice(estimate),
        "cost": dict(cost_model_to_json(estimate.cost)),
        "strategies": {price.strategy: _price_to_json(price) for price in estimate.prices},
    }


def advice(estimate: Estimate) -> str:
    """Return one line that says what to do."""
    chosen, independent = estimate.price(estimate.chosen), estimate.price("independent")
    if estimate.chosen == "independent":
        others = [price for price in estimate.prices if price.strategy.startswith("read-once")]
        best = min(others, key=lambda price: price.seconds)
        if best.storage_bytes < independent.storage_bytes:
            return (
                f"Leave read_once at auto: every rank reads for itself. read_once='always' would take "
                f"{_times(best.seconds, independent.seconds)} as long, and {format_bytes(best.storage_bytes)} from "
                f"storage instead of {format_bytes(independent.storage_bytes)}."
            )
        return "Leave read_once at auto: every rank reads for itself, and no other way reads less."
    gain = _times(independent.seconds, chosen.seconds)
    close = "" if independent.seconds > _CLOSE * chosen.seconds else "hardly "
    return (
        f"Leave read_once at auto: {chosen.strategy} is {close}faster ({gain}), with "
        f"{format_bytes(chosen.storage_bytes)} from storage instead of {format_bytes(independent.storage_bytes)}."
    )


def summary(estimate: Estimate) -> tuple[str, ...]:
    """Return the job and the decision in a few lines."""
    wanted = estimate.rank_wanted
    low, high = format_bytes(int(wanted.min())), format_bytes(int(wanted.max()))
    each = low if low == high else f"{low} to {high}"
    ranks, nodes = len(estimate.nodes), estimate.num_nodes
    held = f"{format_bytes(estimate.bytes_wanted)} once and {format_bytes(int(wanted.sum()))} with copies"
    return (
        f"{_counted(ranks, 'rank')} on {_counted(nodes, 'node')}; each wants {each}, together {held}",
        f"priced for {estimate.cost.source}: {_cost_in_words(estimate)}",
        estimate.why,
        f"at most {format_bytes(estimate.egress_bytes)} ({estimate.egress_bytes} bytes) cross the storage link",
        advice(estimate),
    )


def _price_to_json(price: Price) -> dict[str, Json]:
    return {
        "storage_bytes": price.storage_bytes,
        "over_read_bytes": price.over_read_bytes,
        "requests": int(price.node_requests.sum()),
        "exchange_bytes": price.exchange_bytes,
        "storage_s": price.storage_s,
        "exchange_s": price.exchange_s,
        "seconds": price.seconds,
        "node_bytes": price.node_bytes.tolist(),
        "node_requests": price.node_requests.tolist(),
        "rank_bytes": price.rank_bytes.tolist(),
        "received_remote": price.received_remote.tolist(),
        "received_local": price.received_local.tolist(),
        "received": price.received.tolist(),
    }


def _cost_in_words(estimate: Estimate) -> str:
    told: Mapping[str, float] = {
        "a stream": estimate.cost.stream_bandwidth,
        "a node": estimate.cost.node_bandwidth,
        "all nodes": estimate.cost.shared_bandwidth,
        "between nodes": estimate.cost.interconnect_bandwidth,
        "to a rank": estimate.cost.rank_bandwidth,
    }
    rates = ", ".join(f"{who} {format_bytes(int(rate))}/s" for who, rate in told.items() if rate != float("inf"))
    cache = "a page cache per node" if estimate.cost.has_page_cache else "no page cache"
    return f"{rates}; a request costs {format_bytes(estimate.cost.seek_bytes)}; {cache}"


def _times(seconds: float, other: float) -> str:
    return f"{seconds / other:.2g} times" if other else "as many times"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
