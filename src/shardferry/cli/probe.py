"""`shardferry probe`: what the storage below a path costs, measured, and kept for the loads to come."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from shardferry.execute.probing import keep, probe_storage
from shardferry.execute.topology import read_threads
from shardferry.plan.costmodel import cost_model_to_json
from shardferry.storage.location import is_remote
from shardferry.storage.probe import MAX_STREAMS
from shardferry.storage.url import redact
from shardferry.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardferry.execute.probing import ProbeResult
    from shardferry.plan.costmodel import CostModel


@click.command()
@click.argument("path")
@click.option(
    "--ranks-per-node",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Ranks that will load on each node: the probe reads with as many threads as all of them have.",
)
@click.option("--streams", type=click.IntRange(1, MAX_STREAMS), help="Reads in flight, instead of those threads.")
@click.option("--no-keep", is_flag=True, help="Do not keep the result for loads from this mount.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def probe(path: str, *, ranks_per_node: int, streams: int | None, no_keep: bool, as_json: bool) -> None:
    """Measure what a request and a byte of the storage at PATH cost, in less than 2 s and 200 MB.

    PATH is a file, a folder whose largest files are read, or the URL of a checkpoint. Of files only what is not in the
    page cache is read, and nothing is evicted from it. Where nothing can be measured, or the reads fit no model, the
    preset of the filesystem's type is shown, and why. What was measured is kept for later loads from the mount, below
    $XDG_CACHE_HOME/shardferry.

    The JSON object has the keys path, mount, streams, samples, fit, read_bytes, seconds, why_preset (empty if
    measured), kept (the file), and cost_model, and is itself a file for --cost.
    """
    is_local = not is_remote(path)
    threads = ranks_per_node * read_threads([0] * ranks_per_node, 0, is_local=is_local)
    result = probe_storage(path, streams=streams or min(threads, MAX_STREAMS))
    kept, trouble = (None, "") if no_keep else _kept(result)
    if as_json:
        click.echo(json.dumps(_object(path, result, kept), allow_nan=False))
    else:
        for line in _lines(path, result):
            click.echo(line)
        if kept is not None:
            click.echo(f"kept in {kept}: loads from this mount reckon with it")
    if trouble:
        click.echo(f"warning: {trouble}", err=True)


def _kept(result: ProbeResult) -> tuple[Path | None, str]:
    try:
        return keep(result), ""
    except OSError as error:
        return None, f"the result is not kept for later loads: {error}"


def _object(path: str, result: ProbeResult, kept: Path | None) -> dict[str, object]:
    fit = result.fit
    return {
        "path": redact(path),
        "mount": result.mount._asdict(),
        "streams": result.streams,
        "samples": [sample._asdict() for sample in result.measurement.samples],
        "fit": None
        if fit is None
        else {"kind": fit.kind, "max_error": fit.max_error, "seek_bytes": fit.seek_bytes, "bandwidth": fit.bandwidth},
        "read_bytes": result.measurement.read_bytes,
        "seconds": result.measurement.seconds,
        "why_preset": result.why_preset,
        "kept": None if kept is None else str(kept),
        "cost_model": cost_model_to_json(result.model),
    }


def _lines(path: str, result: ProbeResult) -> Iterator[str]:
    yield f"{redact(path)}: {result.mount.type} at {result.mount.point or result.mount.source or 'an unknown place'}"
    for sample in result.measurement.samples:
        size, stride = format_bytes(sample.span_bytes), format_bytes(sample.stride_bytes)
        rate = format_bytes(round(sample.span_bytes / sample.seconds))
        yield f"  {size} every {stride}, {sample.streams} in flight: {sample.seconds * 1e3:.2f} ms each, {rate}/s"
    if result.measurement.read_bytes:
        yield f"read {format_bytes(result.measurement.read_bytes)} in {result.measurement.seconds:.2f} s"
    if result.why_preset:
        yield f"preset, not measured: {result.why_preset}"
    elif result.fit is not None:
        yield f"the fit ({result.fit.kind}) is off by at most {result.fit.max_error:.0%}"
    yield from _costs(result.model)


def _costs(model: CostModel) -> Iterator[str]:
    node = format_bytes(round(model.node_bandwidth))
    pages = "a page cache" if model.has_page_cache else "no page cache"
    yield f"one more request costs as much as {format_bytes(model.seek_bytes)} with {model.streams} in flight"
    yield f"a node gets {node}/s; {pages}"
    between, rank = (format_bytes(round(rate)) for rate in (model.interconnect_bandwidth, model.rank_bandwidth))
    yield f"not measured, but the preset's: {between}/s between nodes, {rank}/s to a rank"
