"""`import shardferry` costs nothing: tools that only look at a checkpoint must start at once."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, sys, time
start = time.perf_counter()
import shardferry
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "modules": sorted(sys.modules)}))
"""
FRAMEWORKS = {"torch", "jax", "transformers", "safetensors", "click", "rich"}
LIMIT_SECONDS = 0.15
# The fastest of a few: the machine may be busy with other tests.
ATTEMPTS = 5


def imported() -> tuple[float, set[str]]:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    told = json.loads(run.stdout)
    return told["seconds"], set(told["modules"])


def test_importing_the_package_is_quick() -> None:
    assert min(imported()[0] for _ in range(ATTEMPTS)) < LIMIT_SECONDS


def test_importing_the_package_imports_no_framework() -> None:
    assert imported()[1].isdisjoint(FRAMEWORKS)
