"""What storage and interconnect cost: the numbers every decision about reading is made with."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from shardferry.errors import InvalidInputError
from shardferry.format.strictjson import BadJsonError, json_kind, parse_object
from shardferry.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from shardferry.format.strictjson import Json

# No storage has more of anything; larger numbers are typing errors.
MAX_SEEK_BYTES = 1 << 40
MAX_BANDWIDTH = 1e15
MAX_STREAMS = 1 << 16
MAX_SOURCE_LETTERS = 500


@dataclass(frozen=True, slots=True)
class CostModel:
    """A storage, and the links between ranks, in a handful of numbers.

    Attributes:
        seek_bytes: What one more request costs, in bytes that the node could have read instead with its `streams`
            requests in flight. A hole of fewer bytes is cheaper to read than to skip.
        stream_bandwidth: Bytes per second of one request stream, with `streams` of them in flight.
        node_bandwidth: Bytes per second that one node gets from storage, over all its streams.
        shared_bandwidth: Bytes per second that all nodes together get from storage; infinite where every node has a
            disk of its own.
        streams: Requests in flight per node at which the node gets its bandwidth.
        has_page_cache: Whether ranks of one node that read the same bytes fetch them from storage once.
        interconnect_bandwidth: Bytes per second that one node receives from other nodes.
        rank_bandwidth: Bytes per second that one rank receives from others, on its node or not, while all do.
        source: Where the numbers come from, in words: a preset, or what was measured and when.
    """

    seek_bytes: int
    stream_bandwidth: float
    node_bandwidth: float
    shared_bandwidth: float
    streams: int
    has_page_cache: bool
    interconnect_bandwidth: float
    rank_bandwidth: float
    source: str


# Guesses where no measurement is named; `shardferry probe` replaces the storage side by what a mount really does.
# `rank_bandwidth` is what each of 4 processes got over gloo while all sent to all (2 cores, benchmarks/read_once.py).
PRESETS = {
    "local": CostModel(
        seek_bytes=128 * KIB,
        stream_bandwidth=GIB,
        node_bandwidth=2 * GIB,
        shared_bandwidth=float("inf"),
        streams=4,
        has_page_cache=True,
        interconnect_bandwidth=5 * GIB,
        rank_bandwidth=850 * MIB,
        source="preset local",
    ),
    # Files that are memory already; a request costs what a local disk's page cache has it cost.
    "memory": CostModel(
        seek_bytes=128 * KIB,
        stream_bandwidth=6 * GIB,
        node_bandwidth=50 * GIB,
        shared_bandwidth=float("inf"),
        streams=16,
        has_page_cache=True,
        interconnect_bandwidth=5 * GIB,
        rank_bandwidth=850 * MIB,
        source="preset memory",
    ),
    "network_mount": CostModel(
        seek_bytes=12 * MIB,
        stream_bandwidth=250 * MIB,
        node_bandwidth=GIB,
        shared_bandwidth=4 * GIB,
        streams=8,
        has_page_cache=True,
        interconnect_bandwidth=5 * GIB,
        rank_bandwidth=850 * MIB,
        source="preset network_mount",
    ),
    "object_store": CostModel(
        seek_bytes=4 * MIB,
        stream_bandwidth=80 * MIB,
        node_bandwidth=GIB,
        shared_bandwidth=5 * GIB,
        streams=32,
        has_page_cache=False,
        interconnect_bandwidth=5 * GIB,
        rank_bandwidth=850 * MIB,
        source="preset object_store",
    ),
}


def cost_model_to_json(model: CostModel) -> dict[str, Json]:
    """Return the model as `cost_model_from_json` takes it; an infinite bandwidth is null."""
    values: dict[str, Json] = asdict(model)
    return {name: None if value == math.inf else value for name, value in values.items()}


def cost_model_from_json(raw: bytes, where: str) -> CostModel:
    """Return the model in a JSON text: its object, or one that holds it as `cost_model`, as `probe --json` prints.

    Args:
        raw: The text, bounded by whoever read it.
        where: What messages call it.

    Raises:
        InvalidInputError: If it is no JSON object, a value is missing, unknown or impossible.
    """
    try:
        found, twins = parse_object(raw)
    except BadJsonError as error:
        raise InvalidInputError(f"{where} {error}. It should be what `shardferry probe --json` prints") from error
    if twins:
        raise InvalidInputError(f"{where} gives {twins[0].keys[0]!r} twice")
    values = found.get("cost_model", found)
    if not isinstance(values, dict):
        raise InvalidInputError(f"{where}: cost_model must be an object, not {json_kind(values)}")
    names = [field.name for field in fields(CostModel)]
    missing = [name for name in names if name not in values]
    unknown = [name for name in values if name not in names]
    if missing or unknown:
        wrong = "lacks " + ", ".join(missing) if missing else f"has {unknown[0]!r}, which no cost model has"
        raise InvalidInputError(f"{where} {wrong}. A cost model has {', '.join(names)}")
    return CostModel(
        seek_bytes=_whole(values, "seek_bytes", (0, MAX_SEEK_BYTES), where),
        stream_bandwidth=_bandwidth(values, "stream_bandwidth", where),
        node_bandwidth=_bandwidth(values, "node_bandwidth", where),
        shared_bandwidth=math.inf
        if values["shared_bandwidth"] is None
        else _bandwidth(values, "shared_bandwidth", where),
        streams=_whole(values, "streams", (1, MAX_STREAMS), where),
        has_page_cache=_truth(values, "has_page_cache", where),
        interconnect_bandwidth=_bandwidth(values, "interconnect_bandwidth", where),
        rank_bandwidth=_bandwidth(values, "rank_bandwidth", where),
        source=_text(values, "source", where),
    )


def _whole(values: dict[str, Json], name: str, allowed: tuple[int, int], where: str) -> int:
    value = values[name]
    low, high = allowed
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidInputError(f"{where}: {name} must be an integer from {low} to {high}, not {_shown(value)}")
    return value


def _bandwidth(values: dict[str, Json], name: str, where: str) -> float:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_BANDWIDTH:
        limit = f"{MAX_BANDWIDTH:g} bytes per second"
        raise InvalidInputError(f"{where}: {name} must be above 0 and at most {limit}, not {_shown(value)}")
    return float(value)


def _truth(values: dict[str, Json], name: str, where: str) -> bool:
    value = values[name]
    if not isinstance(value, bool):
        raise InvalidInputError(f"{where}: {name} must be true or false, not {_shown(value)}")
    return value


def _text(values: dict[str, Json], name: str, where: str) -> str:
    value = values[name]
    if not isinstance(value, str) or len(value) > MAX_SOURCE_LETTERS or not value.isprintable():
        limit = f"at most {MAX_SOURCE_LETTERS} printable letters"
        raise InvalidInputError(f"{where}: {name} must be a text of {limit}, not {_shown(value)}")
    return value


def _shown(value: Json) -> str:
    return (
        repr(value)[:60] if isinstance(value, (int, float, str)) and not isinstance(value, bool) else json_kind(value)
    )
