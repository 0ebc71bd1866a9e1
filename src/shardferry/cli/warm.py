"""`shardferry warm`: bring what the ranks of this node will read into its page cache, whoever reads it then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shardferry.cli.progress import progress_bar
from shardferry.execute.costs import named_cost_model
from shardferry.execute.open import open_checkpoint
from shardferry.execute.warm import WarmRequest, page_cached_root, warm_node
from shardferry.plan.simulate import consecutive_nodes, parse_mesh, parse_rule, simulate_job
from shardferry.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardferry.execute.warm import WhenShort
    from shardferry.execute.warm_report import WarmReport


@click.command()
@click.argument("path")
@click.option("--mesh", default="rank=1", metavar="AXIS=SIZE,...", help="The job's mesh, outermost axis first.")
@click.option("--shard", "rules", multiple=True, metavar="REGEX=DIM@AXIS", help="How tensors are cut; may be repeated.")
@click.option("--ranks-per-node", type=click.IntRange(1), help="Ranks on each node; all on one if not given.")
@click.option("--rank-of-node", type=click.IntRange(0), help="Which node this is, from 0: torchrun's --node-rank.")
@click.option(
    "--cost", metavar="PRESET|FILE", help="What storage costs: local, network_mount, or a file of probe --json."
)
@click.option(
    "--when-short",
    type=click.Choice(("shrink", "refuse")),
    default="shrink",
    show_default=True,
    help="Where memory has no room for all of it: warm the first part, or nothing.",
)
@click.option("--no-strict", is_flag=True, help="Go on where only the strict rules of format and index are broken.")
@click.option("--variant", help="The variant to read, e.g. fp16 for model.fp16.safetensors.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
def warm(  # noqa: PLR0913 - the options of the command line
    *,
    path: str,
    mesh: str,
    rules: tuple[str, ...],
    ranks_per_node: int | None,
    rank_of_node: int | None,
    cost: str | None,
    when_short: WhenShort,
    no_strict: bool,
    variant: str | None,
    as_json: bool,
) -> None:
    """Bring what the ranks of this node will read of the checkpoint at PATH into the page cache.

    Run it once on every node, before or beside whatever loads the checkpoint there. Ranks are numbered row-major over
    the mesh, the last axis fastest, and fill one node after another. A tensor whose whole name matches REGEX is cut
    along DIM over AXIS; all rules that match act, and what no rule cuts is replicated. Without --mesh all of the
    checkpoint is warmed.

    The JSON object holds, among others, bytes_wanted, bytes_resident (there already), bytes_read, bytes_left_out (no
    room), useful, why, and by file the strategy and the costs that decided. That warming is useless is no error.
    """
    axes = parse_mesh(mesh)
    nodes = consecutive_nodes(axes.world_size, ranks_per_node or axes.world_size)
    here = _node(rank_of_node, nodes[-1] + 1)
    page_cached_root(path)
    index = open_checkpoint(path, strict=not no_strict, variant=variant)
    job = simulate_job(index, axes, [parse_rule(rule, axes) for rule in rules])
    ranks = [rank for rank, node in enumerate(nodes) if node == here]
    with progress_bar("warm") as on_progress:
        model = None if cost is None else named_cost_model(cost)
        report = warm_node(index, job, ranks, WarmRequest(model, when_short, on_progress))
    if as_json:
        click.echo(report.to_json())
        return
    for line in _lines(report, axes.world_size):
        click.echo(line)


def _node(rank_of_node: int | None, num_nodes: int) -> int:
    if rank_of_node is None and num_nodes > 1:
        raise click.UsageError(f"the job has {num_nodes} nodes: say with --rank-of-node which one this is, from 0")
    if rank_of_node is not None and rank_of_node >= num_nodes:
        raise click.UsageError(f"--rank-of-node {rank_of_node}: the job has nodes 0 to {num_nodes - 1}")
    return rank_of_node or 0


def _lines(report: WarmReport, world_size: int) -> Iterator[str]:
    first, last = report.ranks[0], report.ranks[-1]
    who = f"rank {first}" if first == last else f"ranks {first} to {last}"
    yield f"{who} of {world_size} read {format_bytes(report.bytes_wanted)} in {len(report.files)} files"
    for file in report.files:
        there = "" if file.bytes_resident is None else f", {format_bytes(file.bytes_resident)} there already"
        yield f"  {file.file}: {file.strategy}, {format_bytes(file.bytes_planned)}{there} ({file.why})"
    yield f"fetched {format_bytes(report.bytes_read)} in {report.seconds:.1f} s, planned for {report.cost_source}"
    yield report.why
