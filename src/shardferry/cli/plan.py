"""`shardferry plan`: how a job would read a checkpoint, what it costs, and why, from headers alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click
from rich import box
from rich.console import Console
from rich.table import Table

from shardferry.execute.costs import named_cost_model, storage_cost
from shardferry.execute.open import open_checkpoint
from shardferry.plan.describe import estimate_to_json, summary
from shardferry.plan.estimate import choose_strategy
from shardferry.plan.simulate import consecutive_nodes, parse_mesh, parse_rule, simulate_job
from shardferry.storage.url import redact
from shardferry.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardferry.plan.estimate import Estimate, Price, ReadOnce

# More nodes than this are drawn in groups.
MAX_BARS = 16
BAR_WIDTH = 40


@click.command()
@click.argument("path")
@click.option("--mesh", required=True, metavar="AXIS=SIZE,...", help="The job's mesh, outermost axis first.")
@click.option("--shard", "rules", multiple=True, metavar="REGEX=DIM@AXIS", help="How tensors are cut; may be repeated.")
@click.option("--ranks-per-node", type=click.IntRange(1), help="Ranks on each node; all on one if not given.")
@click.option(
    "--cost",
    metavar="PRESET|FILE",
    help="What storage costs: local, memory, network_mount, object_store, or a file of `shardferry probe --json`. By "
    "default what a probe has measured at PATH, or else the preset of its filesystem.",
)
@click.option(
    "--read-once",
    type=click.Choice(("auto", "always", "never")),
    default="auto",
    show_default=True,
    help="As the option of a load.",
)
@click.option("--no-strict", is_flag=True, help="Go on where only the strict rules of format and index are broken.")
@click.option("--variant", help="The variant to read, e.g. fp16 for model.fp16.safetensors.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def plan(  # noqa: PLR0913 - the options of the command line
    *,
    path: str,
    mesh: str,
    rules: tuple[str, ...],
    ranks_per_node: int | None,
    cost: str | None,
    read_once: ReadOnce,
    no_strict: bool,
    variant: str | None,
    as_json: bool,
) -> None:
    """Show how a job would read the checkpoint at PATH, what each way would cost, and which one wins.

    Ranks are numbered row-major over the mesh, the last axis fastest, and fill one node after another. A tensor whose
    whole name matches REGEX is cut along DIM over AXIS. All rules that match act in the order given, each on what the
    one before left; of those over one axis the first. What no rule cuts is replicated. Only headers are read.

    The JSON object has the keys path, world_size, num_nodes, node_of_rank, bytes_wanted, rank_wanted, egress_bytes,
    chosen, why, advice, cost and strategies; each strategy has its bytes, requests and seconds, by node and by rank.
    """
    axes = parse_mesh(mesh)
    shard_rules = [parse_rule(rule, axes) for rule in rules]
    nodes = consecutive_nodes(axes.world_size, ranks_per_node or axes.world_size)
    model = None if cost is None else named_cost_model(cost)
    index = open_checkpoint(path, strict=not no_strict, variant=variant)
    job = simulate_job(index, axes, shard_rules)
    estimate = choose_strategy(job, index, nodes, model or storage_cost(index), read_once=read_once)
    if as_json:
        click.echo(json.dumps({"path": redact(path), **estimate_to_json(estimate)}, allow_nan=False))
        return
    job_line, cost_line, *decision = summary(estimate)
    click.echo(job_line)
    click.echo(cost_line)
    # A pipe gets whole lines however long, for grep; a terminal gets what fits.
    console = Console() if Console().is_terminal else Console(width=200)
    console.print(_table(estimate))
    click.echo(f"storage bytes by node, {estimate.chosen}:")
    for line in _bars(estimate.price(estimate.chosen)):
        click.echo(line)
    click.echo()
    for line in decision:
        click.echo(line)


def _table(estimate: Estimate) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("strategy")
    headings = ("from storage", "over-read", "a node", "requests", "from nodes", "within", "read s", "exchange s", "s")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for price in estimate.prices:
        mark = "> " if price.strategy == estimate.chosen else "  "
        table.add_row(
            mark + price.strategy,
            format_bytes(price.storage_bytes),
            format_bytes(price.over_read_bytes),
            format_bytes(int(price.node_bytes.max())),
            str(int(price.node_requests.max())),
            format_bytes(int(price.received_remote.max())),
            format_bytes(int(price.received_local.max())),
            *(f"{seconds:.3g}" for seconds in (price.storage_s, price.exchange_s, price.seconds)),
        )
    table.caption = (
        "a node, requests, from nodes: at the node with most; within: to the rank with most, from its own node"
    )
    return table


def _bars(price: Price) -> Iterator[str]:
    """Yield a bar per node, or of the largest of each run of nodes."""
    num_nodes = len(price.node_bytes)
    step = -(-num_nodes // MAX_BARS)
    most = max(1, int(price.node_bytes.max()))
    for first in range(0, num_nodes, step):
        last = min(num_nodes, first + step) - 1
        largest = int(price.node_bytes[first : last + 1].max())
        name = f"node {first}" if first == last else f"nodes {first}-{last}"
        yield f"  {name:<16} {'#' * -(-BAR_WIDTH * largest // most):<{BAR_WIDTH}} {format_bytes(largest)}"
