"""What a load would do, before it does it, and warming the page cache for it: the JAX side of both."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypedDict, Unpack

from shardferry.execute.job import estimate_load
from shardferry.execute.options import check_call, timeout_of
from shardferry.execute.warm import WarmRequest
from shardferry.execute.warm_job import JobRequest, run_warm
from shardferry.jax.group import open_group
from shardferry.jax.holdings import cutting_rules, holdings
from shardferry.jax.leaves import take_apart
from shardferry.jax.load import LoadOptions, check_load, prepare, stacking_rules
from shardferry.jax.options import JAX_KINDS
from shardferry.jax.parts import is_local
from shardferry.plan.match import Rules

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardferry.convert.rules import Rule
    from shardferry.execute.report import Progress
    from shardferry.execute.warm import WhenShort
    from shardferry.execute.warm_report import WarmReport
    from shardferry.jax.leaves import Names, PyTree
    from shardferry.plan.costmodel import CostModel
    from shardferry.plan.estimate import Estimate


class WarmOptions(TypedDict, total=False):
    """Options of a warm-up.

    Attributes:
        conversions: Rules that make the checkpoint's names and shapes the tree's, as for the load.
        checkpoint_strict: Apply the rules of files and index in full (default), as for the load.
        variant: Variant of the file names, e.g. `"fp16"`.
        node_of_rank: Node number of every process, instead of the detected one.
        cost: What storage costs; by default what `shardferry probe` measured of the mount, else a preset. Rank 0's
            counts.
        when_short: Where the page cache has no room for all of it: `"shrink"` (default) warms the first part,
            `"refuse"` raises.
        on_progress: Called on every process with its own `Progress`, from the reading threads.
        timeout_s: A process that shows no sign of life for so long is given up, 600 by default. Slow ones are not.
            Within this time, and within minutes in any case, so is a server that brings nothing.
    """

    conversions: Sequence[Rule]
    checkpoint_strict: bool
    variant: str | None
    node_of_rank: Sequence[int] | None
    cost: CostModel | None
    when_short: WhenShort
    on_progress: Callable[[Progress], None] | None
    timeout_s: float


def plan_load(
    path: str | os.PathLike[str],
    target: PyTree,
    *,
    names: Names | None = None,
    strict: bool = True,
    **options: Unpack[LoadOptions],
) -> Estimate:
    """Return how `load` would read a checkpoint, what each way would cost, and why; nothing is read or made.

    Collective, as `load`, with the same arguments and the same checks of names, shapes, dtypes and shardings.

    Returns:
        The same on every process. Printed, it is the decision in words; `to_json` has everything.

    Raises:
        ShardferryError: As `load`, before it reads.
    """
    with open_group(timeout_of(options)) as group:
        check_load(options, path=path, names=names, strict=strict)
        filler, request = prepare(path, take_apart(target, names), strict=strict, options=options)
        assert request.sharing is not None
        return estimate_load(group, filler, request, request.sharing)


def warm(
    path: str | os.PathLike[str], target: PyTree, *, names: Names | None = None, **options: Unpack[WarmOptions]
) -> WarmReport:
    """Bring what the processes of every node will read into its page cache, each byte once; nothing is loaded.

    Collective: call on every process of the job, or in one process without. The load that follows, by this library or
    another one, then reads at the speed of memory.

    Args:
        path: A safetensors file, an index file, or a directory that holds a checkpoint.
        target: As for `load`.
        names: As for `load`.
        **options: See `WarmOptions`.

    Returns:
        What was done on this process's node, and whether it was of any use.

    Raises:
        MismatchError: If shapes or dtypes do not fit, or no name does.
        CheckpointError: If the checkpoint breaks a rule of the format.
        ShardingError: If a sharding is impossible or processes disagree.
        StorageError: If reading fails, or there is no room and `when_short="refuse"`.
        RankFailedError: If another process failed; says which and why.
    """
    with open_group(timeout_of(options)) as group:
        check_call("warming", WarmOptions.__optional_keys__, options, JAX_KINDS, path=path, names=names)
        leaves = take_apart(target, names).leaves
        held = [of.target for leaf in leaves for of in holdings(leaf, is_plain=is_local(leaf.sharding))]
        request = JobRequest(
            path=os.fspath(path),
            checkpoint_strict=options.get("checkpoint_strict", True),
            variant=options.get("variant"),
            rules=Rules(
                sources={},
                cast="integers",
                ignorable=lambda _: False,
                conversions=(*options.get("conversions", ()), *stacking_rules(leaves), *cutting_rules(leaves)),
            ),
            given_names=(),
            node_of_rank=options.get("node_of_rank"),
            warm=WarmRequest(
                cost=options.get("cost"),
                when_short=options.get("when_short", "shrink"),
                on_progress=options.get("on_progress"),
            ),
        )
        return run_warm(group, lambda: held, request)
