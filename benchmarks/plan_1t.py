"""What does it cost one of 1,024 ranks to open, agree on, and plan the load of a 685-billion-parameter model?

    python -m benchmarks.plan_1t

The checkpoint has DeepSeek-V3's 91,991 tensors in 163 files of true length, without data: nothing of a tensor is
read. The tables of the other 1,023 ranks are made beforehand, off the clock; ranks of one group tell the same. What
is measured runs in a process of its own, on one core: seconds by step, and the peak of its memory above what
Python and the imports take. Writes one line to `benchmarks/results/plan_1t.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.deepseek import make_sparse_checkpoint
from benchmarks.deepseek_job import EXPERT_RANKS, NUM_RANKS, targets_of
from benchmarks.machine import machine
from benchmarks.measure import own_peak_bytes, timed

from shardferry import CheckpointIndex, open_checkpoint
from shardferry.convert.ops import Stored
from shardferry.plan.agreement import choose_layouts, disputed, make_table, names_in, table_from_bytes, table_to_bytes
from shardferry.plan.load import Wanted, plan_load
from shardferry.plan.match import Matching, Rules, match_targets
from shardferry.plan.target import region_of

if TYPE_CHECKING:
    from collections.abc import Iterator

RESULTS = Path(__file__).parent / "results" / "plan_1t.jsonl"
RANK = 517  # in the middle of the pipeline


def main() -> None:
    """Make the checkpoint and the tables, measure in a new process, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    with tempfile.TemporaryDirectory(prefix="shardferry-benchmark-") as name:
        folder = Path(name)
        make_sparse_checkpoint(folder / "checkpoint")
        (folder / "tables").write_bytes(pickle.dumps(tables_of_all_ranks(open_checkpoint(folder / "checkpoint"))))
        command = [sys.executable, "-m", "benchmarks.plan_1t", "--measure", str(folder)]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result = json.loads(run.stdout)
    for step, value in result.items():
        print(f"{step:24s} {value}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(machine() | result) + "\n")


def measure(folder: Path) -> dict[str, float | int]:
    """Do what rank `RANK` does, and what rank 0 does before it."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    told = pickle.loads((folder / "tables").read_bytes())  # noqa: S301 - written by this script
    seconds: dict[str, float] = {}
    start_bytes = own_peak_bytes()
    with timed(seconds, "open"):
        opened = open_checkpoint(folder / "checkpoint")
    with timed(seconds, "share index"):
        index = CheckpointIndex.from_bytes(opened.to_bytes())
    with timed(seconds, "build targets"):
        targets = tuple(targets_of(index, RANK))
    with timed(seconds, "match"):
        matching = match_targets(index, targets, _rules())
        table_to_bytes(make_table(index, matching, RANK, NUM_RANKS))
    with timed(seconds, "agree"):
        tables = tuple(map(table_from_bytes, told))
        assert not disputed(tables)
        choose_layouts(tables)
        unexpected = len(index.tensors) - len(names_in(index, (table.used for table in tables)))
        assert unexpected == 0
    with timed(seconds, "plan"):
        plan = plan_load(index, _wanted(matching))
    # A user's model, not shardferry, makes the targets; here they are made by matching names.
    total = sum(value for step, value in seconds.items() if step != "build targets")
    return {
        **{step: round(value, 3) for step, value in seconds.items()},
        "total without targets": round(total, 3),
        "peak_memory_bytes": own_peak_bytes() - start_bytes,
        "tensors": len(index.tensors),
        "tensors_of_rank": len(plan.tensors),
        "bytes_wanted": plan.bytes_wanted,
    }


def tables_of_all_ranks(index: CheckpointIndex) -> list[bytes]:
    """Return what every rank would tell; the ranks of an expert group tell the same."""
    tables: list[bytes] = []
    for rank in range(0, NUM_RANKS, EXPERT_RANKS):
        matching = match_targets(index, tuple(targets_of(index, rank)), _rules())
        tables += [table_to_bytes(make_table(index, matching, rank, NUM_RANKS))] * EXPERT_RANKS
    return tables


def _rules() -> Rules:
    return Rules(sources={}, cast=True, ignorable=lambda _name: False)


def _wanted(matching: Matching) -> Iterator[Wanted]:
    for target, source, _ in matching.matches:
        assert isinstance(source, Stored)
        region = region_of(target.layouts[0], source.shape, RANK)
        assert region is not None
        yield Wanted(target.name, source, region)


if __name__ == "__main__":
    main()
