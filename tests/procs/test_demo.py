"""The demo under torch's own launcher, on the real model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.timeout(240)
def test_the_demo_reads_a_part_per_process_and_computes_the_same_embedding() -> None:
    program = "from shardferry.cli.demo import demo; demo()"
    run = subprocess.run([sys.executable, "-c", program, "--json"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    ours = [load for load in result["loads"] if load["loader"] == "shardferry"]
    assert [load["layout"] for load in ours] == ["FSDP2", "TP", "FSDP2 over TP"]
    for load in ours:
        assert max(load["bytes_read"]) < 0.27 * result["file_bytes"]
        assert load["max_difference"] <= result["tolerance"]
