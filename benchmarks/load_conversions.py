"""What does it cost to convert while loading: to merge experts, and to make quantized weights whole?

    python -m benchmarks.load_conversions experts --scale-gb 1 --rounds 3
    python -m benchmarks.load_conversions fp8 --scale-gb 1 --rounds 3

`experts`: four ranks of tensor parallelism fill a Qwen3-MoE whose experts are fused in memory: from a checkpoint with a
tensor per expert by transformers' own conversions (`per expert`), from one that holds what is in memory (`packed`), and
by `from_pretrained` of transformers from the first (`transformers`). `fp8`: they fill a Llama in bf16 from a checkpoint
with block-scaled FP8 (`block FP8`), and from one that holds bf16 (`bf16`): as many bytes in memory, half as many to
read. Every way runs in processes of its own, twice, of which the second call counts; rounds are interleaved. Building
the model on the meta device is on the clock for all. All read from the page cache. Prints ratios inside a round, and
writes the raw records to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.checkpoints import Kind, make_checkpoint
from benchmarks.machine import machine

if TYPE_CHECKING:
    import torch

RESULTS = Path(__file__).parent / "results"
NUM_RANKS = 4
# Which checkpoint a way loads, by what is compared; the first way of each is the one in question.
COMPARED: dict[str, dict[str, Kind]] = {
    "experts": {"per expert": "moe", "packed": "moe_packed", "transformers": "moe"},
    "fp8": {"block FP8": "dense_fp8", "bf16": "dense"},
}


def main() -> None:
    """Make the checkpoints, run the rounds, print the ratios; or be one process of a round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("compared", choices=COMPARED)
    parser.add_argument("--scale-gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", nargs=4, metavar=("WAY", "CHECKPOINT", "RECORDS", "ROUND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _work(*arguments.worker)
        return
    kinds = COMPARED[arguments.compared]
    ways = tuple(kinds)
    folder = Path(tempfile.mkdtemp(prefix="shardferry-benchmark-"))
    records = RESULTS / f"load_conversions-{arguments.compared}-{arguments.scale_gb:g}gb.jsonl"
    records.write_text(json.dumps(machine() | {"scale_gb": arguments.scale_gb}) + "\n")
    try:
        for kind in kinds.values():
            make_checkpoint(folder / kind, kind, arguments.scale_gb)
        for round_ in range(arguments.rounds):
            for turn in range(len(ways)):
                way = ways[(turn + round_) % len(ways)]
                _run(arguments.compared, (way, str(folder / kinds[way]), str(records), str(round_)))
    finally:
        shutil.rmtree(folder)
    _print(ways, [json.loads(line) for line in records.read_text().splitlines()[1:]])


def _run(compared: str, worker: tuple[str, str, str, str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    command += ["-m", "benchmarks.load_conversions", compared, "--worker", *worker]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    print(f"round {worker[3]} {worker[0]}: {'done' if run.returncode == 0 else 'FAILED'}", flush=True)
    if run.returncode:
        print(run.stderr[-2000:], file=sys.stderr)


def _work(way: str, folder: str, records: str, round_: str) -> None:
    """Load twice; one record per rank. Collective."""
    import torch
    import torch.distributed as dist
    from benchmarks.measure import Meter, bring_into_page_cache, wake_memory

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=3))
    checkpoint = Path(folder)
    files = sorted(checkpoint.glob("*.safetensors"))
    for call in ("first", "second"):
        if dist.get_rank() == 0:
            bring_into_page_cache(files)
        wake_memory(sum(file.stat().st_size for file in files) // NUM_RANKS)
        dist.barrier()
        with Meter() as meter:
            model = _load(way, checkpoint)
        record = {
            "way": way,
            "round": int(round_),
            "call": call,
            "rank": dist.get_rank(),
            "seconds": round(meter.seconds, 4),
            "peak_bytes": meter.peak_bytes,
        }
        with Path(records).open("a") as out:
            out.write(json.dumps(record) + "\n")
        del model
        gc.collect()
        dist.barrier()
    os._exit(0)  # everything is on disk; threads of some libraries do not end in time


def _load(way: str, checkpoint: Path) -> torch.nn.Module:
    import torch
    import transformers
    from benchmarks.load_peers import clone_views
    from transformers.distributed.configuration_utils import DistributedConfig

    import shardferry.torch.transformers as sft

    auto: Any = transformers.AutoModelForCausalLM
    if way != "transformers":
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
        return sft.from_pretrained(auto, checkpoint, mesh=mesh, dequantize=way == "block FP8")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    spread = DistributedConfig(tp_plan="auto", tp_size=NUM_RANKS)
    model: torch.nn.Module = auto.from_pretrained(checkpoint, dtype=torch.bfloat16, distributed_config=spread)
    held = {name: getattr(value, "_local_tensor", value).detach() for name, value in model.named_parameters()}
    clone_views(held)
    return model


def _print(ways: tuple[str, ...], records: list[dict[str, Any]]) -> None:
    slowest: dict[tuple[str, int], float] = {}
    for record in records:
        if record["call"] == "second":
            key = (record["way"], record["round"])
            slowest[key] = max(slowest.get(key, 0.0), record["seconds"])
    rounds = sorted({round_ for _, round_ in slowest})
    for way in ways:
        times = [slowest[way, round_] for round_ in rounds]
        ratio = statistics.median(slowest[ways[0], round_] / slowest[way, round_] for round_ in rounds)
        print(f"{way:13} {statistics.median(times):7.3f} s   {ways[0]} takes {ratio:5.2f}x as long")


if __name__ == "__main__":
    main()
