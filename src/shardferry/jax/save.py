"""Save a tree of sharded arrays as a Hugging Face checkpoint: the JAX side of a save."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict, Unpack

import jax
import numpy as np

from shardferry.errors import CheckpointWarning, InvalidInputError
from shardferry.execute.open import open_checkpoint
from shardferry.execute.options import check_call, timeout_of
from shardferry.execute.save_job import SaveRequest, run_save
from shardferry.format.problem import listed
from shardferry.jax.dtypes import dtype_name, numpy_dtype
from shardferry.jax.group import open_group
from shardferry.jax.holdings import cutting_rules, holdings
from shardferry.jax.leaves import take_apart
from shardferry.jax.load import DEFAULT_BUDGET_BYTES, stacking_rules
from shardferry.jax.mover import open_mover
from shardferry.jax.options import JAX_KINDS
from shardferry.jax.parts import box_of, is_local
from shardferry.jax.sources import ArraySource, Held
from shardferry.plan.match import FLOATS
from shardferry.plan.packing import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from jax.typing import DTypeLike

    from shardferry.convert.rules import Rule
    from shardferry.execute.report import Progress, SaveReport
    from shardferry.jax.leaves import Leaf, Names, PyTree, Tree
    from shardferry.jax.parts import Box, Part
    from shardferry.plan.target import Target
    from shardferry.storage.base import Bytes
    from shardferry.transport.bulk import Mover


# Names listed in an error.
LISTED = 5
# The Hub library's default, as of the torch side: the files must not depend on who writes them.
DEFAULT_MAX_SHARD_SIZE = "5GB"


class SaveOptions(TypedDict, total=False):
    """Options of every save.

    Attributes:
        conversions: Rules that lead from the checkpoint's names and shapes to the tree's, as for a load; they are
            undone, so that what is saved has the checkpoint's. See `shardferry.conversions`.
        dtype: Cast floating arrays (F16, BF16, F32, F64) to this dtype while writing; nothing else is ever cast.
        replicas: `"trust"` (default) writes one copy of what processes hold alike, cut over them if it is large;
            `"check"` compares the copies first and refuses those that differ. Arrays that every process has of its
            own (NumPy arrays, arrays on one local device) are always compared.
        metadata: Strings for the `__metadata__` of every file, beside `{"format": "pt"}`.
        files_like: A checkpoint whose assignment of names to files is kept.
        hub_limits: Refuse an index above the 10 MiB that the Hub's tools read, instead of warning.
        on_progress: Called on every process with its own `Progress`.
        budget_bytes: Memory a process may use beside the arrays; 256 MiB by default.
        timeout_s: A process that shows no sign of life for so long is given up, 600 by default. Slow ones are not.
            Within this time, and within minutes in any case, so is a server that brings nothing.
    """

    conversions: Sequence[Rule]
    dtype: DTypeLike | None
    replicas: Literal["trust", "check"]
    metadata: Mapping[str, str]
    files_like: str | os.PathLike[str] | None
    hub_limits: bool
    on_progress: Callable[[Progress], None] | None
    budget_bytes: int
    timeout_s: float


def save(
    path: str | os.PathLike[str],
    tree: PyTree,
    *,
    names: Names | None = None,
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    on_existing: Literal["refuse", "replace"] = "refuse",
    **options: Unpack[SaveOptions],
) -> SaveReport:
    """Save a tree of arrays as a checkpoint that any Hugging Face reader opens.

    Collective: call on every process of the job, or in one process without. Nothing is gathered: every process writes
    bytes its own devices hold into the final files, which appear at `path` all at once, when all have written
    everything. The files do not depend on how the arrays are sharded, nor on the framework.

    Args:
        path: Directory of the checkpoint; made if it is not there. The same on every process.
        tree: Any pytree of JAX or NumPy arrays.
        names: What the checkpoint calls an array, as in `load`; None leaves one out.
        max_shard_size: Most bytes of tensors in a file, as a number or like `"5GB"` or `"512MiB"`; a larger tensor
            has a file of its own. If everything fits one file it is `model.safetensors`, without an index.
        on_existing: `"refuse"` raises if there is a checkpoint; `"replace"` replaces it as a whole. Other files in
            the directory stay either way.
        **options: See `SaveOptions`.

    Returns:
        What was written, by process and in total.

    Raises:
        FileExistsError: If there is a checkpoint and it is not to be replaced.
        InvalidInputError: If a leaf is no array, or of a dtype that files cannot hold.
        ShardingError: If a sharding cannot be saved, processes disagree or copies differ.
        StorageError: If writing fails. Nothing was published.
        RankFailedError: If another process failed; says which and why. Nothing was published.
    """
    with open_group(timeout_of(options)) as group:
        given = {"path": path, "names": names, "max_shard_size": max_shard_size, "on_existing": on_existing}
        check_call("a save", SaveOptions.__optional_keys__, options, JAX_KINDS, **given)
        taken = take_apart(tree, names)
        saver = _Saver(taken)
        report = run_save(group, saver, _request(path, taken.leaves, max_shard_size, on_existing, options))
        for text in report.warnings if group.rank == 0 else ():
            warnings.warn(text, CheckpointWarning, stacklevel=2)
    return report


class _Saved(NamedTuple):
    """An array, its value, and the boxes of it that are here."""

    leaf: Leaf
    value: jax.Array | np.ndarray
    part: Part


class _Saver:
    """What one process holds, as a save wants it."""

    def __init__(self, tree: Tree) -> None:
        _check_values(tree)
        self._saved: dict[str, _Saved] = {}
        self.targets: list[Target] = []
        for leaf in tree.leaves:
            self._offer(leaf, tree.values[leaf.position])

    def source(self, name: str) -> ArraySource:
        """Return the memory of an array of this process."""
        saved = self._saved[name]
        return ArraySource(_held(saved), saved.leaf.dtype, saved.part.region.shape)

    def made_source(self, data: Bytes, dtype: str, shape: tuple[int, ...]) -> ArraySource:
        """Return an array that was computed as the memory of one of this process."""
        place = tuple((0, size) for size in shape)
        return ArraySource((Held(place, data.view(numpy_dtype(dtype)).reshape(shape)),), dtype, shape)

    def content(self, name: str) -> Bytes:
        """Return an array's bytes in logical order."""
        return self.source(name).content()

    def mover(self, check: Callable[[], None]) -> AbstractContextManager[Mover]:
        """Return what moves bytes between the processes. Collective."""
        return open_mover(check)

    def write_extras(self, folder: Path) -> None:
        """Write nothing: a tree of arrays has no configuration."""

    def _offer(self, leaf: Leaf, value: jax.Array | np.ndarray) -> None:
        is_plain = isinstance(value, np.ndarray) or is_local(leaf.sharding)
        for target, part in holdings(leaf, is_plain=is_plain):
            self._saved[target.name] = _Saved(leaf, value, part)
            self.targets.append(target)


