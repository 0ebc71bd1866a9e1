"""What does it cost one of 1,024 ranks to open, agree on, and plan the load of a 685-billion-parameter model?

Also when every byte is to be read once by the job: then it includes what all ranks want, the prices of each way of
reading, and this rank's part of the exchange.

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
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.deepseek import make_sparse_checkpoint
from benchmarks.deepseek_job import EXPERT_RANKS, NUM_RANKS, targets_of
from benchmarks.machine import machine
from benchmarks.measure import own_peak_bytes, timed

from shardferry import CheckpointIndex, open_checkpoint
from shardferry.convert.ops import Stored
from shardferry.plan.agreement import choose_layouts, disputed, make_table, names_in, table_from_bytes, table_to_bytes
from shardferry.plan.costmodel import PRESETS
from shardferry.plan.demand import (
    make_demand,
    number_units,
    rows_from_bytes,
    sets_to_bytes,
    wants_of,
    wants_to_bytes,
)
from shardferry.plan.demand_shape import shape_demand
from shardferry.plan.estimate import EXCHANGE_BYTES, price_ways, thin_bytes
from shardferry.plan.load import Wanted, plan_load
from shardferry.plan.match import Matching, Rules, match_targets
from shardferry.plan.readonce import Policy, plan_read_once
from shardferry.plan.target import region_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardferry.plan.demand import Wants
    from shardferry.plan.load import LoadPlan

RESULTS = Path(__file__).parent / "results" / "plan_1t.jsonl"
RANK = 517  # in the middle of the pipeline
RANKS_PER_NODE = 8
COST = PRESETS["network_mount"]


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
        index = open_checkpoint(folder / "checkpoint")
        (folder / "tables").write_bytes(pickle.dumps(tables_of_all_ranks(index)))
        (folder / "wants").write_bytes(pickle.dumps(wants_of_all_ranks(index)))
        command = [sys.executable, "-m", "benchmarks.plan_1t", "--measure", str(folder)]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result = json.loads(run.stdout)
    for step, value in result.items():
        print(f"{step:24s} {value}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(machine() | result) + "\n")


def measure(folder: Path) -> dict[str, float | int | str]:
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
        plan = plan_load(index, _wanted(matching, RANK))
    shared = _plan_exchange(index, plan, seconds, folder)
    # A user's model, not shardferry, makes the targets; here they are made by matching names.
    total = sum(value for step, value in seconds.items() if step != "build targets")
    return {
        **{step: round(value, 3) for step, value in seconds.items()},
        "total without targets": round(total, 3),
        "peak_memory_bytes": own_peak_bytes() - start_bytes,
        "tensors": len(index.tensors),
        "tensors_of_rank": len(plan.tensors),
        "bytes_wanted": plan.bytes_wanted,
        **shared,
    }


def _plan_exchange(
    index: CheckpointIndex, plan: LoadPlan, seconds: dict[str, float], folder: Path
) -> dict[str, int | str]:
    """Do what rank `RANK` does more when every byte is read once by the job."""
    told_wants, told_sets = pickle.loads((folder / "wants").read_bytes())  # noqa: S301 - written by this script
    with timed(seconds, "tell wants"):
        units = number_units(index)
        wants = wants_of(plan, units)
        wants_to_bytes(wants)
    with timed(seconds, "hear wants"):
        rows = [rows_from_bytes(data) for data in told_wants]
        sets_to_bytes(wants, rows, RANK)
        demand = make_demand(rows, told_sets)
    with timed(seconds, "price"):
        nodes = tuple(rank // RANKS_PER_NODE for rank in range(NUM_RANKS))
        shape = shape_demand(demand, units, index, world_size=NUM_RANKS, seek_bytes=COST.seek_bytes)
        estimate = price_ways(shape, nodes, COST, read_once="always", exchange_bytes=EXCHANGE_BYTES)
    with timed(seconds, "plan exchange"):
        policy = Policy((0,) * NUM_RANKS, thin_bytes(COST), EXCHANGE_BYTES)
        once = plan_read_once(plan, units, demand, wants, policy, rank=RANK)
        for stream in once.streams:
            stream.digest()
    with timed(seconds, "cut rounds"):
        for stream in once.streams:
            turns = product(range(len(stream.ranks)), range(stream.num_rounds))
            assert all(piece.parts for member, number in turns for piece in stream.pieces(member, number))
    return {
        "told_bytes": sum(map(len, told_wants)) + sum(map(len, told_sets)),
        "streams": len(once.streams),
        "rounds": sum(stream.num_rounds for stream in once.streams),
        "direct_bytes": once.direct.bytes_wanted,
        "strategy": estimate.why,
    }


def tables_of_all_ranks(index: CheckpointIndex) -> list[bytes]:
    """Return what every rank would tell; the ranks of an expert group tell the same."""
    tables: list[bytes] = []
    for rank in range(0, NUM_RANKS, EXPERT_RANKS):
        matching = match_targets(index, tuple(targets_of(index, rank)), _rules())
        tables += [table_to_bytes(make_table(index, matching, rank, NUM_RANKS))] * EXPERT_RANKS
    return tables


def wants_of_all_ranks(index: CheckpointIndex) -> tuple[list[bytes], list[bytes]]:
    """Return what every rank tells of what it wants, first and next."""
    units = number_units(index)
    wants: list[Wants] = []
    for first in range(0, NUM_RANKS, EXPERT_RANKS):
        matching = match_targets(index, tuple(targets_of(index, first)), _rules())
        plans = (plan_load(index, _wanted(matching, rank)) for rank in range(first, first + EXPERT_RANKS))
        wants += [wants_of(plan, units) for plan in plans]
    told = list(map(wants_to_bytes, wants))
    rows = list(map(rows_from_bytes, told))
    return told, [sets_to_bytes(mine, rows, rank) for rank, mine in enumerate(wants)]


def _rules() -> Rules:
    return Rules(sources={}, cast=True, ignorable=lambda _name: False)


def _wanted(matching: Matching, rank: int) -> Iterator[Wanted]:
    for target, source, _ in matching.matches:
        assert isinstance(source, Stored)
        region = region_of(target.layouts[0], source.shape, rank)
        assert region is not None
        yield Wanted(target.name, source, region)


if __name__ == "__main__":
    main()
