"""JAX: move trees of sharded arrays from and to Hugging Face checkpoints.

import shardferry.jax as sf
params = sf.load("/ckpt", target)                  # any pytree of jax.ShapeDtypeStruct(shape, dtype, sharding=...)
report = sf.save("/out", params)
"""

from __future__ import annotations

from shardferry.execute.report import LoadReport, Progress, RankReport, SaveReport
from shardferry.jax.leaves import Names, Stacked
from shardferry.jax.load import LoadOptions, load
from shardferry.jax.plan import WarmOptions, plan_load, warm
from shardferry.jax.save import SaveOptions, save

__all__ = [
    "LoadOptions",
    "LoadReport",
    "Names",
    "Progress",
    "RankReport",
    "SaveOptions",
    "SaveReport",
    "Stacked",
    "WarmOptions",
    "load",
    "plan_load",
    "save",
    "warm",
]
