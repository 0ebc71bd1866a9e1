"""Fill a sharded model, or a state dict, from a checkpoint: the PyTorch side of a load."""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch
from torch import nn

from shardferry.errors import CheckpointWarning
from shardferry.execute.job import Request, run_load
from shardferry.execute.options import check_call, timeout_of
from shardferry.execute.reading import Sharing
from shardferry.plan.match import Rules
from shardferry.torch.conversions import chosen_conversions, ignorable_by_either_name
from shardferry.torch.entries import ignorable_names, model_entries, state_dict_entries, unfilled_names
from shardferry.torch.filler import Filler, put_into_model, put_into_state_dict
from shardferry.torch.group import open_group
from shardferry.torch.mover import open_mover
from shardferry.torch.options import FILLED_KINDS, TORCH_KINDS
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence

    from shardferry.execute.report import LoadReport, Progress
    from shardferry.plan.estimate import ReadOnce
    from shardferry.torch.conversions import GivenConversions
    from shardferry.torch.shardings import GivenSharding

DEFAULT_BUDGET_BYTES = 256 * MIB
DEFAULT_EXCHANGE_BYTES = 256 * MIB


class LoadOptions(TypedDict, total=False):
    """Options of every load.

    Attributes:
        cast: Cast F16, BF16, F32 and F64 to the model's dtype (default); False makes a difference an error. Nothing
            else is ever cast.
        shardings: How tensors are truly cut, by name, for those whose own layout does not tell: a mesh and placements
            that apply left to right, or a `Sharding`. Wins over what a DTensor says.
        conversions: Rules that make the checkpoint's names and shapes the model's, applied in order; see
            `shardferry.conversions`. All ranks give the same ones. `"auto"` takes those of a transformers model's
            family from transformers itself.
        ignore_mismatched_sizes: Count a tensor whose shape is not the model's as missing; False makes it an error.
        checkpoint_strict: Apply the rules of files and index in full (default); False goes on where transformers
            would.
        variant: Variant of the file names, e.g. `"fp16"`.
        node_of_rank: Node number of every rank, instead of the detected one.
        on_progress: Called on every rank with its own `Progress`, from the reading threads.
        budget_bytes: Memory a rank may use beside the tensors; 256 MiB by default.
        read_once: Whether one rank reads what several want, and sends it to them: `"auto"` (default) if that is
            predicted to be faster, which it is not where all ranks share one page cache; `"always"`; or `"never"`.
        exchange_bytes: Memory a rank may use for such an exchange, as a part of `budget_bytes`; 256 MiB by default.
        timeout_s: A rank that shows no sign of life for so long is given up, 600 by default. Slow ranks are not. Within
            this time, and within minutes in any case, so is a server that brings nothing.
    """

    cast: bool
    shardings: Mapping[str, GivenSharding]
    conversions: GivenConversions
    ignore_mismatched_sizes: bool
    checkpoint_strict: bool
    variant: str | None
    node_of_rank: Sequence[int] | None
    on_progress: Callable[[Progress], None] | None
    budget_bytes: int
    read_once: ReadOnce
    exchange_bytes: int
    timeout_s: float


def load_model(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, **options: Unpack[LoadOptions]
) -> LoadReport:
    """Fill the parameters and persistent buffers of a model from a checkpoint, each rank reading only its own bytes.

    Collective: call on every rank of the default process group, or on one process without a group. Tensors are
    filled in place; those on the meta device get memory (a DTensor on its mesh's device, a plain tensor on torch's
    default device). Tied parameters stay tied. Non-persistent buffers are not touched. A parameter on the meta device
    is replaced by a new one, as `to_empty` does: make the optimizer after the load.

    Args:
        model: Plain, or sharded by FSDP2, HSDP, tensor, expert or pipeline parallelism or mixes of them.
        path: A safetensors file, an index file, or a directory that holds a checkpoint.
        strict: Whether a name that is missing or unexpected is an error. If not, the report lists them, and a missing
            tensor stays as it was.
        **options: See `LoadOptions`.

    Returns:
        What was read, by rank and in total.

    Raises:
        MismatchError: If names, shapes or dtypes do not fit; lists them by class. Nothing was read.
        CheckpointError: If the checkpoint breaks a rule of the format.
        ShardingError: If a layout is impossible or ranks disagree.
        StorageError: If reading fails; the model's content is then undefined.
        RankFailedError: If another rank failed; says which and why.
    """
    return _run_torch_load(lambda: prepare_model(model, path, strict=strict, options=options), options)


