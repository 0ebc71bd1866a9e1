"""One save from start to end, on every rank of a group.

1. compare: ranks tell the patterns of their tensors, the path, and the options, rank 0 what the storage costs; then one
   of each kind sends names, and every rank knows the whole model and lays out the files.
2. check: copies that must be equal are compared by their hashes.
3. stage: rank 0 looks at the target, refuses or goes on, and creates the files with their headers.
4. write: every rank writes its own bytes and syncs them.
5. publish: the staged files become the checkpoint, all at once.

Each step succeeds on all ranks or raises on all ranks, and what was staged is removed if it fails.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from shardferry.errors import InvalidInputError, ShardingError
from shardferry.execute.computing import Tools, compute_tensors
from shardferry.execute.costs import target_cost
from shardferry.execute.exchange import Exchange, execute_exchange
from shardferry.execute.meter import Buffers, Meter
from shardferry.execute.options import check_alike
from shardferry.execute.publishing import Staging, stage
from shardferry.execute.report import Progress, RankReport, SaveReport, rank_report_from_bytes
from shardferry.execute.save import Source, WriteSettings, execute_writes
from shardferry.execute.topology import nodes_of
from shardferry.execute.uploading import Uploading
from shardferry.format.problem import listed, shown
from shardferry.format.writer import TensorSpec
from shardferry.plan.catalogue import (
    Held,
    inventory_to_bytes,
    make_catalogue,
    names_to_bytes,
    replica_names,
    spokesmen,
)
from shardferry.plan.costmodel import cost_model_from_json, cost_model_to_json
from shardferry.plan.exchange import choose_exchange, plan_rounds
from shardferry.plan.match import FLOATS, conversions_key
from shardferry.plan.packing import PLAIN, CheckpointLayout, lay_out_checkpoint
from shardferry.plan.save import plan_save
from shardferry.plan.streams import plan_owners, plan_streams
from shardferry.plan.target import region_of
from shardferry.plan.unconvert import unconvert
from shardferry.storage.location import is_remote, local_path
from shardferry.storage.url import redact
from shardferry.transport.solo import SoloMover
from shardferry.transport.together import together
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardferry.convert.rules import Rule
    from shardferry.convert.table import Conversions
    from shardferry.format.oldfiles import Naming
    from shardferry.plan.costmodel import CostModel
    from shardferry.plan.save import Write
    from shardferry.plan.target import Target
    from shardferry.plan.unconvert import Made
    from shardferry.storage.base import Bytes
    from shardferry.transport.base import Group
    from shardferry.transport.bulk import Mover

logger = logging.getLogger(__name__)

# Large enough that a call costs nothing beside its bytes.
PIECE_BYTES = 16 * MIB
# A box of an exchange, which its owner writes with one call.
BOX_BYTES = 8 * MIB
# What an owner takes in a round of a save to an object store: two parts of an upload.
ROUND_BYTES = 16 * MIB
# What a round holds at most: a box, what is sent, what is received, and what a cast gathers beside it.
BUFFERS_PER_BOX = 8
# Beyond this budget no box and no round grows, so ranks may have any.
MOST_THAT_COUNTS_BYTES = BUFFERS_PER_BOX * max(BOX_BYTES, ROUND_BYTES)
DIGEST_BYTES = 8
UPLOADED = "exchange: an object store takes a file as parts from one sender, so every file has a rank that sends it"


class SaveAdapter(Protocol):
    """What a framework does for a save."""

    @property
    def targets(self) -> Sequence[Target]:
        """What this rank holds, each with a global shape."""
        ...

    def source(self, name: str) -> Source:
        """Return the memory of a tensor of this rank."""
        ...

    def made_source(self, data: Bytes, dtype: str, shape: tuple[int, ...]) -> Source:
        """Return a tensor that was computed, given as its bytes, as the memory of one of this rank."""
        ...

    def content(self, name: str) -> Bytes:
        """Return a tensor's bytes in logical order, to be hashed."""
        ...

    def mover(self, check: Callable[[], None]) -> AbstractContextManager[Mover]:
        """Return what moves bytes between the ranks; `check` is called while it waits. Collective."""
        ...

    def write_extras(self, folder: Path) -> None:
        """Write what belongs beside the weights into an empty folder; called on rank 0 only."""
        ...


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What the caller asked for.

    Attributes:
        path: Where the checkpoint is to be, on this rank.
        max_shard_bytes: Most tensor bytes of a file that holds several tensors.
        on_existing: What to do about a checkpoint that is there.
        dtype: safetensors dtype in which floating tensors are written; None keeps each one's own.
        replicas: Whether copies declared equal are believed or compared.
        given_names: Names for which the caller gave shardings, but for those this rank itself has.
        conversions: Rules that lead from the checkpoint's names and shapes to the model's; undone here.
        metadata: `__metadata__` of every file.
        files_like: File of each name in a checkpoint whose assignment is kept.
        hub_limits: Whether an index that the Hub's tools refuse is an error.
        on_progress: Called on every rank with its own progress.
        budget_bytes: Memory this rank may use beside the tensors.
        naming: How the files are called.
    """

    path: str
    max_shard_bytes: int
    on_existing: Literal["refuse", "replace"]
    dtype: str | None
    replicas: Literal["trust", "check"]
    given_names: Collection[str]
    conversions: tuple[Rule, ...] | Conversions
    metadata: Mapping[str, str]
    files_like: Mapping[str, str] | None
    hub_limits: bool
    on_progress: Callable[[Progress], None] | None
    budget_bytes: int
    naming: Naming = PLAIN


class _Model(NamedTuple):
    """What every rank knows once all have told.

    Attributes:
        held: Every tensor of the job, by the model's name.
        catalogue: Every tensor to write, by the name it is written under.
        made: What has to be computed for them first.
        dtypes: The dtype each is written in.
        layout: How they are laid out over files.
        unmatched: Conversion rules that change none.
        cost: The storage that is written to, as rank 0 sees it; None for an object store, where it decides nothing.
    """

    held: Mapping[str, Held]
    catalogue: Mapping[str, Held]
    made: Mapping[str, Made]
    dtypes: Mapping[str, str]
    layout: CheckpointLayout
    unmatched: tuple[str, ...]
    cost: CostModel | None


class _Plan(NamedTuple):
    """What one rank does.

    Attributes:
        writes: What it writes by itself.
        exchange: What is written after an exchange.
        strategy: Why so, in words.
    """

    writes: tuple[Write, ...]
    exchange: Exchange
    strategy: str


class _Work(NamedTuple):
    group: Group
    adapter: SaveAdapter
    made: Mapping[str, Made]
    plan: _Plan
    staging: Staging | Uploading
    request: SaveRequest
    mine: RankReport


def run_save(group: Group, adapter: SaveAdapter, request: SaveRequest) -> SaveReport:
    """Save what the ranks hold as one checkpoint. Collective: call on every rank of the group.

    Raises:
        ShardferryError: On every rank, if any rank cannot do its part; nothing was published.
    """
    mine = RankReport(group.rank)
    with mine.timed("compare"):
        model = _compare(group, adapter, request)
    with mine.timed("check"):
        _check_replicas(group, adapter, model.held, request)
    with mine.timed("stage"):
        plan, staging = _stage(group, adapter, model, request)
    with staging.released():
        reports = _write(_Work(group, adapter, model.made, plan, staging, request, mine))
        with mine.timed("publish"):
            staging.publish()
    files = tuple(file.name for file in model.layout.files)
    reports = (*reports[: group.rank], mine, *reports[group.rank + 1 :])  # others' time to publish is not known here
    remarks = (*model.layout.warnings, *staging.remarks)
    report = SaveReport(reports, files, plan.strategy, staging.protocol, remarks, model.unmatched)
    if group.rank == 0:
        logger.info(
            "saved %s: %s bytes from %s ranks", redact(request.path), report.total.bytes_written, group.world_size
        )
    return report


def _compare(group: Group, adapter: SaveAdapter, request: SaveRequest) -> _Model:
    remote = is_remote(request.path)
    where = redact(request.path) if remote else os.path.abspath(local_path(request.path))  # noqa: PTH100 - links stay

    def tell() -> bytes:
        inventory = inventory_to_bytes(adapter.targets, group.rank).decode()
        cost = None if group.rank or remote else cost_model_to_json(target_cost(where))
        return json.dumps([where, _options(request), sorted(request.given_names), inventory, cost]).encode()

    told = [json.loads(data) for data in together(group, "compare what to save", tell)]
    _check_paths([path for path, *_ in told])
    check_alike([options for _, options, *_ in told], "save")
    inventories = [inventory.encode() for *_, inventory, _ in told]
    *_, cost = told[0]
    cost = cost and cost_model_from_json(json.dumps(cost).encode(), "rank 0's cost model")
    speaks = any(ranks[0] == group.rank for ranks in spokesmen(inventories).values())
    names = group.exchange("share names", names_to_bytes(adapter.targets) if speaks else b"")
    held = make_catalogue(inventories, names)
    _check_given_names({name for _, _, given, *_ in told for name in given}, held)
    catalogue, made, unmatched = unconvert(held, request.conversions) if request.conversions else (held, {}, ())
    dtypes = {name: _written_dtype(held.dtype, request.dtype) for name, held in catalogue.items()}
    layout = lay_out_checkpoint(
        {name: TensorSpec(dtypes[name], held.shape) for name, held in catalogue.items()},
        max_shard_bytes=request.max_shard_bytes,
        metadata=request.metadata,
        files_like=request.files_like,
        hub_limits=request.hub_limits,
        naming=request.naming,
    )
    return _Model(held, catalogue, made, dtypes, layout, unmatched, cost)


def _options(request: SaveRequest) -> dict[str, object]:
    """Return what ranks must give alike, for they lay out the files and the exchange from it, each by itself."""
    like = request.files_like
    return {
        "max_shard_size": request.max_shard_bytes,
        "on_existing": request.on_existing,
        "dtype": request.dtype,
        "replicas": request.replicas,
        "metadata": dict(request.metadata),
        "conversions": conversions_key(request.conversions),
        "files_like": like and blake2b(json.dumps(sorted(like.items())).encode()).hexdigest(),
        "hub_limits": request.hub_limits,
        "stem": request.naming.stem,
        "budget_bytes": min(request.budget_bytes, MOST_THAT_COUNTS_BYTES),
    }


def _check_paths(paths: Sequence[str]) -> None:
    for rank, path in enumerate(paths):
        if path != paths[0]:
            message = (
                f"ranks save to different places: rank 0 to {shown(paths[0])}, rank {rank} to {shown(path)}. "
                "Give every rank the same absolute path: a relative one begins at each rank's own working directory"
            )
            raise InvalidInputError(message)


def _check_given_names(given: Collection[str], catalogue: Mapping[str, Held]) -> None:
    """Refuse a name nobody has: a typing error would leave a tensor with the layout it should not be trusted with."""
    unknown = sorted(name for name in given if name not in catalogue)
    if unknown:
        raise InvalidInputError(f"shardings= names {listed(unknown, 5)}, which no rank has")


def _written_dtype(dtype: str, asked: str | None) -> str:
    return asked if asked is not None and dtype in FLOATS else dtype


def _check_replicas(group: Group, adapter: SaveAdapter, catalogue: Mapping[str, Held], request: SaveRequest) -> None:
    """Compare, by hash, the copies of tensors nobody declared to be replicated, and of declared ones when asked."""
    declared = request.replicas == "check"
    if not any(len(held.ranks) > 1 and (declared or held.layout is None) for held in catalogue.values()):
        return
    names = replica_names(catalogue, group.rank, check_declared=declared)

    def digest() -> bytes:
        return b"".join(_digest(adapter.content(name)) for name in names)

    told = together(group, "compare replicas", digest)
    seen: dict[tuple[str, object], tuple[int, bytes]] = {}
    for rank, data in enumerate(told):
        for at, name in enumerate(replica_names(catalogue, rank, check_declared=declared)):
            held = catalogue[name]
            value = data[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
            first_rank, first = seen.setdefault((name, _copy_of(held, rank)), (rank, value))
            if first != value:
                kind = "is a plain tensor" if held.layout is None else "is declared replicated"
                message = (
                    f"{name} {kind}, but ranks {first_rank} and {rank} hold different bytes of it. If every rank holds "
                    "its own part, say so with shardings=; if copies have drifted apart, make them equal before saving"
                )
                raise ShardingError(message)


def _copy_of(held: Held, rank: int) -> object:
    """Return what ranks that hold the same elements have in common."""
    return None if held.layout is None else region_of(held.layout, held.shape, rank)


def _digest(content: Bytes) -> bytes:
    return blake2b(content.data, digest_size=DIGEST_BYTES).digest()


def _stage(
    group: Group, adapter: SaveAdapter, model: _Model, request: SaveRequest
) -> tuple[_Plan, Staging | Uploading]:
    """Plan what this rank writes, and make ready what it writes to. Collective."""
    if model.cost is not None:
        plan = _plan(group, model, request, model.cost)
        path = local_path(request.path)
        return plan, stage(group, path, model.layout, request.on_existing, adapter.write_extras)
    owners = plan_owners(model.layout.files, group.world_size)
    rounds = plan_streams(
        model.catalogue,
        model.layout.files,
        model.dtypes,
        owners=owners,
        round_bytes=min(ROUND_BYTES, request.budget_bytes // BUFFERS_PER_BOX),
    )
    uploading = Uploading(group, request.path, model.layout, owners)
    uploading.begin(request.on_existing, adapter.write_extras)
    exchange = Exchange(rounds, model.catalogue, model.dtypes, group.rank, group.world_size)
    return _Plan((), exchange, UPLOADED), uploading


def _plan(group: Group, model: _Model, request: SaveRequest, cost: CostModel) -> _Plan:
    box_bytes = min(BOX_BYTES, request.budget_bytes // BUFFERS_PER_BOX)
    nodes = nodes_of(group.hosts, None)
    exchanged, why = choose_exchange(model.catalogue, model.dtypes, cost, nodes, box_bytes=box_bytes)
    rounds = plan_rounds(
        model.catalogue,
        model.layout.files,
        model.dtypes,
        exchanged=exchanged,
        box_bytes=box_bytes,
    )
    writes = plan_save(model.catalogue, model.layout.files, model.dtypes, rank=group.rank, exchanged=exchanged)
    return _Plan(writes, Exchange(rounds, model.catalogue, model.dtypes, group.rank, group.world_size), why)


def _mover(work: _Work) -> AbstractContextManager[Mover]:
    return work.adapter.mover(work.group.check) if work.group.world_size > 1 else nullcontext(SoloMover())


def _write(work: _Work) -> tuple[RankReport, ...]:
    mine, request = work.mine, work.request
    meter = Meter(request.budget_bytes)
    total = sum(write.num_bytes for write in work.plan.writes) + work.plan.exchange.bytes_owned

    def sources() -> dict[str, Source]:
        return {target.name: work.adapter.source(target.name) for target in work.adapter.targets}

    def on_bytes(num_bytes: int, num_requests: int) -> None:
        work.group.check()
        mine.bytes_written += num_bytes
        mine.requests += num_requests
        if request.on_progress is not None:
            request.on_progress(Progress(mine.rank, mine.bytes_written, total))

    buffers, piece_bytes = Buffers(meter), min(PIECE_BYTES, request.budget_bytes // 4)
    settings = WriteSettings(piece_bytes, buffers, on_bytes)
    arriving = settings._replace(on_bytes=lambda *_: work.group.check())
    round_bytes = min(ROUND_BYTES, request.budget_bytes // BUFFERS_PER_BOX)
    tools = Tools(sources, work.adapter.made_source, partial(_mover, work), arriving, round_bytes)
    with mine.timed("compute"):
        computed = compute_tensors(work.group, work.made, tools)

    def write() -> bytes:
        held = {**sources(), **computed}
        with work.staging.open_files(meter) as files:
            with mine.timed("write"):
                execute_writes(work.plan.writes, held, files, settings)
            if work.plan.exchange.rounds:
                with mine.timed("exchange"), _mover(work) as mover:
                    execute_exchange(work.plan.exchange, held, files, settings, mover)
            with mine.timed("sync"):
                files.sync()
        mine.num_tensors = len(work.adapter.targets)
        mine.peak_extra_bytes = meter.peak_bytes
        return mine.to_bytes()

    return tuple(rank_report_from_bytes(data) for data in together(work.group, "write tensors", write))
