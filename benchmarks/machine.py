"""Says on what a benchmark ran, for the first line of its raw results.

Answers no question itself.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

PACKAGES = ("numpy", "torch", "transformers", "safetensors")


def machine() -> dict[str, str | int | dict[str, str]]:
    """Return processor, cores, memory, kernel, and versions of what takes part."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "processor": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
    }
