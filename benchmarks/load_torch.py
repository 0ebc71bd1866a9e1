"""How long do 4 processes take to load their tensor-parallel parts, beside what else a user has?

    python -m benchmarks.load_torch --kind dense --scale-gb 1 --rounds 4

Compares `load_state_dict` and `load_model` with safetensors' slices, torch's distributed checkpoint, transformers'
`tp_plan`, and the limit: `preadv` into huge pages without any library, which a copy out of a mapping may beat. Each
loader has processes of its own, because memory that one has advised to be huge pages stays so for the next. They are
called in turns, a round of all in an order that rotates, and given memory that exists. The model or state dict to fill
is there before the clock starts; a result that still is a view of a file is copied on the clock, and bytes are checked
after it. A warm page cache is one that ordinary reads have filled. The cold rows need root only where the page cache
cannot be dropped file by file. Prints ratios, and writes the raw records to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.checkpoints import make_checkpoint
from benchmarks.load_peers import LOADERS
from benchmarks.load_table import print_tables
from benchmarks.machine import machine
from benchmarks.turns import take_turns

if TYPE_CHECKING:
    from benchmarks.load_table import Cache

RESULTS = Path(__file__).parent / "results"
# How each loader is called in a round.
SCHEDULE: tuple[Cache, ...] = ("warm", "cold", "warm")
# Bytes of memory freed for a call, per byte of the checkpoint: its tensors, as much again for what comes into the page
# cache, and for what a loader takes beside.
ROOM = 3


def main() -> None:
    """Make the checkpoint, run the rounds, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("dense", "moe", "moe_packed"), default="dense")
    parser.add_argument("--scale-gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--loaders", nargs="+", choices=LOADERS, default=list(LOADERS))
    parser.add_argument("--folder", type=Path, help="keep the checkpoint here (default: a temporary folder)")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="shardferry-benchmark-"))
    records = RESULTS / f"load_torch-{arguments.kind}-{arguments.scale_gb:g}gb.jsonl"
    RESULTS.mkdir(exist_ok=True)
    records.write_text(json.dumps(machine() | {"kind": arguments.kind, "scale_gb": arguments.scale_gb}) + "\n")
    try:
        checkpoint = folder / f"{arguments.kind}-{arguments.scale_gb:g}gb"
        make_checkpoint(checkpoint, arguments.kind, arguments.scale_gb)
        _run(checkpoint, records, arguments.rounds, _that_can_load(arguments.kind, arguments.loaders))
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder)
    print_tables([json.loads(line) for line in records.read_text().splitlines()[1:]])


def _that_can_load(kind: str, loaders: list[str]) -> list[str]:
    """Transformers has no model whose checkpoint holds packed experts in this form."""
    return [loader for loader in loaders if not (kind == "moe_packed" and loader == "transformers")]


def _run(checkpoint: Path, records: Path, rounds: int, loaders: list[str]) -> None:
    room = ROOM * sum(file.stat().st_size for file in checkpoint.iterdir())
    starts = [(loader, str(checkpoint), str(records)) for loader in loaders]
    take_turns("benchmarks.load_worker", starts, SCHEDULE, rounds=rounds, free_bytes=room)


if __name__ == "__main__":
    main()
