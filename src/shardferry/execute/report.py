"""What a load or a save did: measured, per rank and in total."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank's load is; handed to `on_progress` after every read.

    Attributes:
        rank: The rank that reports; every rank calls its own callback.
        bytes_done: Bytes that have landed in tensors, or in files.
        bytes_total: Bytes this rank wants, or writes.
    """

    rank: int
    bytes_done: int
    bytes_total: int


@dataclass(slots=True)
class RankReport:
    """What one rank did.

    Attributes:
        rank: The rank.
        node: Which node it ran on, counted from 0 in rank order.
        bytes_wanted: Bytes that landed in its tensors, as stored.
        bytes_read: Bytes fetched from files, by reads or out of the page cache; more than wanted where whole rows
            were read.
        bytes_sent: Bytes it read for other ranks and sent to them, once per receiver.
        bytes_received: Bytes other ranks read for it.
        bytes_written: Bytes of tensors written to files.
        requests: Calls made to storage.
        seconds: Wall seconds by phase; `"wait"` is time spent waiting for other ranks.
        peak_extra_bytes: Most memory held at one time beside the tensors themselves.
        num_tensors: Tensors of which this rank holds a part.
        num_cast: Tensors whose dtype was cast to the model's.
        num_overflowed: Finite values that became infinite in a cast.
    """

    rank: int
    node: int = 0
    bytes_wanted: int = 0
    bytes_read: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_written: int = 0
    requests: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    peak_extra_bytes: int = 0
    num_tensors: int = 0
    num_cast: int = 0
    num_overflowed: int = 0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time the context takes to a phase."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + perf_counter() - start

    def to_bytes(self) -> bytes:
        """Return the report for other ranks to decode."""
        return json.dumps(asdict(self)).encode()


def rank_report_from_bytes(data: bytes) -> RankReport:
    """Return the report that `RankReport.to_bytes` encoded."""
    return RankReport(**json.loads(data))


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did on every rank.

    Attributes:
        ranks: One report per rank, in rank order.
        missing: Names the model wants and the checkpoint lacks; only with `strict=False`.
        unexpected: Names of the checkpoint no rank wants; only with `strict=False`.
        ignored: Names of the checkpoint that are not loaded on purpose: non-persistent buffers of the model, names
            its own patterns exclude, and other names of a tied tensor.
        strategy: How the bytes were read, and why.
        unmatched_rules: Conversion rules that have changed no name of the checkpoint.
    """

    ranks: tuple[RankReport, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    ignored: tuple[str, ...]
    strategy: str
    unmatched_rules: tuple[str, ...] = ()

    @property
    def total(self) -> RankReport:
        """The sum over ranks; seconds and peak memory are the largest of any rank. Its rank is -1."""
        return sum_reports(self.ranks)

    def to_json(self) -> str:
        """Return everything as JSON, the total included."""
        return json.dumps({**asdict(self), "total": asdict(self.total)}, indent=2)


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did on every rank.

    Attributes:
        ranks: One report per rank, in rank order.
        files: The weight files, by name.
        strategy: How the bytes got into them, and why.
        protocol: How they were published; see the explanation of publishing.
        warnings: What is odd about the result, a sentence each.
        unmatched_rules: Conversion rules that have changed none of the model's tensors.
    """

    ranks: tuple[RankReport, ...]
    files: tuple[str, ...]
    strategy: str
    protocol: str
    warnings: tuple[str, ...]
    unmatched_rules: tuple[str, ...] = ()

    @property
    def total(self) -> RankReport:
        """The sum over ranks; seconds and peak memory are the largest of any rank. Its rank is -1."""
        return sum_reports(self.ranks)

    def to_json(self) -> str:
        """Return everything as JSON, the total included."""
        return json.dumps({**asdict(self), "total": asdict(self.total)}, indent=2)


def sum_reports(reports: Sequence[RankReport]) -> RankReport:
    """Return the sum of the reports; seconds and peak memory are the largest of any."""
    phases = dict.fromkeys(phase for report in reports for phase in report.seconds)
    return RankReport(
        rank=-1,
        node=-1,
        bytes_wanted=sum(report.bytes_wanted for report in reports),
        bytes_read=sum(report.bytes_read for report in reports),
        bytes_sent=sum(report.bytes_sent for report in reports),
        bytes_received=sum(report.bytes_received for report in reports),
        bytes_written=sum(report.bytes_written for report in reports),
        requests=sum(report.requests for report in reports),
        seconds={phase: max(report.seconds.get(phase, 0.0) for report in reports) for phase in phases},
        peak_extra_bytes=max((report.peak_extra_bytes for report in reports), default=0),
        num_tensors=sum(report.num_tensors for report in reports),
        num_cast=sum(report.num_cast for report in reports),
        num_overflowed=sum(report.num_overflowed for report in reports),
    )
