"""Move models between Hugging Face safetensors checkpoints and the memory of many processes.

What opens a checkpoint is imported on first use, so that `import shardferry` costs almost nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from shardferry.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointWarning,
    InvalidInputError,
    MismatchError,
    RankFailedError,
    ShardferryError,
    ShardingError,
    StorageError,
)

if TYPE_CHECKING:
    from shardferry.execute.open import open_checkpoint
    from shardferry.format.index import CheckpointIndex, FileInfo, Part, TensorInfo

__version__ = "0.1.0"

__all__ = [
    "CheckpointChangedError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointIndex",
    "CheckpointNotFoundError",
    "CheckpointWarning",
    "FileInfo",
    "InvalidInputError",
    "MismatchError",
    "Part",
    "RankFailedError",
    "ShardferryError",
    "ShardingError",
    "StorageError",
    "TensorInfo",
    "open_checkpoint",
]

_MODULE_OF = {
    "CheckpointIndex": "shardferry.format.index",
    "FileInfo": "shardferry.format.index",
    "Part": "shardferry.format.index",
    "TensorInfo": "shardferry.format.index",
    "open_checkpoint": "shardferry.execute.open",
}

if not TYPE_CHECKING:  # a type checker would take any name for one that this function gives

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value
