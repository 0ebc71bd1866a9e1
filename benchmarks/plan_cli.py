"""How long does `shardferry plan` take for 92,000 tensors on 1,024 and 4,096 ranks, and how much memory?

    python -m benchmarks.plan_cli

The checkpoint has DeepSeek-V3's tensors in 163 files of true length, without data. Each mesh is planned by the verb
in a process of its own, imports and headers included. Writes one line per run to `benchmarks/results/plan_cli.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.deepseek import make_sparse_checkpoint
from benchmarks.machine import machine

RESULTS = Path(__file__).parent / "results" / "plan_cli.jsonl"
MESHES = ("fsdp=128,tp=8", "fsdp=512,tp=8", "dp=64,fsdp=8,tp=8")
RULES = (
    r".*(q_b_proj|kv_b_proj|gate_proj|up_proj|embed_tokens|head)\.weight=0@tp",
    r".*(o_proj|down_proj)\.weight=1@tp",
    ".*=0@fsdp",
)


def main() -> None:
    """Plan every mesh for every preset, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shardferry-benchmark-") as name:
        make_sparse_checkpoint(Path(name))
        results = [plan(name, mesh, cost) for mesh in MESHES for cost in ("local", "object_store")]
    RESULTS.write_text("".join(json.dumps(machine() | result) + "\n" for result in results))


def plan(checkpoint: str, mesh: str, cost: str) -> dict[str, object]:
    """Run the verb once; return what it took and what it said."""
    command = [sys.executable, "-m", "shardferry.cli", "plan", checkpoint, "--mesh", mesh, "--ranks-per-node", "8"]
    command += ["--cost", cost, *(word for rule in RULES for word in ("--shard", rule)), "--json"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    assert process.returncode == 0
    said = json.loads(printed)
    result: dict[str, object] = {
        "mesh": mesh,
        "cost": cost,
        "ranks": said["world_size"],
        "seconds": round(seconds, 2),
        "peak_memory_bytes": 1024 * usage.ru_maxrss,
        "chosen": said["chosen"],
        "why": said["why"],
    }
    print(*(f"{key}: {value}" for key, value in result.items()), sep="  ")
    return result


if __name__ == "__main__":
    main()
