"""JAX: move trees of sharded arrays from and to Hugging Face checkpoints.

import shardferry.jax as sf
params = sf.load("/ckpt", target)                  # any pytree of jax.ShapeDtypeStruct(shape, dtype, sharding=...)
"""

from __future__ import annotations

from shardferry.execute.report import LoadReport, Progress, RankReport
from shardferry.jax.leaves import Stack
from shardferry.jax.load import LoadOptions, load

__all__ = ["LoadOptions", "LoadReport", "Progress", "RankReport", "Stack", "load"]
