"""Warm the page cache for a sharded model, or a state dict, before it is loaded: the PyTorch side of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypedDict, Unpack

from torch import nn

from shardferry.execute.options import check_call, timeout_of
from shardferry.execute.warm import WarmRequest
from shardferry.execute.warm_job import JobRequest, run_warm
from shardferry.plan.match import Rules
from shardferry.torch.conversions import chosen_conversions, ignorable_by_either_name
from shardferry.torch.entries import ignorable_names, make_target, model_entries, state_dict_entries
from shardferry.torch.group import open_group
from shardferry.torch.options import WARMED_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from shardferry.execute.report import Progress
    from shardferry.execute.warm import WhenShort
    from shardferry.execute.warm_report import WarmReport
    from shardferry.plan.costmodel import CostModel
    from shardferry.plan.target import Target
    from shardferry.torch.conversions import GivenConversions
    from shardferry.torch.shardings import GivenSharding


class WarmOptions(TypedDict, total=False):
    """Options of a warm-up.

    Attributes:
        shardings: How tensors are truly cut, by name, as for the load.
        conversions: Rules that make the checkpoint's names and shapes the model's, as for the load.
        checkpoint_strict: Apply the rules of files and index in full (default), as for the load.
        variant: Variant of the file names, e.g. `"fp16"`.
        node_of_rank: Node number of every rank, instead of the detected one.
        cost: What storage costs; by default what `shardferry probe` measured of the mount, else a preset. Rank 0's
            counts.
        when_short: Where the page cache has no room for all of it: `"shrink"` (default) warms the first part,
            `"refuse"` raises.
        on_progress: Called on every rank with its own `Progress`, from the reading threads.
        timeout_s: A rank that shows no sign of life for so long is given up, 600 by default. Slow ranks are not.
    """

    shardings: Mapping[str, GivenSharding]
    conversions: GivenConversions
    checkpoint_strict: bool
    variant: str | None
    node_of_rank: Sequence[int] | None
    cost: CostModel | None
    when_short: WhenShort
    on_progress: Callable[[Progress], None] | None
    timeout_s: float


def warm(
    model: nn.Module | Mapping[str, torch.Tensor], path: str | os.PathLike[str], **options: Unpack[WarmOptions]
) -> WarmReport:
    """Bring what the ranks of every node will read into its page cache, each byte once; no tensor is filled.

    Collective: call on every rank of the default process group, or on one process without a group. The load that
    follows, by this library or another one, then reads at the speed of memory.

    Args:
        model: The sharded model, or a state dict of its tensors by name; may be on the meta device.
        path: A safetensors file, an index file, or a directory that holds a checkpoint.
        **options: See `WarmOptions`.

    Returns:
        What was done on this rank's node, and whether it was of any use.

    Raises:
        MismatchError: If shapes or dtypes do not fit, or no name does.
        CheckpointError: If the checkpoint breaks a rule of the format.
        ShardingError: If a layout is impossible or ranks disagree.
        StorageError: If reading fails, or there is no room and `when_short="refuse"`.
        RankFailedError: If another rank failed; says which and why.
    """
    with open_group(timeout_of(options)) as group:
        check_call("warming", WarmOptions.__optional_keys__, options, WARMED_KINDS, model=model, path=path)
        shardings, module = options.get("shardings", {}), _module_of(model)
        conversions = chosen_conversions(options.get("conversions", ()), module)
        ignorable = ignorable_by_either_name(ignorable_names(module), conversions)
        request = JobRequest(
            path=os.fspath(path),
            checkpoint_strict=options.get("checkpoint_strict", True),
            variant=options.get("variant"),
            rules=Rules(sources={}, cast=True, ignorable=ignorable, conversions=conversions),
            given_names=shardings,
            node_of_rank=options.get("node_of_rank"),
            warm=WarmRequest(
                cost=options.get("cost"),
                when_short=options.get("when_short", "shrink"),
                on_progress=options.get("on_progress"),
            ),
        )
        return run_warm(group, lambda: _targets(model, shardings), request)


def _targets(model: nn.Module | Mapping[str, torch.Tensor], shardings: Mapping[str, GivenSharding]) -> list[Target]:
    entries = model_entries(model) if isinstance(model, nn.Module) else state_dict_entries(model, None)
    found = (make_target(entry, shardings, filled=False) for entry in entries)
    return [target for target in found if target is not None]


def _module_of(model: nn.Module | Mapping[str, torch.Tensor]) -> nn.Module | None:
    return model if isinstance(model, nn.Module) else None
