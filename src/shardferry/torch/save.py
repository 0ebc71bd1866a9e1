"""Save a sharded model, or a state dict, as a Hugging Face checkpoint: the PyTorch side of a save."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

import torch

from shardferry.convert.table import module_in_checkpoint
from shardferry.errors import CheckpointWarning, InvalidInputError
from shardferry.execute.open import open_checkpoint
from shardferry.execute.options import check_call, timeout_of
from shardferry.execute.save_job import SaveRequest, run_save
from shardferry.format.oldfiles import Naming
from shardferry.geometry.sharding import MeshLayout
from shardferry.plan.match import FLOATS
from shardferry.plan.packing import PLAIN, parse_size
from shardferry.torch.conversions import chosen_conversions
from shardferry.torch.dtypes import dtype_name, torch_dtype
from shardferry.torch.entries import Entry, make_target, model_entries, state_dict_entries
from shardferry.torch.extras import write_extras
from shardferry.torch.group import open_group
from shardferry.torch.load import DEFAULT_BUDGET_BYTES
from shardferry.torch.mover import GlooMover, open_mover
from shardferry.torch.options import SAVED_KINDS, TORCH_KINDS
from shardferry.torch.shardings import local_part
from shardferry.torch.sources import TensorSource, digest_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import nn

    from shardferry.convert.rules import Rule
    from shardferry.convert.table import Conversions
    from shardferry.execute.report import Progress, SaveReport
    from shardferry.plan.target import Target
    from shardferry.storage.base import Bytes
    from shardferry.torch.conversions import GivenConversions
    from shardferry.torch.extras import Savable
    from shardferry.torch.shardings import GivenSharding


# The Hub library's default; transformers' is ten times as large, which makes few files to write in parallel.
DEFAULT_MAX_SHARD_SIZE = "5GB"


class SaveOptions(TypedDict, total=False):
    """Options of every save.

    Attributes:
        dtype: Cast floating tensors (F16, BF16, F32, F64) to this dtype while writing; nothing else is ever cast.
        shardings: How tensors are truly cut, by name, for those whose own layout does not tell: a mesh and placements
            that apply left to right, or a `Sharding`. Wins over what a DTensor says.
        conversions: Rules that lead from the checkpoint's names and shapes to the model's, as for a load; they are
            undone, so that what is saved has the checkpoint's. See `shardferry.conversions`. `"auto"` takes those of a
            transformers model's family from transformers itself.
        replicas: `"trust"` (default) writes one copy of what is declared replicated, cut over its holders if it is
            large; `"check"` compares the copies first and refuses those that differ. Plain tensors nobody declared
            are always compared.
        metadata: Strings for the `__metadata__` of every file, beside `{"format": "pt"}`.
        files_like: A checkpoint whose assignment of names to files is kept.
        extras: What else to write beside the weights, each with a `save_pretrained(folder)`: a tokenizer, a processor.
            A model does not know its tokenizer, and the folder it was loaded from may have an older one: give it.
        stem: What the names of the files begin with: `"model"`, or `"diffusion_pytorch_model"` for diffusers.
        hub_limits: Refuse an index above the 10 MiB that the Hub's tools read, instead of warning.
        on_progress: Called on every rank with its own `Progress`.
        budget_bytes: Memory a rank may use beside the tensors; 256 MiB by default.
        timeout_s: A rank that shows no sign of life for so long is given up, 600 by default. Slow ranks are not. Within
            this time, and within minutes in any case, so is a server that brings nothing.
    """

    dtype: torch.dtype | None
    shardings: Mapping[str, GivenSharding]
    conversions: GivenConversions
    replicas: Literal["trust", "check"]
    metadata: Mapping[str, str]
    files_like: str | os.PathLike[str] | None
    extras: Sequence[Savable]
    stem: str
    hub_limits: bool
    on_progress: Callable[[Progress], None] | None
    budget_bytes: int
    timeout_s: float


def save_model(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    on_existing: Literal["refuse", "replace"] = "refuse",
    **options: Unpack[SaveOptions],
) -> SaveReport:
    """Save a model's parameters and persistent buffers as a checkpoint that any Hugging Face reader opens.

    Collective: call on every rank of the default process group, or on one process without a group. Nothing is
    gathered: every rank writes its own bytes into the final files. They appear at `path` all at once, when every
    rank has written everything. The files do not depend on how the model is sharded.

    A tensor the model holds under several names is written once, under the first, and never under a name the model
    declares tied to another. Configuration files are written too if the model has them (`config`,
    `generation_config`), and what `extras=` gives, as a part of the same checkpoint.

    Args:
        model: Plain or sharded.
        path: Directory of the checkpoint; made if it is not there. The same on every rank.
        max_shard_size: Most bytes of tensors in a file, as a number or like `"5GB"` or `"512MiB"`; a larger tensor
            has a file of its own. If everything fits one file it is `model.safetensors`, without an index.
        on_existing: `"refuse"` raises if there is a checkpoint; `"replace"` replaces it as a whole. Other files in
            the directory stay either way.
        **options: See `SaveOptions`.

    Returns:
        What was written, by rank and in total.

    Raises:
        FileExistsError: If there is a checkpoint and it is not to be replaced.
        ShardingError: If a layout is impossible, ranks disagree, copies differ or elements are on no rank.
        StorageError: If writing fails. Nothing was published.
        RankFailedError: If another rank failed; says which and why. Nothing was published.
    """
    unwrapped = getattr(model, "_orig_mod", model)

    def prepare() -> tuple[_Saver, SaveRequest]:
        given = {"model": model, "path": path, "max_shard_size": max_shard_size, "on_existing": on_existing}
        check_call("a save", SaveOptions.__optional_keys__, options, TORCH_KINDS, **given)
        entries = model_entries(unwrapped)
        known = {name for entry in entries for name in entry.names}
        conversions = chosen_conversions(options.get("conversions", ()), unwrapped)
        saver = _Saver(_entries_to_write(unwrapped, entries), unwrapped, conversions, options)
        request = _request(path, max_shard_size, on_existing, known, options)
        return saver, replace(request, conversions=conversions)

    return _run(prepare, options)


def save_state_dict(
    state_dict: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    on_existing: Literal["refuse", "replace"] = "refuse",
    **options: Unpack[SaveOptions],
) -> SaveReport:
    """Save the tensors of a state dict as a checkpoint, under every name it is given, aliases included.

    Collective, as `save_model`.

    Args:
        state_dict: Tensors and DTensors by checkpoint name.
        path: Directory of the checkpoint.
        model: The sharded model the state dict comes from; it tells in which order FSDP2 over tensor parallelism has
            cut, which a detached DTensor does not.
        max_shard_size: As in `save_model`.
        on_existing: As in `save_model`.
        **options: See `SaveOptions`.

    Returns:
        What was written, by rank and in total.

    Raises:
        ShardferryError: As `save_model`.
    """

    def prepare() -> tuple[_Saver, SaveRequest]:
        given = {"path": path, "model": model, "max_shard_size": max_shard_size, "on_existing": on_existing}
        check_call("a save", SaveOptions.__optional_keys__, options, SAVED_KINDS, state_dict=state_dict, **given)
        cuts = {name: entry.cut for entry in state_dict_entries(state_dict, model) for name in entry.names}
        entries = (Entry((name,), tensor, [], cuts.get(name)) for name, tensor in state_dict.items())
        conversions = chosen_conversions(options.get("conversions", ()), model)
        saver = _Saver(entries, None, conversions, options)
        request = _request(path, max_shard_size, on_existing, set(state_dict), options)
        return saver, replace(request, conversions=conversions)

    return _run(prepare, options)


class _Saver:
    """What one rank holds, as a save wants it."""

    def __init__(
        self,
        entries: Iterable[Entry],
        model: nn.Module | None,
        conversions: tuple[Rule, ...] | Conversions,
        options: SaveOptions,
    ) -> None:
        self._model = model
        self._conversions = conversions
        self._extras = tuple(options.get("extras", ()))
        self._dtype = options.get("dtype")
        shardings = options.get("shardings", {})
        self._tensors: dict[str, torch.Tensor] = {}
        self.targets: list[Target] = []
        for entry in entries:
            target = make_target(entry, shardings, filled=False)
            if target is None:
                continue
            if entry.tensor.is_meta:
                raise InvalidInputError(f"{target.name} is on the meta device: it has no values to save")
            self.targets.append(_with_global_shape(target))
            self._tensors[target.name] = local_part(entry.tensor)

    def source(self, name: str) -> TensorSource:
        """Return the memory of a tensor of this rank."""
        return TensorSource(self._tensors[name], name)

    def made_source(self, data: Bytes, dtype: str, shape: tuple[int, ...]) -> TensorSource:
        """Return a tensor that was computed as the memory of one of this rank."""
        return TensorSource(torch.from_numpy(data).view(torch_dtype(dtype)).reshape(shape), dtype)

    def content(self, name: str) -> Bytes:
        """Return a tensor's bytes in logical order."""
        return digest_view(self._tensors[name])

    def mover(self, check: Callable[[], None]) -> AbstractContextManager[GlooMover]:
        """Return what moves bytes between the ranks. Collective."""
        return open_mover(check)

    def write_extras(self, folder: Path) -> None:
        """Write what belongs beside the weights."""
        spell = partial(module_in_checkpoint, conversions=self._conversions)
        write_extras(folder, self._model, self._extras, self._dtype, spell)


