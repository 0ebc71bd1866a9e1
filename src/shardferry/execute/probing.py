"""Measuring what a path's storage costs: chooses what to read, times it, fits it, and keeps it for later loads.

Where nothing can be measured, or what was measured fits no model, the answer is the preset of the filesystem's type,
with the reason.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardferry.errors import InvalidInputError, StorageError
from shardferry.execute.costs import mount_below, preset_of, remember
from shardferry.plan.fit import MIN_POINTS, Point, fit_points
from shardferry.storage.filesystem import MEMORY_FILESYSTEMS
from shardferry.storage.local import LocalStore
from shardferry.storage.probe import (
    MAX_STREAMS,
    Measurement,
    cold_blocks,
    keeps_pages,
    largest_files,
    measure,
)

if TYPE_CHECKING:
    import os

    from shardferry.plan.costmodel import CostModel
    from shardferry.plan.fit import Fit
    from shardferry.storage.filesystem import Mount
    from shardferry.storage.probe import Block


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe found.

    Attributes:
        mount: Where the path lies.
        streams: Reads in flight.
        measurement: What was read, and how long it took.
        fit: How requests and bytes add up; None if that cannot be told.
        why_preset: Why `model` is the preset of the filesystem's type; empty if it is what was measured.
        model: What loads from here on reckon with.
    """

    mount: Mount
    streams: int
    measurement: Measurement
    fit: Fit | None
    why_preset: str
    model: CostModel


def probe_storage(path: str | os.PathLike[str], *, streams: int) -> ProbeResult:
    """Measure the storage below a path, in less than 2 s and 200 MB.

    Args:
        path: A file, or a folder of which the largest files are read.
        streams: Reads in flight: what all ranks of a node have together.

    Raises:
        InvalidInputError: If `streams` is too large.
        StorageError: If there is nothing at the path, or a read fails.
    """
    if not 1 <= streams <= MAX_STREAMS:
        raise InvalidInputError(f"streams={streams}: a probe reads with 1 to {MAX_STREAMS} streams")
    where = Path(path).absolute()
    mount = mount_below(where)
    try:
        root, files = (where, largest_files(where)) if where.is_dir() else (where.parent, (where.name,))
        blocks, why = _readable(mount, root, files, streams)
    except OSError as error:
        raise StorageError(f"cannot look at '{where}': {error.strerror}") from error
    if why:
        return ProbeResult(mount, streams, Measurement(), None, why, _instead(mount, why))
    measurement = measure(LocalStore(root), blocks, streams=streams)
    fit = fit_points([Point(*sample) for sample in measurement.samples])
    why = _why_not(fit, len(measurement.samples))
    if fit is None or why:
        return ProbeResult(mount, streams, measurement, fit, why, _instead(mount, why))
    return ProbeResult(mount, streams, measurement, fit, "", _measured(mount, root, measurement, fit))


def keep(result: ProbeResult) -> Path | None:
    """Keep a measured model for loads from this mount, and return the file; None if nothing was measured.

    Raises:
        OSError: If it cannot be written.
    """
    return None if result.why_preset else remember(result.mount, result.model)


def _readable(mount: Mount, root: Path, files: tuple[str, ...], streams: int) -> tuple[list[Block], str]:
    if mount.type in MEMORY_FILESYSTEMS:
        return [], f"files of {mount.type} are memory already"
    return cold_blocks(root, files, streams=streams)


def _why_not(fit: Fit | None, num_points: int) -> str:
    if num_points < MIN_POINTS:
        return f"the storage is too slow for {MIN_POINTS} sizes of reads in 2 s"
    if fit is None:
        return "long reads take no longer than short ones: the bandwidth was not reached"
    if not fit.holds:
        return (
            f"the reads fit no model: the best is off by {fit.max_error:.0%}. Something else may be reading; try again"
        )
    return ""


def _measured(mount: Mount, root: Path, measurement: Measurement, fit: Fit) -> CostModel:
    """Return the preset with what was measured in its place; what one node cannot see stays as it is."""
    preset = preset_of(mount)
    pages = None
    if measurement.seen is not None:
        place, num_bytes = measurement.seen
        pages = keeps_pages(root / place.file, place.start, num_bytes)
    return replace(
        preset,
        seek_bytes=fit.seek_bytes,
        stream_bandwidth=fit.bandwidth / fit.streams,
        node_bandwidth=fit.bandwidth,
        shared_bandwidth=max(preset.shared_bandwidth, fit.bandwidth),
        streams=fit.streams,
        has_page_cache=preset.has_page_cache if pages is None else pages,
        source=f"measured {time.strftime('%Y-%m-%d')} on {mount.type} {mount.point}"[:400],
    )


def _instead(mount: Mount, why: str) -> CostModel:
    preset = preset_of(mount)
    return replace(preset, source=f"{preset.source} ({why})"[:400])
