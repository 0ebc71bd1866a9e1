"""What does it cost to convert while loading: to merge experts, and to make quantized weights whole?

    python -m benchmarks.load_conversions experts --scale-gb 1 --rounds 3
    python -m benchmarks.load_conversions fp8 --scale-gb 1 --rounds 3

`experts`: four ranks of tensor parallelism fill a Qwen3-MoE whose experts are fused in memory: from a checkpoint with a
tensor per expert by transformers' own conversions (`per expert`), from one that holds what is in memory (`packed`), and
by `from_pretrained` of transformers from the first (`transformers`). `fp8`: they fill a Llama in bf16 from a checkpoint
with block-scaled FP8 (`block FP8`), and from one that holds bf16 (`bf16`): as many bytes in memory, half as many to
read. FP8 codes are those of normally distributed weights. Every way has processes of its own, which are called in
turns, and given memory that exists; in a round twice, of which the faster call counts. Building the model on the meta
device is on the clock for all. All read from a page cache that ordinary reads have filled. Prints ratios inside a
round, and writes the raw records to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.checkpoints import Kind, make_checkpoint
from benchmarks.machine import machine
from benchmarks.turns import NUM_RANKS, take_turns

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

RESULTS = Path(__file__).parent / "results"
WORKER = ("WAY", "CHECKPOINT", "RECORDS", "ORDERS", "ANSWERS")
# How each way is called in a round.
SCHEDULE = ("warm", "warm")
# Bytes of memory freed for a call, per byte of the larger checkpoint: the model, and what a way takes beside it.
ROOM = 3
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
    parser.add_argument("--worker", nargs=len(WORKER), metavar=WORKER, help=argparse.SUPPRESS)
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
        _run(arguments.compared, {way: folder / kinds[way] for way in ways}, records, arguments.rounds)
    finally:
        shutil.rmtree(folder)
    _print(ways, [json.loads(line) for line in records.read_text().splitlines()[1:]])


def _run(compared: str, checkpoints: Mapping[str, Path], records: Path, rounds: int) -> None:
    room = ROOM * max(sum(file.stat().st_size for file in folder.iterdir()) for folder in checkpoints.values())
    starts = [(compared, "--worker", way, str(folder), str(records)) for way, folder in checkpoints.items()]
    take_turns("benchmarks.load_conversions", starts, SCHEDULE, rounds=rounds, free_bytes=room)


def _work(way: str, folder: str, records: str, orders: str, answers: str) -> None:
    """Answer calls until there are no more; one record per call and rank. Collective."""
    import torch
    import torch.distributed as dist
    from benchmarks.measure import Meter, bring_into_page_cache, drop_from_page_cache, give_back_memory
    from benchmarks.turns import Calls

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    checkpoint = Path(folder)
    files = sorted(checkpoint.glob("*.safetensors"))
    calls = Calls(Path(orders), Path(answers))
    for _, round_ in calls:
        if dist.get_rank() == 0:
            drop_from_page_cache(files)
            bring_into_page_cache(files)
        meter = Meter()
        calls.go()
        with meter:
            model = _load(way, checkpoint)
        record = {
            "way": way,
            "round": int(round_),
            "rank": dist.get_rank(),
            "seconds": round(meter.seconds, 4),
            "peak_bytes": meter.peak_bytes,
        }
        with Path(records).open("a") as out:
            out.write(json.dumps(record) + "\n")
        del model
        give_back_memory()
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
    """Print the median time of every way, and the median ratio inside a round."""
    calls: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for record in records:
        calls[record["way"], record["round"], record["rank"]].append(record["seconds"])
    rounds = sorted({round_ for _, round_, _ in calls if round_ >= 0})
    times = {
        (way, round_): min(map(max, zip(*(calls[way, round_, rank] for rank in range(NUM_RANKS)), strict=True)))
        for way in ways
        for round_ in rounds
    }
    for way in ways:
        ratios = sorted(times[ways[0], round_] / times[way, round_] for round_ in rounds)
        print(
            f"{way:13} {statistics.median(times[way, round_] for round_ in rounds):7.3f} s   {ways[0]} takes "
            f"{statistics.median(ratios):5.2f}x as long [{ratios[0]:.2f}..{ratios[-1]:.2f}]"
        )


if __name__ == "__main__":
    main()
