"""What the demo's processes tell the command line: the one thing `demo` and `demo_worker` share."""

from __future__ import annotations

from typing import TypedDict


class LoadResult(TypedDict):
    """One layout loaded by one loader; the lists have one entry per rank."""

    layout: str
    loader: str
    bytes_read: list[int]
    seconds: float  # of the slowest rank
    peak_memory_bytes: list[int]  # growth of private memory while loading
    max_difference: float  # of any number of any embedding, against transformers on one process
    min_cosine: float


class DemoResult(TypedDict):
    """Everything one run found."""

    file_bytes: int
    processes: int
    sentences: list[str]
    similarity: list[list[float]]  # cosine of every two sentences, from transformers on one process
    tolerance: float  # on `max_difference`
    loads: list[LoadResult]


def wrong_loads(result: DemoResult) -> tuple[LoadResult, ...]:
    """Return the loads whose embedding differs from transformers' by more than the tolerance.

    A difference that is no number (`nan`) counts as wrong.
    """
    return tuple(load for load in result["loads"] if not load["max_difference"] <= result["tolerance"])
