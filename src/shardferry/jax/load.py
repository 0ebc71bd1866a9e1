"""Load a tree of sharded arrays from a checkpoint: the JAX side of a load."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, TypedDict, Unpack

import jax

from shardferry.convert.rules import Convert
from shardferry.convert.steps import Concatenate, Reshape
from shardferry.errors import CheckpointWarning
from shardferry.execute.job import Request, run_load
from shardferry.execute.options import check_call, timeout_of
from shardferry.execute.reading import Sharing
from shardferry.jax.filler import Filler
from shardferry.jax.group import open_group
from shardferry.jax.leaves import Stacked, put_together, take_apart
from shardferry.jax.mover import open_mover
from shardferry.jax.options import JAX_KINDS
from shardferry.plan.match import Cast, Rules
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardferry.convert.rules import Rule
    from shardferry.execute.report import LoadReport, Progress
    from shardferry.jax.leaves import Leaf, Names, PyTree, Tree
    from shardferry.plan.estimate import ReadOnce

DEFAULT_BUDGET_BYTES = 256 * MIB
DEFAULT_EXCHANGE_BYTES = 256 * MIB


class LoadOptions(TypedDict, total=False):
    """Options of every load.

    Attributes:
        cast: Cast F16, BF16, F32 and F64 to the target's dtype (default); False makes a difference an error.
            `"integers"` also casts I64 to I32 and U64 to U32 where the target says so, and raises if a value does not
            fit. Nothing else is ever cast.
        conversions: Rules that make the checkpoint's names and shapes the tree's, applied in order, before `names`; see
            `shardferry.conversions`. All processes give the same ones.
        checkpoint_strict: Apply the rules of files and index in full (default); False goes on where transformers
            would.
        variant: Variant of the file names, e.g. `"fp16"`.
        node_of_rank: Node number of every process, instead of the detected one.
        on_progress: Called on every process with its own `Progress`, from the reading threads.
        on_report: Called on every process with the `LoadReport` of a load that has succeeded.
        budget_bytes: Memory a process may use beside the arrays; 256 MiB by default.
        read_once: Whether one process reads what several want, and sends it to them: `"auto"` (default) if that is
            predicted to be faster, which it is not where all share one page cache; `"always"`; or `"never"`.
        exchange_bytes: Memory a process may use for such an exchange, as a part of `budget_bytes`; 256 MiB by default.
        timeout_s: A process that shows no sign of life for so long is given up, 600 by default. Slow ones are not.
            Within this time, and within minutes in any case, so is a server that brings nothing.
    """

    cast: Cast
    conversions: Sequence[Rule]
    checkpoint_strict: bool
    variant: str | None
    node_of_rank: Sequence[int] | None
    on_progress: Callable[[Progress], None] | None
    on_report: Callable[[LoadReport], None] | None
    budget_bytes: int
    read_once: ReadOnce
    exchange_bytes: int
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
            A list of names stands for as many tensors stacked along a new first dim, `Stacked` along another; None
            leaves the array out. By default the key path is the name.
        strict: Whether a name that is missing or unexpected is an error. If not, the report lists them, and a leaf
            that is missing stays as it was in `target`.
        **options: See `LoadOptions`.

    Returns:
        The tree, its arrays with exactly the shardings asked for, memory kinds included.

    Raises:
        MismatchError: If names, shapes or dtypes do not fit; lists them by class. Nothing was read. Or if an integer
            does not fit the 32 bits it is to be cast to.
        CheckpointError: If the checkpoint breaks a rule of the format.
        InvalidInputError: If `target` has a dtype that JAX would truncate or that files cannot hold.
        ShardingError: If a sharding does not fit its shape or processes disagree.
        StorageError: If reading fails.
        RankFailedError: If another process failed; says which and why.
    """
    with open_group(timeout_of(options)) as group:
        check_load(options, path=path, names=names, strict=strict)
        tree = take_apart(target, names)
        filler, request = prepare(path, tree, strict=strict, options=options)
        report = run_load(group, filler, request)
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


def check_load(options: LoadOptions, **arguments: object) -> None:
    """Look at what a load, or a plan of one, was given.

    Raises:
        TypeError: If an option is unknown.
        InvalidInputError: If something is of the wrong kind.
    """
    check_call("a load", LoadOptions.__optional_keys__, options, JAX_KINDS, **arguments)


def prepare(path: str | os.PathLike[str], tree: Tree, *, strict: bool, options: LoadOptions) -> tuple[Filler, Request]:
    """Return what fills a tree, and what its load asks for."""
    return Filler(tree.leaves), _request(path, tree.leaves, strict=strict, options=options)


def stacking_rules(leaves: Iterable[Leaf]) -> tuple[Rule, ...]:
    """Return the rules that make arrays out of the tensors that are stacked in them."""
    return tuple(_stacking(leaf.key_path, leaf.stored_as, leaf.shape) for leaf in leaves if not leaf.is_stored_whole)


def _stacking(name: str, stacked: str | Stacked, shape: tuple[int, ...]) -> Convert:
    assert isinstance(stacked, Stacked)
    dim = stacked.dim % len(shape)
    one = (*shape[:dim], 1, *shape[dim + 1 :])
    return Convert(stacked.names, (name,), (Reshape(one, back=(*shape[:dim], *shape[dim + 1 :])), Concatenate(dim)))


def _request(path: str | os.PathLike[str], leaves: Iterable[Leaf], *, strict: bool, options: LoadOptions) -> Request:
    budget_bytes = options.get("budget_bytes", DEFAULT_BUDGET_BYTES)
    sharing = Sharing(
        read_once=options.get("read_once", "auto"),
        exchange_bytes=min(options.get("exchange_bytes", DEFAULT_EXCHANGE_BYTES), budget_bytes),
        mover=open_mover,
    )
    return Request(
        path=os.fspath(path),
        strict=strict,
        checkpoint_strict=options.get("checkpoint_strict", True),
        variant=options.get("variant"),
        rules=Rules(
            sources={},
            cast=options.get("cast", True),
            ignorable=lambda _: False,
            conversions=(*options.get("conversions", ()), *stacking_rules(leaves)),
        ),
        given_names=(),
        node_of_rank=options.get("node_of_rank"),
        on_progress=options.get("on_progress"),
        budget_bytes=budget_bytes,
        sharing=sharing,
    )
