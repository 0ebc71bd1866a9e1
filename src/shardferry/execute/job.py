"""One load from start to end, on every rank of a group.

1. open: rank 0 opens and validates the checkpoint, and shares the parsed index and what storage costs it.
2. agree: every rank matches its model with the index; names, shapes, dtypes and layouts are compared over all ranks.
3. plan: every rank plans its copies; where ranks read elsewhere than rank 0, one of them checks that its files are the
   ones rank 0 opened (see `origins`). Where one rank may read for others, all agree how (see `reading`).
4. read: every rank allocates and reads, and exchanges what one has read for several.

Each step succeeds on all ranks or raises on all ranks. Nothing but these small exchanges couples ranks that read for
themselves.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from shardferry.convert.table import describe_rule
from shardferry.errors import InvalidInputError
from shardferry.execute.fill import execute_plan
from shardferry.execute.load import Destination, Settings, Staging
from shardferry.execute.meter import Buffers, Meter
from shardferry.execute.opening import Call, Opened, share_opened
from shardferry.execute.origins import check_files
from shardferry.execute.reading import (
    Reading,
    Sharing,
    View,
    agree_on_estimate,
    agree_on_reading,
    may_share,
    plan_together,
    read_alone,
)
from shardferry.execute.readonce import Rounds, execute_rounds
from shardferry.execute.report import LoadReport, Progress, RankReport, rank_report_from_bytes
from shardferry.execute.topology import read_threads
from shardferry.plan.agreement import (
    Table,
    check_choice,
    choose_layouts,
    contradicted,
    disputed,
    explain,
    hashes_along,
    make_table,
    name_hashes,
    names_in,
    pattern_of,
    raise_contradiction,
    table_from_bytes,
    table_to_bytes,
)
from shardferry.plan.load import LoadPlan, Wanted, plan_load
from shardferry.plan.match import (
    Matching,
    Problems,
    Rules,
    conversions_key,
    match_targets,
    merge_problems,
    natural_key,
    raise_problems,
)
from shardferry.plan.target import Target, region_of
from shardferry.storage.location import locate_again
from shardferry.storage.url import redact
from shardferry.transport.together import together
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from shardferry.format.index import CheckpointIndex
    from shardferry.plan.estimate import Estimate
    from shardferry.storage.base import Store
    from shardferry.transport.base import Group

logger = logging.getLogger(__name__)


# Large enough that a call costs nothing beside its bytes, small enough that threads share a tensor.
PIECE_BYTES = 16 * MIB
# Of a piece that comes through a network, of which a request holds a chunk only: as fast as any (measured: nginx).
REMOTE_PIECE_BYTES = 8 * MIB
# Part of a file's bytes that must be wanted for the rest to be read along with them.
NEARLY_ALL = 0.98
# What one thread may hold of the budget, in pieces: a ring of three, what a cast needs beside it, and a block of rows.
BUFFERS_PER_THREAD = 8


class Adapter(Protocol):
    """What a framework does for a load."""

    @property
    def targets(self) -> Sequence[Target]:
        """What this rank's model offers to be filled."""
        ...

    @property
    def unfilled(self) -> Sequence[str]:
        """Names of memory that no checkpoint fills and nobody has computed yet."""
        ...

    def allocate(self, plan: LoadPlan, meter: Meter) -> Mapping[str, Destination]:
        """Return the memory of every tensor of the plan, made where it does not exist yet."""
        ...

    def staging(self, num_bytes: int, meter: Meter) -> Sequence[Staging]:
        """Return the ring of staging buffers of one reading thread, of `num_bytes` each, counted by the meter.

        At most three; a cast may take as much again.
        """
        ...

    def cast_counts(self) -> tuple[int, int]:
        """Return how many tensors were cast, and how many finite values became infinite by it."""
        ...

    def commit(self) -> None:
        """Put memory that was made into the model; called when every rank has read everything."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """What the caller asked for.

    Attributes:
        path: The checkpoint on this rank.
        strict: Whether missing and unexpected names are an error.
        checkpoint_strict: Whether the file and index rules are applied in full.
        variant: Variant of the file names, e.g. `"fp16"`.
        rules: How names and dtypes are matched.
        given_names: Names for which the caller gave shardings.
        node_of_rank: Node of every rank, instead of the detected one.
        on_progress: Called on every rank with its own progress.
        budget_bytes: Memory this rank may use beside the tensors.
        sharing: How one rank may read for others; None if they have no way to exchange bytes.
    """

    path: str
    strict: bool
    checkpoint_strict: bool
    variant: str | None
    rules: Rules
    given_names: Collection[str]
    node_of_rank: Sequence[int] | None
    on_progress: Callable[[Progress], None] | None
    budget_bytes: int
    sharing: Sharing | None = None


@dataclass(frozen=True, slots=True)
class _Known:
    """What a rank knows once all have agreed."""

    opened: Opened
    matching: Matching
    tables: tuple[Table, ...]


def run_load(group: Group, adapter: Adapter, request: Request) -> LoadReport:
    """Fill the adapter's model. Collective: call on every rank of the group.

    Raises:
        ShardferryError: On every rank, if any rank cannot do its part; nothing was read unless reading failed.
    """
    mine = RankReport(group.rank)
    with mine.timed("open"):
        opened = share_opened(group, _call("load", request))
    index = opened.index
    mine.node = opened.nodes[group.rank]
    with mine.timed("agree"):
        matching, tables = _agree(group, index, adapter, request)
        unfitting = _unfitting(index, tables)
        raise_problems(unfitting, strict=request.strict)
    with mine.timed("plan"):
        known = _Known(opened, matching, tables)
        reading = _plan(group, known, request)
    reports = _read(_Work(group, adapter, reading, index, _wanted_whole(known), opened.origins.nodes, request, mine))
    ignored = tuple(names_in(index, (table.ignored for table in tables)))
    unmatched = tuple(map(describe_rule, matching.unmatched))
    report = LoadReport(
        reports, tuple(unfitting.missing), tuple(unfitting.unexpected), ignored, reading.strategy, unmatched
    )
    if group.rank == 0:
        logger.info(
            "loaded %s: %s bytes on %s ranks", redact(request.path), report.total.bytes_wanted, group.world_size
        )
    return report


def estimate_load(group: Group, adapter: Adapter, request: Request, sharing: Sharing) -> Estimate:
    """Return what each way of reading would cost a load, and which it would take; nothing is read. Collective.

    Raises:
        ShardferryError: On every rank, as `run_load` does before it reads.
    """
    opened = share_opened(group, _call("plan of a load", request))
    matching, tables = _agree(group, opened.index, adapter, request)
    raise_problems(_unfitting(opened.index, tables), strict=request.strict)
    known = _Known(opened, matching, tables)
    if not may_share(opened.nodes, opened.cost, sharing):
        sharing = sharing._replace(read_once="never")
    view = View(opened.index, opened.nodes, opened.cost, sharing)
    return agree_on_estimate(group, view, lambda: _plan_own(group, known, request)).estimate


def _call(what: str, request: Request) -> Call:
    """Return what all ranks have to ask alike."""
    options: dict[str, object] = {
        "strict": request.strict,
        "cast": request.rules.cast,
        "ignore_mismatched_sizes": request.rules.skip_mismatched,
        "conversions": conversions_key(request.rules.conversions),
    }
    if request.sharing is not None:
        options["read_once"] = request.sharing.read_once
        if request.sharing.read_once != "never":
            options["exchange_bytes (at most budget_bytes)"] = request.sharing.exchange_bytes
    return Call(what, request.path, request.checkpoint_strict, request.variant, request.node_of_rank, options)


def _agree(
    group: Group, index: CheckpointIndex, adapter: Adapter, request: Request
) -> tuple[Matching, tuple[Table, ...]]:
    """Match the model with the index; return that, and what every rank has to say of its own."""
    matched: list[Matching] = []

    def work() -> bytes:
        check_given_names(index, adapter.targets, request.given_names)
        matched.append(match_targets(index, adapter.targets, request.rules))
        matched[0].problems.unfilled.extend(adapter.unfilled)
        return table_to_bytes(make_table(index, matched[0], group.rank, group.world_size))

    tables = tuple(table_from_bytes(data) for data in together(group, "compare models", work))
    _check_agreement(group, [match.target for match in matched[0].matches], tables)
    return matched[0], tables


def check_given_names(index: CheckpointIndex, targets: Sequence[Target], given: Collection[str]) -> None:
    """Refuse a name nobody has: a typing error would leave a tensor with the layout it should not be trusted with.

    Another rank's model may have a name that this one's lacks, but then the checkpoint has it too.
    """
    known = {name for target in targets for name in target.names}
    unknown = sorted(name for name in given if name not in known and name not in index.tensors)
    if unknown:
        message = f"shardings= names {', '.join(unknown)}, which neither the model nor the checkpoint has"
        raise InvalidInputError(message)


def _check_agreement(group: Group, targets: Sequence[Target], tables: Sequence[Table]) -> None:
    patterns = disputed(tables)
    if not patterns:
        return
    told = hashes_along(tables) or group.exchange("compare names", name_hashes(targets, patterns))
    hashes = contradicted(told)
    if hashes:
        raise_contradiction(group.exchange("explain a disagreement", explain(targets, hashes)))


def _unfitting(index: CheckpointIndex, tables: Sequence[Table]) -> Problems:
    merged = merge_problems([table.problems for table in tables])
    known = set(names_in(index, (bits for table in tables for bits in (table.used, table.ignored))))
    merged.unexpected = sorted((name for name in index.tensors if name not in known), key=natural_key)
    return merged


def _plan(group: Group, known: _Known, request: Request) -> Reading:
    opened = known.opened
    make_plan = partial(_plan_own, group, known, request)
    if request.sharing is not None and may_share(opened.nodes, opened.cost, request.sharing):
        view = View(opened.index, opened.nodes, opened.cost, request.sharing)
        return agree_on_reading(group, view, make_plan)
    # Where nobody checks, rank 0 has looked at the files; an error here still reaches all ranks, when they read.
    plan = plan_together(group, make_plan) if opened.origins.has_checker() else make_plan()
    return read_alone(plan, request.sharing)


def _plan_own(group: Group, known: _Known, request: Request) -> LoadPlan:
    """Return what this rank would read by itself, after a look at the files it would read it from."""
    index, origins = known.opened.index, known.opened.origins
    plan = plan_load(index, _wanted(known, group.rank), known.opened.cost.seek_bytes)
    if origins.is_checker(group.rank):
        used = names_in(index, (known.tables[peer].used for peer in origins.peers(group.rank)))
        files = sorted({file for name in used for file in index.tensors[name].files})
        check_files(origins, group.rank, request.path, index, files, timeout_s=group.timeout_s)
    return plan


def _wanted(known: _Known, rank: int) -> Iterator[Wanted]:
    fitting = choose_layouts(known.tables)
    for target, source, _ in known.matching.matches:
        layout = None
        if target.layouts:
            layout = target.layouts[check_choice(target, fitting[pattern_of(target)], rank)]
        region = region_of(layout, source.shape, rank)
        if region is not None:
            yield Wanted(target.name, source, region)


def _wanted_whole(known: _Known) -> frozenset[str]:
    """Return the files of which the ranks of this node want all, or nearly: of those a node that is the only one.

    Whatever the layouts, all ranks together hold every byte of a tensor that any of them uses.
    """
    index = known.opened.index
    if len(set(known.opened.nodes)) > 1:
        return frozenset()
    wanted: Counter[str] = Counter()
    for name in names_in(index, (table.used for table in known.tables)):
        info = index.tensors[name]
        for part in info.parts or (info,):
            wanted[part.file] += part.span[1] - part.span[0]
    return frozenset(
        file
        for file, num_bytes in wanted.items()
        if num_bytes >= NEARLY_ALL * (index.files[file].size - index.files[file].header_bytes)
    )


class _Work(NamedTuple):
    group: Group
    adapter: Adapter
    reading: Reading
    checkpoint: CheckpointIndex
    wanted_whole: frozenset[str]
    nodes: Sequence[int]
    request: Request
    mine: RankReport


def _read(work: _Work) -> tuple[RankReport, ...]:
    meter = Meter(work.request.budget_bytes)
    plan = work.reading.plan

    def read() -> bytes:
        with work.mine.timed("allocate"):
            destinations = work.adapter.allocate(plan, meter)
        where = locate_again(work.request.path, work.checkpoint.root, timeout_s=work.group.timeout_s)
        store = where.open_store(work.checkpoint.files, work.wanted_whole)
        threads = read_threads(work.nodes, work.group.rank, is_local=where.is_local)
        most = work.request.budget_bytes // (threads * BUFFERS_PER_THREAD)
        if not where.is_local and _is_direct(plan, destinations):
            most = REMOTE_PIECE_BYTES
        piece_bytes = _piece_bytes(plan, threads, most)
        settings = Settings(
            num_threads=threads,
            piece_bytes=piece_bytes,
            staging=lambda: work.adapter.staging(piece_bytes, meter),
            on_bytes=_Counter(work.mine, plan.bytes_wanted, work.request.on_progress),
            check=work.group.check,
        )
        exchange = work.reading.exchange
        if exchange is not None:
            with work.mine.timed("exchange"):
                _exchange(work, destinations, store, settings, Buffers(meter))
        with work.mine.timed("read"):
            execute_plan(
                plan if exchange is None else exchange.plan.direct, destinations, store, work.checkpoint.files, settings
            )
        work.mine.num_tensors = len(plan.tensors)
        work.mine.peak_extra_bytes = meter.peak_bytes
        work.mine.num_cast, work.mine.num_overflowed = work.adapter.cast_counts()
        return work.mine.to_bytes()

    told = together(work.group, "read tensors", read)
    work.adapter.commit()
    return tuple(rank_report_from_bytes(data) for data in told)


def _exchange(
    work: _Work, destinations: Mapping[str, Destination], store: Store, settings: Settings, buffers: Buffers
) -> None:
    """Read and exchange what several ranks want."""
    exchange, sharing = work.reading.exchange, work.request.sharing
    assert exchange is not None
    assert sharing is not None
    opened = sharing.mover(work.group.check) if exchange.is_needed else nullcontext()
    rounds = Rounds(exchange.plan, exchange.units, work.group.rank, work.group.world_size, store, work.checkpoint.files)
    with opened as mover:
        moved = execute_rounds(rounds, destinations, settings, buffers, mover)
    buffers.release()
    work.mine.bytes_sent, work.mine.bytes_received = moved


def _is_direct(plan: LoadPlan, destinations: Mapping[str, Destination]) -> bool:
    """Return whether everything is read to where it belongs, so that pieces take nothing of the budget."""
    return all(
        not tensor.computations and all(destinations[tensor.name].direct(copy) is not None for copy in tensor.copies)
        for tensor in plan.tensors
    )


def _piece_bytes(plan: LoadPlan, num_threads: int, most: int) -> int:
    """Return what is read at a time: no more than there is, nor so much that a thread has nothing to do."""
    largest = max((copy.num_bytes for tensor in plan.tensors for copy in tensor.all_copies()), default=1)
    return min(PIECE_BYTES, most, max(largest, -(-plan.bytes_wanted // num_threads)))


class _Counter:
    """Adds what reads did to the report and tells the caller."""

    def __init__(self, mine: RankReport, total: int, on_progress: Callable[[Progress], None] | None) -> None:
        self._mine = mine
        self._total = total
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def __call__(self, wanted: int, read: int, requests: int) -> None:
        with self._lock:
            self._mine.bytes_wanted += wanted
            self._mine.bytes_read += read
            self._mine.requests += requests
            if self._on_progress is not None:
                self._on_progress(Progress(self._mine.rank, self._mine.bytes_wanted, self._total))