def _check_values(tree: Tree) -> None:
    if tree.others:
        raise InvalidInputError(
            f"{listed(tree.others, LISTED)} of the tree are no arrays: leave them out, with names= or before "
            "(equinox.filter(model, equinox.is_array), nnx.state(model, nnx.Param))"
        )
    values = [(leaf.key_path, tree.values[leaf.position]) for leaf in tree.leaves]
    empty = [key for key, value in values if not isinstance(value, jax.Array | np.ndarray)]
    if empty:
        raise InvalidInputError(f"{listed(empty, LISTED)} of the tree have a shape but no values to save")


def _held(saved: _Saved) -> tuple[Held, ...]:
    """Return the memory of the boxes of a part: of devices that hold the same box, the first one's."""
    leaf, value, part = saved
    if isinstance(value, np.ndarray):
        return (Held(part.places[0], value),)
    found: dict[Box, jax.Array] = {}
    for shard in value.addressable_shards:
        found.setdefault(box_of(shard.index, leaf.shape), shard.data)
    return tuple(Held(place, found[box]) for box, place in zip(part.boxes, part.places, strict=True))


def _request(
    path: str | os.PathLike[str],
    leaves: Sequence[Leaf],
    max_shard_size: int | str,
    on_existing: Literal["refuse", "replace"],
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
        given_names=(),
        conversions=(*options.get("conversions", ()), *stacking_rules(leaves), *cutting_rules(leaves)),
        metadata={"format": "pt", **options.get("metadata", {})},
        files_like=None if like is None else {k: v.file for k, v in open_checkpoint(like).tensors.items()},
        hub_limits=options.get("hub_limits", False),
        on_progress=options.get("on_progress"),
        budget_bytes=options.get("budget_bytes", DEFAULT_BUDGET_BYTES),
    )


def _float_name(dtype: DTypeLike) -> str:
    name = dtype_name(np.dtype(dtype), "dtype=")
    if name not in FLOATS:
        raise InvalidInputError(f"dtype= is {dtype}; floating arrays are cast to one of {', '.join(sorted(FLOATS))}")
    return name
