"""How long do 4 processes take to save their parts as one standard checkpoint, until it is on the disk?

    python -m benchmarks.save_torch --scale-gb 1 --rounds 4                  # tensor parallel, beside the peers
    python -m benchmarks.save_torch --kind wide --scale-gb 1 --rounds 4      # rows of 2 to 4 KiB against whole rows

Compares `save_state_dict` with a gather and safetensors' `save_file`, torch's distributed checkpoint, transformers'
`save_pretrained`, and the limit: the same bytes written without any library. Each saver runs in processes of its own,
once a round; rounds are interleaved and their order rotates. Transformers holds the whole model on every rank
meanwhile: leave it out where that does not fit. Prints ratios, and writes the raw records to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

from benchmarks.checkpoints import make_checkpoint
from benchmarks.machine import machine
from benchmarks.save_peers import SAVERS
from benchmarks.save_table import print_table

RESULTS = Path(__file__).parent / "results"
NUM_RANKS = 4


def main() -> None:
    """Make the checkpoint, run the rounds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("dense", "wide"), default="dense")
    parser.add_argument("--scale-gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--savers", nargs="+", choices=SAVERS)
    parser.add_argument("--folder", type=Path, help="keep the source here (default: a temporary folder)")
    parser.add_argument("--more", action="store_true", help="add rounds to the records that are there")
    arguments = parser.parse_args()
    savers = arguments.savers or (["limit", "shardferry"] if arguments.kind == "wide" else list(SAVERS))
    cases = list(product(savers, ("dim0", "dim1") if arguments.kind == "wide" else ("tp",)))
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="shardferry-benchmark-"))
    records = RESULTS / f"save_torch-{arguments.kind}-{arguments.scale_gb:g}gb.jsonl"
    RESULTS.mkdir(exist_ok=True)
    if not arguments.more:
        records.write_text(json.dumps(machine() | {"kind": arguments.kind, "scale_gb": arguments.scale_gb}) + "\n")
    done = 1 + max((json.loads(line)["round"] for line in records.read_text().splitlines()[1:]), default=-1)
    try:
        source = folder / f"{arguments.kind}-{arguments.scale_gb:g}gb"
        make_checkpoint(source, arguments.kind, arguments.scale_gb)
        for round_ in range(done, done + arguments.rounds):
            for turn in range(len(cases)):
                saver, cut = cases[(turn + round_ * (len(cases) // 2 + 1)) % len(cases)]
                _run(saver, cut, source, records=records, round_=round_)
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder)
    print_table([json.loads(line) for line in records.read_text().splitlines()[1:]])


def _run(saver: str, cut: str, source: Path, *, records: Path, round_: int) -> None:
    target = source.parent / "saved"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    command += ["-m", "benchmarks.save_worker", saver, cut, str(source), str(target), str(records), str(round_)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    print(f"round {round_} {saver} {cut}: {'done' if run.returncode == 0 else 'FAILED'}", flush=True)
    if run.returncode != 0:
        print(run.stderr[-2000:], file=sys.stderr)
        shutil.rmtree(target, ignore_errors=True)


if __name__ == "__main__":
    main()
