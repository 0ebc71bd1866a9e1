"""What options and arguments may be that only PyTorch's calls have."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import torch
from torch import nn

from shardferry.execute.options import KINDS, Kind, instance, sequence

MODEL = instance("a torch.nn.Module", nn.Module)
_MAPPING = instance("a mapping of names to tensors", Mapping)

TORCH_KINDS: Mapping[str, Kind] = {
    **KINDS,
    "conversions": Kind(
        f"{KINDS['conversions'].words}, or 'auto'",
        # What stands for rules is a protocol of functions; see `shardferry.convert.table.Conversions`.
        lambda value: KINDS["conversions"].fits(value) or value == "auto" or hasattr(value, "to_checkpoint"),
    ),
    "dtype": instance("a torch.dtype", torch.dtype).or_none(),
    "extras": sequence("a sequence of what has save_pretrained(folder)", object),
    "model": MODEL,
    "shardings": instance("a mapping of names to (mesh, placements) or a Sharding", Mapping),
}
# A state dict to fill takes new tensors; the model it comes from may be given.
FILLED_KINDS = {
    **TORCH_KINDS,
    "state_dict": instance("a dict of tensors by name", MutableMapping),
    "model": MODEL.or_none(),
}
SAVED_KINDS = {**FILLED_KINDS, "state_dict": _MAPPING}
WARMED_KINDS = {
    **TORCH_KINDS,
    "model": instance("a torch.nn.Module or a mapping of names to tensors", nn.Module, Mapping),
}
