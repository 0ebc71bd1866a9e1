"""What a warm-up did, and what came of it in words."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardferry.storage.filesystem import MEMORY_FILESYSTEMS
from shardferry.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardferry.plan.warm import FileReads


@dataclass(frozen=True, slots=True)
class WarmedFile:
    """What was done about one file.

    Attributes:
        file: Name relative to the checkpoint's root.
        filesystem: What it lies on, e.g. `"nfs4"`.
        strategy: `"spans"`: what is wanted only; `"bridged"`: with small holes; `"whole"`: all of it.
        why: The costs that decided.
        bytes_wanted: Bytes that the node's ranks will read, each counted once.
        bytes_planned: Bytes to have in the page cache: with holes, or the whole file.
        bytes_resident: Of these, what was there already; None where the kernel does not tell.
    """

    file: str
    filesystem: str
    strategy: str
    why: str
    bytes_wanted: int
    bytes_planned: int
    bytes_resident: int | None


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What a warm-up did for one node.

    Attributes:
        ranks: The ranks of the node.
        files: What was done about each file that they read, first files first; without those there was no room for.
        bytes_wanted: Bytes that these ranks will read, each counted once.
        bytes_planned: Bytes to have in the page cache, as the strategies say.
        bytes_resident: Of these, what was there already, as far as the kernel tells.
        bytes_left_out: Bytes that there was no room for; not among the planned ones.
        bytes_read: Bytes fetched from storage.
        bytes_absent: Planned bytes that are not in the page cache after all was read; None where the kernel does not
            tell.
        requests: Calls that fetched them.
        seconds: Wall seconds, from the first look to the last.
        room_bytes: What the page cache could still take before.
        cost_source: Where the numbers come from that strategies were chosen with.
        useful: Whether the load that follows has less to fetch for it.
        why: What came of it, in words.
    """

    ranks: tuple[int, ...]
    files: tuple[WarmedFile, ...]
    bytes_wanted: int
    bytes_planned: int
    bytes_resident: int
    bytes_left_out: int
    bytes_read: int
    bytes_absent: int | None
    requests: int
    seconds: float
    room_bytes: int
    cost_source: str
    useful: bool
    why: str

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(asdict(self), indent=2)


class Look(NamedTuple):
    """What a node's page cache holds before a warm-up, and how much more it may take; plain data for other ranks.

    Attributes:
        same_as: Per file of the index, the number of the first that has the same bytes.
        seek_bytes: What the reads are planned with.
        filesystems: Per file of the plan, what it lies on.
        resident: Per file of the plan, bytes of its spans that are there; None where the kernel does not tell.
        room_bytes: What the cache can still take.
        limit: What sets that, in words.
    """

    same_as: list[int]
    seek_bytes: int
    filesystems: list[str]
    resident: list[int | None]
    room_bytes: int
    limit: str


class NodePlan(NamedTuple):
    """What a node reads: what was planned, and what of that there is room for."""

    files: tuple[FileReads, ...]
    look: Look
    wanted_bytes: int
    left_out_bytes: int


class Tally(NamedTuple):
    """What a process has read; `kept` is false if that is not in the page cache."""

    num_bytes: int
    requests: int
    kept: bool


def make_report(
    ranks: Sequence[int],
    node: NodePlan,
    tallies: Sequence[Tally],
    *,
    absent: int | None,
    seconds: float,
    cost_source: str,
) -> WarmReport:
    """Return what a node was warmed with, from what each of its processes did."""
    look, files = node.look, node.files
    seen = list(zip(files, look.filesystems, look.resident, strict=False))  # files left out are the last
    num_bytes = sum(tally.num_bytes for tally in tallies)
    planned, resident = sum(file.num_bytes for file in files), sum(min(f.num_bytes, r or 0) for f, _, r in seen)
    useful, why = _verdict(node, num_bytes, absent, kept=all(tally.kept for tally in tallies))
    return WarmReport(
        ranks=tuple(ranks),
        files=tuple(
            WarmedFile(file.file, kind, file.strategy, file.why, file.bytes_wanted, file.num_bytes, there)
            for file, kind, there in seen
        ),
        bytes_wanted=node.wanted_bytes,
        bytes_planned=planned,
        bytes_resident=resident,
        bytes_left_out=node.left_out_bytes,
        bytes_read=num_bytes,
        bytes_absent=absent,
        requests=sum(tally.requests for tally in tallies),
        seconds=seconds,
        room_bytes=look.room_bytes,
        cost_source=cost_source,
        useful=useful,
        why=why,
    )


def _verdict(node: NodePlan, num_bytes: int, absent: int | None, *, kept: bool) -> tuple[bool, str]:
    """Return whether warming has helped, and what came of it."""
    look = node.look
    planned = sum(file.num_bytes for file in node.files)
    if not kept or (planned and absent == planned and planned <= look.room_bytes):
        kinds = ", ".join(sorted(set(look.filesystems)))
        return False, f"useless: this mount ({kinds}) keeps nothing that was read in the page cache"
    if node.files and set(look.filesystems) <= MEMORY_FILESYSTEMS:
        return False, f"useless: the files lie in memory ({look.filesystems[0]})"
    words = []
    if node.left_out_bytes:
        words.append(
            f"{format_bytes(node.left_out_bytes)} left out: {look.limit}, so the page cache may take "
            f"{format_bytes(look.room_bytes)} more"
        )
    if absent:
        words.append(f"{format_bytes(absent)} have left the page cache again, for want of memory")
    if not num_bytes and not words:
        return False, "useless: all of it is in the page cache already"
    if absent is None:
        words.append("read; the kernel tells only the owner of a file what the page cache holds of it")
    return num_bytes > (absent or 0), "; ".join(words) or "all of it is in the page cache"
