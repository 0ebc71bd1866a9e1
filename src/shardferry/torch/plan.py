"""What a load would do, before it does it: the PyTorch side of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import torch

from shardferry.execute.job import estimate_load
from shardferry.execute.options import timeout_of
from shardferry.torch.group import open_group
from shardferry.torch.load import LoadOptions, prepare_model

if TYPE_CHECKING:
    import os

    from torch import nn

    from shardferry.plan.estimate import Estimate


def plan_load(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, **options: Unpack[LoadOptions]
) -> Estimate:
    """Return how `load_model` would read a checkpoint, what each way would cost, and why; no tensor is read or made.

    Collective, as `load_model`, with the same options and the same checks of names, shapes, dtypes and layouts.

    Args:
        model: Plain or sharded; may be on the meta device.
        path: A safetensors file, an index file, or a directory that holds a checkpoint.
        strict: Whether a name that is missing or unexpected is an error.
        **options: See `LoadOptions`.

    Returns:
        The same on every rank. Printed, it is the decision in words; `to_json` has everything.

    Raises:
        ShardferryError: As `load_model`, before it reads.
    """
    with open_group(timeout_of(options)) as group, torch.no_grad():
        filler, request = prepare_model(model, path, strict=strict, options=options)
        assert request.sharing is not None
        return estimate_load(group, filler, request, request.sharing)