def load_state_dict(
    state_dict: MutableMapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    strict: bool = True,
    **options: Unpack[LoadOptions],
) -> LoadReport:
    """Fill the tensors of a state dict from a checkpoint, each rank reading only its own bytes.

    Collective, as `load_model`. Tensors are filled in place; entries on the meta device are replaced.

    Args:
        state_dict: Tensors and DTensors by checkpoint name.
        path: A safetensors file, an index file, or a directory that holds a checkpoint.
        model: The sharded model the state dict comes from. It tells in which order FSDP2 over tensor parallelism has
            cut, which a detached DTensor does not, and which names are tied.
        strict: Whether a name that is missing or unexpected is an error.
        **options: See `LoadOptions`.

    Returns:
        What was read, by rank and in total.

    Raises:
        ShardferryError: As `load_model`.
    """

    def prepare() -> tuple[Filler, Request]:
        given = {"state_dict": state_dict, "path": path, "model": model, "strict": strict}
        check_call("a load", LoadOptions.__optional_keys__, options, FILLED_KINDS, **given)
        entries = state_dict_entries(state_dict, model)
        filler = Filler(entries, options.get("shardings", {}), partial(put_into_state_dict, state_dict))
        return filler, _request(path, model, strict=strict, options=options)

    return _run_torch_load(prepare, options)


def _run_torch_load(prepare: Callable[[], tuple[Filler, Request]], options: LoadOptions) -> LoadReport:
    """Load what `prepare` offers; the part that every way of calling shares. Collective.

    The group is opened first: what is wrong on one rank alone, all ranks must hear of. And a rank that has left a call
    out would be one call behind the others ever after.
    """
    with open_group(timeout_of(options)) as group, torch.no_grad():
        filler, request = prepare()
        report = run_load(group, filler, request)
        if not isinstance(request.rules.conversions, tuple):
            request.rules.conversions.loaded()
    if report.total.num_overflowed and group.rank == 0:
        message = (
            f"{report.total.num_overflowed} finite values became infinite when tensors were cast to the model's dtype"
        )
        warnings.warn(message, CheckpointWarning, stacklevel=3)
    return report


def prepare_model(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool, options: LoadOptions
) -> tuple[Filler, Request]:
    """Return what fills a model, and what its load asks for.

    Raises:
        InvalidInputError: If something given is not what it may be.
    """
    known = LoadOptions.__optional_keys__
    check_call("a load", known, options, TORCH_KINDS, model=model, path=path, strict=strict)
    entries = model_entries(model)
    filler = Filler(entries, options.get("shardings", {}), put_into_model)
    filler.unfilled += unfilled_names(model, entries)
    return filler, _request(path, model, strict=strict, options=options)


def _request(path: str | os.PathLike[str], model: nn.Module | None, *, strict: bool, options: LoadOptions) -> Request:
    budget_bytes = options.get("budget_bytes", DEFAULT_BUDGET_BYTES)
    sharing = Sharing(
        read_once=options.get("read_once", "auto"),
        exchange_bytes=min(options.get("exchange_bytes", DEFAULT_EXCHANGE_BYTES), budget_bytes),
        mover=open_mover,
    )
    conversions = chosen_conversions(options.get("conversions", ()), model)
    return Request(
        path=os.fspath(path),
        strict=strict,
        checkpoint_strict=options.get("checkpoint_strict", True),
        variant=options.get("variant"),
        rules=Rules(
            sources={},
            cast=options.get("cast", True),
            ignorable=ignorable_by_either_name(ignorable_names(model), conversions),
            conversions=conversions,
            skip_mismatched=options.get("ignore_mismatched_sizes", False),
        ),
        given_names=options.get("shardings", {}),
        node_of_rank=options.get("node_of_rank"),
        on_progress=options.get("on_progress"),
        budget_bytes=budget_bytes,
        sharing=sharing,
    )
