"""Load a tree of sharded arrays from a checkpoint: the JAX side of a load."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, TypedDict, Unpack

import jax

from shardferry.errors import CheckpointWarning
from shardferry.execute.job import Request, run_load
from shardferry.jax.filler import Filler
from shardferry.jax.group import open_group
from shardferry.jax.leaves import put_together, take_apart
from shardferry.plan.match import Rules
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from shardferry.execute.report import LoadReport, Progress
    from shardferry.jax.leaves import Names, PyTree

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_BUDGET_BYTES = 256 * MIB


class LoadOptions(TypedDict, total=False):
    """Options of every load.

    Attributes:
        cast: Cast F16, BF16, F32 and F64 to the target's dtype (default); False makes a difference an error. Nothing
            else is ever cast.
        checkpoint_strict: Apply the rules of files and index in full (default); False goes on where transformers
            would.
        variant: Variant of the file names, e.g. `"fp16"`.
        node_of_rank: Node number of every process, instead of the detected one.
        on_progress: Called on every process with its own `Progress`, from the reading threads.
        on_report: Called on every process with the `LoadReport` of a load that has succeeded.
        budget_bytes: Memory a process may use beside the arrays; 256 MiB by default.
        timeout_s: A process that shows no sign of life for so long is given up, 600 by default. Slow ones are not.
    """

    cast: bool
    checkpoint_strict: bool
    variant: str | None
    node_of_rank: Sequence[int] | None
    on_progress: Callable[[Progress], None] | None
    on_report: Callable[[LoadReport], None] | None
    budget_bytes: int
    timeout_s: float


def load(
    path: str | os.PathLike[str],
    target: PyTree,
    *,
    names: Names | None = None,
    strict: bool = True,
    **options: Unpack[LoadOptions],
) -> PyTree:
    """Return a tree of arrays read from a checkpoint, each process reading only what its own devices hold.

    Collective: call on every process of the job that `jax.distributed` has initialized, or in one process without.

    Args:
        path: A safetensors file, an index file, or a directory that holds a checkpoint.
        target: Any pytree whose leaves have shape, dtype and sharding: `jax.ShapeDtypeStruct`, or arrays, whose values
            are not used. Without a sharding an array is replicated over all devices. Leaves without shape and dtype
            (functions in an equinox module) stay as they are.
        names: What the checkpoint calls an array: by its dot-joined key path, a mapping from it, or a function of it.
            A list of names stands for as many tensors stacked along a new first dim, `Stack` along another; None
            leaves the array out. By default the key path is the name.
        strict: Whether a name that is missing or unexpected is an error. If not, the report lists them, and a leaf
            that is missing stays as it was in `target`.
        **options: See `LoadOptions`.

    Returns:
        The tree, its arrays with exactly the shardings asked for, memory kinds included.

    Raises:
        MismatchError: If names, shapes or dtypes do not fit; lists them by class. Nothing was read.
        CheckpointError: If the checkpoint breaks a rule of the format.
        InvalidInputError: If `target` has a dtype that JAX would truncate or that files cannot hold.
        ShardingError: If a sharding does not fit its shape or processes disagree.
        StorageError: If reading fails.
        RankFailedError: If another process failed; says which and why.
    """
    with open_group(options.get("timeout_s", DEFAULT_TIMEOUT_S)) as group:
        check_options(options, LoadOptions.__optional_keys__, "a load")
        tree = take_apart(target, names)
        filler = Filler(tree.leaves)
        report = run_load(group, filler, _request(path, strict=strict, options=options))
        arrays = filler.arrays(report.missing)
    if report.total.num_overflowed and jax.process_index() == 0:
        message = (
            f"{report.total.num_overflowed} finite values became infinite when tensors were cast to the target's dtype"
        )
        warnings.warn(message, CheckpointWarning, stacklevel=2)
    on_report = options.get("on_report")
    if on_report is not None:
        on_report(report)
    return put_together(tree, arrays)


def check_options(given: Collection[str], known: frozenset[str], what: str) -> None:
    """Raise `TypeError` for an option that does not exist."""
    unknown = sorted(set(given) - known)
    if unknown:
        raise TypeError(f"unknown option {', '.join(unknown)}; {what} takes {', '.join(sorted(known))}")


def _request(path: str | os.PathLike[str], *, strict: bool, options: LoadOptions) -> Request:
    return Request(
        path=os.fspath(path),
        strict=strict,
        checkpoint_strict=options.get("checkpoint_strict", True),
        variant=options.get("variant"),
        rules=Rules(sources={}, cast=options.get("cast", True), ignorable=lambda _: False),
        given_names=(),
        node_of_rank=options.get("node_of_rank"),
        on_progress=options.get("on_progress"),
        budget_bytes=options.get("budget_bytes", DEFAULT_BUDGET_BYTES),
    )