def _run(prepare: Callable[[], tuple[_Saver, SaveRequest]], options: SaveOptions) -> SaveReport:
    """Save what `prepare` offers; the group is opened first, so that all ranks hear of what is wrong on one."""
    with open_group(timeout_of(options)) as group, torch.no_grad():
        report = run_save(group, *prepare())
        for text in report.warnings if group.rank == 0 else ():
            warnings.warn(text, CheckpointWarning, stacklevel=3)
    return report


def _request(
    path: str | os.PathLike[str],
    max_shard_size: int | str,
    on_existing: Literal["refuse", "replace"],
    known: set[str],
    options: SaveOptions,
) -> SaveRequest:
    dtype = options.get("dtype")
    like = options.get("files_like")
    return SaveRequest(
        path=os.fspath(path),
        max_shard_bytes=parse_size(max_shard_size),
        on_existing=on_existing,
        dtype=None if dtype is None else _float_name(dtype),
        replicas=options.get("replicas", "trust"),
        given_names=set(options.get("shardings", {})) - known,
        conversions=(),
        metadata={"format": "pt", **options.get("metadata", {})},
        files_like=None if like is None else {k: v.file for k, v in open_checkpoint(like).tensors.items()},
        hub_limits=options.get("hub_limits", False),
        on_progress=options.get("on_progress"),
        budget_bytes=options.get("budget_bytes", DEFAULT_BUDGET_BYTES),
        naming=Naming(options.get("stem", PLAIN.stem)),
    )


