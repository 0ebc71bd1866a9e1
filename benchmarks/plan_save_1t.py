"""What does it cost one of 1,024 ranks to plan the save of a 685-billion-parameter model?

    python -m benchmarks.plan_save_1t

The model has DeepSeek-V3's 91,991 tensors, cut as in `deepseek_job.py`. What the other 1,023 ranks tell is made
beforehand, off the clock. What is measured runs in a process of its own, on one core: seconds by step, and the peak of
its memory above what Python, the imports and its own targets take. Writes one line to
`benchmarks/results/plan_save_1t.jsonl`.
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

from benchmarks.deepseek import tensors
from benchmarks.deepseek_job import EXPERT_RANKS, NUM_RANKS, layout_of
from benchmarks.machine import machine
from benchmarks.measure import own_peak_bytes, timed

from shardferry.format.writer import TensorSpec
from shardferry.geometry.sharding import region_at
from shardferry.plan.catalogue import inventory_to_bytes, make_catalogue, names_to_bytes, replica_names, spokesmen
from shardferry.plan.costmodel import PRESETS
from shardferry.plan.exchange import choose_exchange, plan_rounds, turn_of
from shardferry.plan.packing import lay_out_checkpoint, parse_size
from shardferry.plan.save import plan_save
from shardferry.plan.target import Target
from shardferry.units import MIB

RESULTS = Path(__file__).parent / "results" / "plan_save_1t.jsonl"
RANK = 517  # in the middle of the pipeline


def main() -> None:
    """Make what the ranks tell, measure in a new process, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    with tempfile.TemporaryDirectory(prefix="shardferry-benchmark-") as name:
        folder = Path(name)
        (folder / "told").write_bytes(pickle.dumps(told_by_all_ranks()))
        command = [sys.executable, "-m", "benchmarks.plan_save_1t", "--measure", str(folder)]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result = json.loads(run.stdout)
    for step, value in result.items():
        print(f"{step:24s} {value}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(machine() | result) + "\n")


def measure(folder: Path) -> dict[str, float | int]:
    """Do what rank `RANK` does."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    inventories, names = pickle.loads((folder / "told").read_bytes())  # noqa: S301 - written by this script
    seconds: dict[str, float] = {}
    targets = targets_of(RANK)
    start_bytes = own_peak_bytes()
    with timed(seconds, "tell"):
        inventory_to_bytes(targets, RANK)
        names_to_bytes(targets)
    with timed(seconds, "know all"):
        catalogue = make_catalogue(inventories, names)
    dtypes = {name: held.dtype for name, held in catalogue.items()}
    with timed(seconds, "lay out files"):
        specs = {name: TensorSpec(dtypes[name], held.shape) for name, held in catalogue.items()}
        layout = lay_out_checkpoint(
            specs, max_shard_bytes=parse_size("5GB"), metadata={"format": "pt"}, files_like=None, hub_limits=False
        )
    with timed(seconds, "plan exchange"):
        replica_names(catalogue, RANK, check_declared=False)
        nodes = [rank // 8 for rank in range(len(inventories))]
        exchanged, _ = choose_exchange(catalogue, dtypes, PRESETS["network_mount"], nodes, box_bytes=8 * MIB)
        rounds = plan_rounds(catalogue, layout.files, dtypes, exchanged=exchanged, box_bytes=8 * MIB)
        mine = [turn_of(boxes, catalogue, dtypes, RANK) for boxes in rounds]
    with timed(seconds, "plan writes"):
        writes = plan_save(catalogue, layout.files, dtypes, rank=RANK, exchanged=exchanged)
    return {
        **{step: round(value, 3) for step, value in seconds.items()},
        "total": round(sum(seconds.values()), 3),
        "peak_memory_bytes": own_peak_bytes() - start_bytes,
        "tensors": len(catalogue),
        "files": len(layout.files),
        "tensors_of_rank": len(targets),
        "writes_of_rank": len(writes),
        "tensors_exchanged": len(exchanged),
        "rounds": len(rounds),
        "parts_of_rank": sum(len(one.outgoing) + len(one.incoming) for one in mine),
    }


def targets_of(rank: int) -> list[Target]:
    """Return what the model of one rank holds."""
    targets = []
    for name, spec in tensors():
        layout = layout_of(name)
        if rank in layout.ranks:
            region = region_at(spec.shape, layout, layout.ranks.index(rank))
            targets.append(Target((name,), spec.dtype, spec.shape, region.shape, (layout,)))
    return targets


def told_by_all_ranks() -> tuple[list[bytes], list[bytes]]:
    """Return what every rank tells; the ranks of an expert group tell the same names."""
    inventories: list[bytes] = []
    names = [b""] * NUM_RANKS
    for first in range(0, NUM_RANKS, EXPERT_RANKS):
        inventories += [inventory_to_bytes(targets_of(first), first)] * EXPERT_RANKS
    for ranks in spokesmen(inventories).values():
        names[ranks[0]] = names_to_bytes(targets_of(ranks[0]))
    return inventories, names


if __name__ == "__main__":
    main()
