"""PyTorch: move sharded models from and to Hugging Face checkpoints.

import shardferry.torch as sf
report = sf.load_model(model, "/ckpt")             # in place; FSDP2, HSDP, TP, EP, PP, plain
report = sf.load_state_dict(state_dict, "/ckpt")
estimate = sf.plan_load(model, "/ckpt")            # how a load would read, what that costs, and why; reads nothing
report = sf.warm(model, "/ckpt")                   # what this node's ranks will read, into its page cache
"""

from __future__ import annotations

from shardferry.execute.report import LoadReport, Progress, RankReport, SaveReport
from shardferry.execute.warm_report import WarmedFile, WarmReport
from shardferry.geometry.sharding import Sharding
from shardferry.plan.estimate import Estimate, Price
from shardferry.torch.load import LoadOptions, load_model, load_state_dict
from shardferry.torch.plan import plan_load
from shardferry.torch.plans import shardings_from_plan
from shardferry.torch.save import SaveOptions, save_model, save_state_dict
from shardferry.torch.warm import WarmOptions, warm

__all__ = [
    "Estimate",
    "LoadOptions",
    "LoadReport",
    "Price",
    "Progress",
    "RankReport",
    "SaveOptions",
    "SaveReport",
    "Sharding",
    "WarmOptions",
    "WarmReport",
    "WarmedFile",
    "load_model",
    "load_state_dict",
    "plan_load",
    "save_model",
    "save_state_dict",
    "shardings_from_plan",
    "warm",
]