def _float_name(dtype: torch.dtype) -> str:
    name = dtype_name(dtype, "dtype=")
    if name not in FLOATS:
        raise InvalidInputError(f"dtype= is {dtype}; floating tensors are cast to one of {', '.join(sorted(FLOATS))}")
    return name


def _entries_to_write(model: nn.Module, entries: Sequence[Entry]) -> Iterator[Entry]:
    """Yield what a checkpoint of a model has: each memory once, under a name that is not declared tied to another."""
    declared = dict(getattr(model, "all_tied_weights_keys", None) or {})
    present = {name for entry in entries for name in entry.names}
    for entry in entries:
        if not all(name in declared and declared[name] in present and name != declared[name] for name in entry.names):
            yield replace(entry, names=tuple(sorted(entry.names, key=lambda name: name in declared)))


def _with_global_shape(target: Target) -> Target:
    """Return a plain tensor with a mesh sharding given, with the global shape its even cuts make."""
    if target.shape is not None:
        return target
    layout = target.layouts[0]
    if not isinstance(layout, MeshLayout):
        return replace(target, shape=layout.shape)
    shape = list(target.local_shape)
    for split in layout.splits:
        shape[split.dim] *= layout.mesh_shape[split.axis]
    return replace(target, shape=tuple(shape))
