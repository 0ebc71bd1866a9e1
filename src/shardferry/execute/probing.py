"""Measuring what a path's storage costs: chooses what to read, times it, fits it, and keeps it for later loads.

Where nothing can be measured, or what was measured fits no model, the answer is the preset of the filesystem's type,
with the reason.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardferry.errors import InvalidInputError, StorageError
from shardferry.execute.costs import mount_of_location, preset_of, remember
from shardferry.execute.open import open_checkpoint
from shardferry.plan.costmodel import MAX_SOURCE_LETTERS
from shardferry.plan.fit import MIN_POINTS, Point, fit_points
from shardferry.storage.filesystem import MEMORY_FILESYSTEMS
from shardferry.storage.local import LocalStore
from shardferry.storage.location import locate
from shardferry.storage.probe import (
    MAX_STREAMS,
    Measurement,
    blocks_of_store,
    cold_blocks,
    keeps_pages,
    largest_files,
    measure,
    too_few,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardferry.plan.costmodel import CostModel
    from shardferry.plan.fit import Fit
    from shardferry.storage.base import Store
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
        path: A file, or a folder of which the largest files are read; or the URL of a checkpoint.
        streams: Reads in flight: what all ranks of a node have together.

    Raises:
        InvalidInputError: If `streams` is too large, or it is a URL of an unknown scheme.
        CheckpointError: If a checkpoint at a URL cannot be opened.
        StorageError: If there is nothing at the path, or a read fails.
    """
    if not 1 <= streams <= MAX_STREAMS:
        raise InvalidInputError(f"streams={streams}: a probe reads with 1 to {MAX_STREAMS} streams")
    subject = _subject(path, streams)
    preset = preset_of(subject.mount)
    if subject.why_not:
        return ProbeResult(
            subject.mount, streams, Measurement(), None, subject.why_not, _saying(preset, subject.why_not)
        )
    measurement = measure(subject.store, subject.blocks, streams=streams)
    fit = fit_points([Point(*sample) for sample in measurement.samples])
    why = _why_not(fit, len(measurement.samples))
    if fit is None or why:
        return ProbeResult(subject.mount, streams, measurement, fit, why, _saying(preset, why))
    model = replace(_measured(preset, subject, fit), has_page_cache=_has_page_cache(preset, subject, measurement))
    return ProbeResult(subject.mount, streams, measurement, fit, "", model)


def keep(result: ProbeResult) -> Path | None:
    """Keep a measured model for loads from this mount, and return the file; None if nothing was measured.

    Raises:
        OSError: If it cannot be written.
    """
    return None if result.why_preset else remember(result.mount, result.model)


class _Subject(NamedTuple):
    """What is to be read: `blocks` of the files in `store`, `folder` if they are on this machine; or why nothing is."""

    mount: Mount
    store: Store
    folder: Path | None
    blocks: Sequence[Block]
    why_not: str


def _subject(path: str | os.PathLike[str], streams: int) -> _Subject:
    where = locate(path)
    mount = mount_of_location(where)
    if not where.is_local:
        files = open_checkpoint(path).files  # which files there are, and what they must be
        blocks = blocks_of_store({name: info.size for name, info in files.items()})
        return _Subject(mount, where.open_store(files), None, blocks, too_few(blocks, streams))
    folder = Path(where.root)
    store = LocalStore(folder)
    if mount.type in MEMORY_FILESYSTEMS:
        return _Subject(mount, store, folder, (), f"files of {mount.type} are memory already")
    try:
        files_here = (where.entry,) if where.entry is not None else largest_files(folder)
        blocks, why_not = cold_blocks(folder, files_here, streams=streams)
    except OSError as error:
        raise StorageError(f"cannot look at '{os.fspath(path)}': {error.strerror}") from error
    return _Subject(mount, store, folder, blocks, why_not)


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


def _measured(preset: CostModel, subject: _Subject, fit: Fit) -> CostModel:
    """Return the preset with what was measured in its place; what one node cannot see stays as it is."""
    place = subject.mount.point or subject.mount.source
    return replace(
        preset,
        seek_bytes=fit.seek_bytes,
        stream_bandwidth=fit.bandwidth / fit.streams,
        node_bandwidth=fit.bandwidth,
        shared_bandwidth=max(preset.shared_bandwidth, fit.bandwidth),
        streams=fit.streams,
        source=f"measured {time.strftime('%Y-%m-%d')} on {subject.mount.type} {place}, links of {preset.source}"[
            :MAX_SOURCE_LETTERS
        ],
    )


def _has_page_cache(preset: CostModel, subject: _Subject, measurement: Measurement) -> bool:
    if subject.folder is None or measurement.seen is None:
        return preset.has_page_cache
    place, num_bytes = measurement.seen
    held = keeps_pages(subject.folder / place.file, place.start, num_bytes)
    return preset.has_page_cache if held is None else held


def _saying(preset: CostModel, why: str) -> CostModel:
    return replace(preset, source=f"{preset.source} ({why})"[:MAX_SOURCE_LETTERS])
