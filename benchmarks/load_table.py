"""Turns the load benchmark's records into ratios; `python -m benchmarks.load_table FILE...` prints them again.

A call's time is its slowest rank's. A loader's time in a round is its best call of that kind in the round, the first
call excepted. Ratios are taken inside a round, and the table shows their median and range over the rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

LIMIT = "limit"
OURS = "shardferry"


Cache = Literal["first", "warm", "cold"]
# What is compared.
CACHES: tuple[Cache, ...] = ("warm", "cold")


class Record(TypedDict):
    """One call of one rank."""

    loader: str
    round: int
    cache: Cache
    rank: int
    seconds: float
    wanted_bytes: int
    held_bytes: int
    peak_bytes: int
    disk_bytes: int
    wrong: str | None


Rounds = dict[int, float]


def print_tables(records: Sequence[Record]) -> None:
    """Print one Markdown table for the warm page cache and one for the cold, and what the library gained."""
    for wrong in [record for record in records if record["wrong"]]:
        print(f"WRONG BYTES: {wrong['loader']} rank {wrong['rank']} {wrong['cache']}: {wrong['wrong']}")
    for cache in CACHES:
        of_cache = [record for record in records if record["cache"] == cache]
        times = times_of(records, cache)
        memory = {name: _peak_over_held(group) for name, group in _by(of_cache, "loader").items()}
        disk = {name: _disk_over_held(group) for name, group in _by(of_cache, "loader").items()}
        print(f"\n{cache} page cache\n")
        print("| loader | seconds | x limit | x fastest peer | peak memory over held, MB a rank | disk bytes / held |")
        print("|---|---|---|---|---|---|")
        for name in sorted(times, key=lambda name: statistics.median(times[name].values())):
            print(
                f"| {name} | {statistics.median(times[name].values()):.3f} | {_ratio(times, name, to=_is_limit)} | "
                f"{_ratio(times, name, to=_is_peer)} | {memory[name] / 1e6:.0f} | {disk[name]:.2f} |"
            )


def times_of(records: Iterable[Record], cache: Cache) -> dict[str, Rounds]:
    """Return, by loader, its seconds in every round with the page cache in that state."""
    of_cache = [record for record in records if record["cache"] == cache]
    return {name: _times(group) for name, group in _by(of_cache, "loader").items()}


def _times(records: Iterable[Record]) -> Rounds:
    """Return seconds by round."""
    rounds = {}
    for round_, group in _by(records, "round").items():
        # Records of one call are told apart by their place among the same rank's records.
        per_rank = _by(group, "rank").values()
        # Not strict: a loader that died may have left the records of some ranks only.
        calls = zip(*([record["seconds"] for record in ranks] for ranks in per_rank), strict=False)
        rounds[round_] = min(max(call) for call in calls)
    return rounds


def _ratio(times: Mapping[str, Rounds], name: str, *, to: Callable[[str], bool]) -> str:
    """Return how many times longer `name` takes than the fastest of the others."""
    ratios = []
    for round_, seconds in times[name].items():
        others = [rounds[round_] for key, rounds in times.items() if to(key) and round_ in rounds]
        if others:
            ratios.append(seconds / min(others))
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}..{max(ratios):.2f}]" if ratios else "-"


def _is_limit(name: str) -> bool:
    return name == LIMIT


def _is_peer(name: str) -> bool:
    return name != LIMIT and not name.startswith(OURS)


def _peak_over_held(records: Iterable[Record]) -> int:
    return max(record["peak_bytes"] - record["held_bytes"] for record in records)


def _disk_over_held(records: Sequence[Record]) -> float:
    return sum(record["disk_bytes"] for record in records) / sum(record["held_bytes"] for record in records)


def _by(records: Iterable[Record], key: Literal["loader", "round", "rank"]) -> dict[Any, list[Record]]:
    groups = defaultdict(list)
    for record in records:
        groups[record[key]].append(record)
    return groups


if __name__ == "__main__":
    for path in sys.argv[1:]:
        first, *rest = (json.loads(line) for line in Path(path).read_text().splitlines())
        print(f"\n## {path}: {first}")
        print_tables(rest)
