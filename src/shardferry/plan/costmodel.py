"""What storage and interconnect cost: the numbers every decision about reading is made with."""

from __future__ import annotations

from dataclasses import dataclass

from shardferry.units import GIB, KIB, MIB


@dataclass(frozen=True, slots=True)
class CostModel:
    """A storage, and the links between ranks, in a handful of numbers.

    Attributes:
        seek_bytes: What one more request costs, in bytes that could have been read instead at the bandwidth of one
            stream. A hole of fewer bytes is cheaper to read than to skip.
        stream_bandwidth: Bytes per second of one request stream.
        node_bandwidth: Bytes per second that one node gets from storage, over all its streams.
        shared_bandwidth: Bytes per second that all nodes together get from storage; infinite where every node has a
            disk of its own.
        streams: Requests in flight per node at which the node gets its bandwidth.
        has_page_cache: Whether ranks of one node that read the same bytes fetch them from storage once.
        interconnect_bandwidth: Bytes per second that one node receives from other nodes.
        local_bandwidth: Bytes per second that one rank receives from ranks of its own node.
        source: Where the numbers come from, in words: a preset, or what was measured and when.
    """

    seek_bytes: int
    stream_bandwidth: float
    node_bandwidth: float
    shared_bandwidth: float
    streams: int
    has_page_cache: bool
    interconnect_bandwidth: float
    local_bandwidth: float
    source: str


# Guesses where no measurement is named; `shardferry probe` replaces the storage side by what a mount really does.
PRESETS = {
    "local": CostModel(
        seek_bytes=128 * KIB,
        stream_bandwidth=GIB,
        node_bandwidth=2 * GIB,
        shared_bandwidth=float("inf"),
        streams=4,
        has_page_cache=True,
        interconnect_bandwidth=5 * GIB,
        local_bandwidth=GIB,
        source="preset local",
    ),
    "network_mount": CostModel(
        seek_bytes=12 * MIB,
        stream_bandwidth=250 * MIB,
        node_bandwidth=GIB,
        shared_bandwidth=4 * GIB,
        streams=8,
        has_page_cache=True,
        interconnect_bandwidth=5 * GIB,
        local_bandwidth=GIB,
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
        local_bandwidth=GIB,
        source="preset object_store",
    ),
}
