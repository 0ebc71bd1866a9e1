"""Move models between Hugging Face safetensors checkpoints and the memory of many processes."""

from __future__ import annotations

__version__ = "0.1.0"
