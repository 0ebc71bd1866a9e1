"""How long do 4 processes take to load their tensor-parallel parts, beside what else a user has?

    python -m benchmarks.load_torch --kind dense --scale-gb 1 --rounds 4

Compares `load_state_dict` and `load_model` with safetensors' slices, torch's distributed checkpoint, transformers'
`tp_plan`, and the limit: `preadv` into huge pages without any library, which a copy out of a mapping may beat. Each
loader has processes of its own, because memory that one has advised to be huge pages stays so for the next. They are
called in turns, a round of all in an order that rotates. The model or state dict to fill is there before the clock
starts; a result that still is a view of a file is copied on the clock, and bytes are checked after it. A warm page
cache is one that ordinary reads have filled. The cold rows need root only where the page cache cannot be dropped file
by file. Prints ratios, and writes the raw records to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

from benchmarks.checkpoints import make_checkpoint
from benchmarks.load_peers import LOADERS
from benchmarks.load_table import print_tables
from benchmarks.machine import machine

if TYPE_CHECKING:
    from benchmarks.load_table import Cache

RESULTS = Path(__file__).parent / "results"
NUM_RANKS = 4
# How each loader is called in a round.
SCHEDULE: tuple[Cache, ...] = ("warm", "cold", "warm")
MAX_CALL_S = 300


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
    with ExitStack() as stack:
        processes = [stack.enter_context(_Processes(loader, checkpoint, records)) for loader in loaders]
        for each in processes:
            each.call("first", -1)  # pays for imports and a cold allocator: recorded, and left out of the ratios
        for round_ in range(rounds):
            turn = round_ * (len(loaders) // 2 + 1) % len(loaders)
            for each in (*processes[turn:], *processes[:turn]):
                for cache in SCHEDULE:
                    each.call(cache, round_)
            print(f"round {round_} done", flush=True)


class _Processes:
    """The processes of one loader; they wait until they are called."""

    def __init__(self, loader: str, checkpoint: Path, records: Path) -> None:
        self._folder = tempfile.TemporaryDirectory()
        orders, answers = (Path(self._folder.name) / name for name in ("orders", "answers"))
        for pipe in (orders, answers):
            os.mkfifo(pipe)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
        command += ["-m", "benchmarks.load_worker", loader, str(checkpoint), str(records), str(orders), str(answers)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._loader = loader
        self._launcher = subprocess.Popen(command, env=environment)
        # Opened for both, so that nobody waits for the other end here.
        self._orders, self._answers = (os.open(pipe, os.O_RDWR) for pipe in (orders, answers))

    def __enter__(self) -> Self:
        return self

    def call(self, cache: Cache, round_: int) -> None:
        """Have it called once."""
        os.write(self._orders, f"{cache} {round_}\n".encode())
        if not select.select([self._answers], [], [], MAX_CALL_S)[0]:
            raise TimeoutError(f"{self._loader} did not end within {MAX_CALL_S} s, or has failed: see above")
        os.read(self._answers, 100)

    def __exit__(self, *_: object) -> None:
        os.write(self._orders, b"\n")  # nothing to do any more
        try:
            self._launcher.wait(30)
        except subprocess.TimeoutExpired:
            self._launcher.terminate()
        for pipe in (self._orders, self._answers):
            os.close(pipe)
        self._folder.cleanup()


if __name__ == "__main__":
    main()
