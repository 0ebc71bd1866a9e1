"""Turns the save benchmark's records into ratios; `python -m benchmarks.save_table FILE...` prints them again.

A call's time is its slowest rank's, and that of the sync behind it. The first call of a process is left out. Ratios
are taken inside a round, and the table shows their median and range over the rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT = "limit"
OURS = "shardferry"


class Record(TypedDict):
    """One call of one rank."""

    saver: str
    cut: str
    round: int
    call: Literal["first", "again"]
    rank: int
    seconds: float
    sync_seconds: float
    checkpoint_bytes: int
    written_bytes: int
    peak_bytes: int
    wrong: str | None


Rounds = dict[int, float]


def print_table(records: Sequence[Record]) -> None:
    """Print one Markdown table; a row is a saver and how its tensors were cut."""
    for wrong in [record for record in records if record["wrong"]]:
        print(f"WRONG BYTES: {wrong['saver']} {wrong['cut']}: {wrong['wrong']}")
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record["call"] == "again":
            groups[record["saver"], record["cut"]].append(record)
    times = {key: _times(group) for key, group in groups.items()}
    print("| saver | cut | seconds | x limit | x shardferry | peak memory, MB a rank | bytes written / bytes saved |")
    print("|---|---|---|---|---|---|---|")
    for (saver, cut), rounds in sorted(times.items(), key=lambda item: statistics.median(item[1].values())):
        group = groups[saver, cut]
        written = sum(record["written_bytes"] for record in group)
        saved = sum(record["checkpoint_bytes"] for record in group if record["rank"] == 0)
        print(
            f"| {saver} | {cut} | {statistics.median(rounds.values()):.2f} | {_ratio(rounds, times.get((LIMIT, cut)))} "
            f"| {_ratio(rounds, times.get((OURS, cut)))} | {max(record['peak_bytes'] for record in group) / 1e6:.0f} "
            f"| {written / saved:.2f} |"
        )
    if (OURS, "dim0") in times and (OURS, "dim1") in times:
        print(f"\n{OURS}, inner dim / first dim: {_ratio(times[OURS, 'dim1'], times[OURS, 'dim0'])}")


def _times(records: Sequence[Record]) -> Rounds:
    """Return seconds by round."""
    rounds: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        rounds[record["round"]].append(record)
    return {
        round_: max(record["seconds"] for record in group)
        + sum(record["sync_seconds"] for record in group if record["rank"] == 0)
        for round_, group in rounds.items()
    }


def _ratio(times: Rounds, to: Rounds | None) -> str:
    ratios = [seconds / to[round_] for round_, seconds in times.items() if round_ in to] if to else []
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}..{max(ratios):.2f}]" if ratios else "-"


if __name__ == "__main__":
    for path in sys.argv[1:]:
        first, *rest = (json.loads(line) for line in Path(path).read_text().splitlines())
        print(f"\n## {path}: {first}\n")
        print_table(rest)
