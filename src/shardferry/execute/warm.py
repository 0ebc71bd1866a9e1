"""Bring what the ranks of a node will read into its page cache, before they read it.

1. look: what the page cache holds already, and how much more it may take.
2. read: what is missing, by several threads into one reused buffer each; nothing is kept but the kernel's pages.
3. look again: a mount may keep no pages, and pages that do not fit push each other out.

This is the work of one node, done by one process (`warm_node`) or shared by its ranks (`shardferry.execute.warm_job`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from shardferry.errors import InvalidInputError, StorageError
from shardferry.execute.costs import storage_cost
from shardferry.execute.warm_read import Watch, absent_bytes, held_bytes, opened_file, read_shares
from shardferry.execute.warm_report import Look, NodePlan, WarmReport, make_report
from shardferry.plan.warm import FileReads, fit_room, node_wants, plan_warm, share_of
from shardferry.storage.filesystem import filesystem_type
from shardferry.storage.location import locate
from shardferry.storage.room import cache_room
from shardferry.units import KIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardferry.execute.report import Progress
    from shardferry.format.index import CheckpointIndex
    from shardferry.plan.catalogue import Held
    from shardferry.plan.costmodel import CostModel
    from shardferry.plan.load import Wanted

WhenShort = Literal["shrink", "refuse"]

# Where room is short, only such holes are read along as a local disk would read anyway.
SHORT_SEEK_BYTES = 128 * KIB


@dataclass(frozen=True, slots=True)
class WarmRequest:
    """What the caller asked for.

    Attributes:
        cost: What storage costs; None takes what was measured of the mount, or else the preset that suits it.
        when_short: Whether to warm the first part, or to refuse, where the page cache has no room for all.
        on_progress: Called with this process's own progress, from the reading threads.
    """

    cost: CostModel | None
    when_short: WhenShort
    on_progress: Callable[[Progress], None] | None


def warm_node(
    index: CheckpointIndex, job: Mapping[str, Held], ranks: Sequence[int], request: WarmRequest
) -> WarmReport:
    """Warm the page cache of this machine for some ranks of a job, whoever runs them. Not collective.

    Args:
        index: The checkpoint.
        job: Every tensor of the job and who holds it.
        ranks: The ranks that will run on this machine.
        request: How.

    Raises:
        ShardferryError: If a layout cannot be, a file cannot be read, or there is no room and it was not to shrink.
    """
    begin = perf_counter()
    cost = request.cost or storage_cost(index)
    wanted = tuple(node_wants(job, {}, ranks))
    node = plan_node(index, wanted, look_at(index, wanted, cost.seek_bytes, request.when_short))
    watch = Watch(ranks[0], request.on_progress, lambda: None)
    tally = read_shares(index.root, share_of(node.files, 1, 0), num_threads=cost.streams, watch=watch)
    absent = absent_bytes(index.root, node.files)
    seconds = perf_counter() - begin
    return make_report(ranks, node, [tally], absent=absent, seconds=seconds, cost_source=cost.source)


def page_cached_root(path: str) -> str:
    """Return the folder that a checkpoint's file names are relative to.

    Raises:
        InvalidInputError: If it is not on a filesystem: what comes from a server directly is in no page cache.
    """
    where = locate(path)
    if not where.is_local:
        raise InvalidInputError(
            f"{where.root} is no folder of this machine: what is read from it goes through no page cache that could be "
            "warmed. Warm a mount or a copy of it"
        )
    return where.root


def look_at(index: CheckpointIndex, wanted: Sequence[Wanted], seek_bytes: int, when_short: WhenShort) -> Look:
    """Look at the page cache of this machine.

    Args:
        index: The checkpoint, as other ranks see it too.
        wanted: What the ranks of the machine hold.
        seek_bytes: What one more request costs, in bytes.
        when_short: What to do where the page cache has no room.

    Raises:
        StorageError: If a file cannot be opened, or there is no room and it is to be refused.
    """
    same_as = _same_as(index)
    look = _look(index, wanted, same_as, seek_bytes)
    node = plan_node(index, wanted, look)
    if node.left_out_bytes and seek_bytes > SHORT_SEEK_BYTES:
        look = _look(index, wanted, same_as, SHORT_SEEK_BYTES)
        node = plan_node(index, wanted, look)
    if node.left_out_bytes and when_short == "refuse":
        raise StorageError(
            f"there is no room for {format_bytes(node.left_out_bytes)} of what this node's ranks read of {index.root}: "
            f"{look.limit}, so the page cache may take {format_bytes(look.room_bytes)} more. Free memory, raise the "
            'limit, or let it be warmed in part (when_short="shrink", --when-short shrink)'
        )
    return look


def plan_node(index: CheckpointIndex, wanted: Sequence[Wanted], look: Look) -> NodePlan:
    """Return what the ranks of a node read, given what one of them has seen; the same on all of them."""
    files = _planned(index, wanted, look.same_as, look.seek_bytes)
    missing = [file.num_bytes - (there or 0) for file, there in zip(files, look.resident, strict=True)]
    kept, left_out_bytes = fit_room(files, missing, look.room_bytes)
    return NodePlan(kept, look, sum(file.bytes_wanted for file in files), left_out_bytes)


def _same_as(index: CheckpointIndex) -> list[int]:
    first: dict[tuple[int, int], int] = {}
    same_as = []
    for number, file in enumerate(index.files):
        with opened_file(index.root, file) as descriptor:
            found = os.fstat(descriptor)
        same_as.append(first.setdefault((found.st_dev, found.st_ino), number))
    return same_as


def _look(index: CheckpointIndex, wanted: Sequence[Wanted], same_as: list[int], seek_bytes: int) -> Look:
    filesystems: list[str] = []
    resident: list[int | None] = []
    for file in _planned(index, wanted, same_as, seek_bytes):
        with opened_file(index.root, file.file) as descriptor:
            filesystems.append(filesystem_type(descriptor))
            resident.append(held_bytes(descriptor, file))
    room = cache_room()
    # What is there and is to stay is no room, though the kernel could give it up.
    free = max(0, room.num_bytes - min(room.cache_bytes, sum(there or 0 for there in resident)))
    return Look(same_as, seek_bytes, filesystems, resident, free, room.limit)


def _planned(
    index: CheckpointIndex, wanted: Sequence[Wanted], same_as: Sequence[int], seek_bytes: int
) -> tuple[FileReads, ...]:
    identities = dict(zip(index.files, same_as, strict=True))
    return plan_warm(index, wanted, identities=identities, seek_bytes=seek_bytes)
