"""Read-once plans: every wanted byte arrives once at every holder, and is read once per domain."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.expensive import EXPENSIVE

from shardferry.convert.ops import Stored
from shardferry.format.dtypes import BITS
from shardferry.format.index import CheckpointIndex, FileInfo, TensorInfo
from shardferry.geometry.region import Region, box, whole
from shardferry.geometry.sharding import mesh_sharding
from shardferry.geometry.spans import region_to_spans
from shardferry.plan.demand import (
    Demand,
    Units,
    make_demand,
    number_units,
    rows_from_bytes,
    sets_to_bytes,
    wants_of,
    wants_to_bytes,
)
from shardferry.plan.load import Copy, LoadPlan, Wanted, plan_load
from shardferry.plan.readonce import Policy, ReadOncePlan, narrow_copy, plan_read_once
from shardferry.testing.strategies import mesh_layouts, regions, shapes

# By rank, by name of the stored tensor, the regions of it that the rank wants, each for a target of its own.
Job = list[dict[str, list[Region]]]

HEADER = 16
ROOM = 1 << 20


def index_of(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> CheckpointIndex:
    """Return an index of two files that hold the tensors by turns."""
    infos, at = {}, {"a": HEADER, "b": HEADER}
    for number, (name, (dtype, shape)) in enumerate(tensors.items()):
        file = "ab"[number % 2]
        size = int(np.prod(shape, dtype=np.int64)) * BITS[dtype] // 8
        infos[name] = TensorInfo(dtype, shape, file, (at[file], at[file] + size))
        at[file] += size
    return CheckpointIndex("/", infos, {file: FileInfo(end, HEADER, "") for file, end in at.items()}, {})


@dataclass
class Planned:
    """What the ranks of a job plan, each from what all have told."""

    index: CheckpointIndex
    units: Units
    demand: Demand
    loads: list[LoadPlan]
    plans: list[ReadOncePlan]


def plan_job(index: CheckpointIndex, job: Job, policy: Policy) -> Planned:
    units = number_units(index)
    loads = [
        plan_load(
            index,
            [
                Wanted(f"{name}/{at}", Stored(name, index.tensors[name].shape), region)
                for name, held in mine.items()
                for at, region in enumerate(held)
            ],
        )
        for mine in job
    ]
    wants = [wants_of(load, units) for load in loads]
    rows = [rows_from_bytes(wants_to_bytes(want)) for want in wants]
    demand = make_demand(rows, [sets_to_bytes(want, rows, rank) for rank, want in enumerate(wants)])
    plans = [
        plan_read_once(load, units, demand, want, policy, rank=rank)
        for rank, (load, want) in enumerate(zip(loads, wants, strict=True))
    ]
    return Planned(index, units, demand, loads, plans)


@dataclass
class Simulation:
    """Carries a job's plans out in the plainest way: byte by byte, in NumPy arrays of offsets."""

    planned: Planned
    reads: dict[str, list[int]] = field(default_factory=dict)
    by_rank: dict[int, int] = field(default_factory=dict)

    def run(self) -> list[dict[str, np.ndarray]]:
        """Return, by rank and target, the file offset of every byte that arrived; -1 if none did."""
        out = []
        for rank, (load, plan) in enumerate(zip(self.planned.loads, self.planned.plans, strict=True)):
            local = {
                tensor.name: np.full(sum(copy.num_bytes for copy in tensor.copies), -1, np.int64)
                for tensor in load.tensors
            }
            for tensor in plan.direct.tensors:
                whole_copy = next(t.copies[0] for t in load.tensors if t.name == tensor.name)
                for copy in tensor.copies:
                    self._read(rank, copy.file, offsets_of(copy.region, copy) + copy.start)
                    put(local[tensor.name], whole_copy, copy)
            for stream in plan.streams:
                assert rank in stream.ranks
                for number in range(stream.num_rounds):
                    for member, reader in enumerate(stream.ranks):
                        self._receive(local, plan, [*stream.pieces(member, number)], rank, reader)
            out.append(local)
        return out

    def _read(self, rank: int, file: str, offsets: np.ndarray) -> None:
        self.reads.setdefault(file, []).extend(offsets.tolist())
        self.by_rank[rank] = self.by_rank.get(rank, 0) + len(offsets)

    def _receive(self, local, plan, pieces, rank, reader) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        for piece in pieces:
            copies = plan.places[piece.unit, piece.segment.shape]
            if rank == reader:
                self._read(rank, copies[0][1].file, offsets_of(piece.region, copies[0][1]) + copies[0][1].start)
            for region in (part.region for part in piece.parts if rank in part.holders):
                for name, copy in copies:
                    for narrow in narrow_copy(copy, region):
                        put(local[name], copy, narrow)


def offsets_of(region: Region, copy: Copy) -> np.ndarray:
    """Return the offset within the stored tensor of every byte of a region, in order."""
    spans = region_to_spans(region, copy.shape, BITS[copy.dtype])
    return np.concatenate([np.arange(start, stop) for start, stop in spans.tolist()] or [np.empty(0, np.int64)])


def put(local: np.ndarray, mine: Copy, part: Copy) -> None:
    """Put the bytes of a part of a copy where they belong; nothing may be there yet."""
    places = np.searchsorted(offsets_of(mine.region, mine), offsets_of(part.region, part))
    sizes = [stop - start for start, stop in part.target]
    assert sizes == list(part.region.shape)
    assert (local[places] == -1).all(), "a byte arrived twice"
    local[places] = offsets_of(part.region, part)


def check(planned: Planned, policy: Policy) -> Simulation:
    """Fail unless every wanted byte arrives, is read once per domain, and all members of a group plan the same."""
    simulation = Simulation(planned)
    for load, local in zip(planned.loads, simulation.run(), strict=True):
        for tensor in load.tensors:
            (copy,) = tensor.copies or (None,)
            if copy is not None:
                assert np.array_equal(local[tensor.name], offsets_of(copy.region, copy))
    once = {
        (domain, copy.file, copy.start + int(at))
        for load, domain in zip(planned.loads, policy.domains, strict=True)
        for tensor in load.tensors
        for copy in tensor.copies
        for at in offsets_of(copy.region, copy)
    }
    assert sum(map(len, simulation.reads.values())) == len(once)
    check_agreement(planned.plans)
    return simulation


def check_agreement(plans: list[ReadOncePlan]) -> None:
    digests: dict[tuple[bool, tuple[int, ...]], list[bytes]] = {}
    for plan in plans:
        for stream in plan.streams:
            digests.setdefault((stream.is_common, stream.ranks), []).append(stream.digest())
    for (_, ranks), told in digests.items():
        assert len(told) == len(ranks)
        assert len(set(told)) == 1
    orders = [[(stream.is_common, stream.ranks) for stream in plan.streams] for plan in plans]
    for one in orders:
        for other in orders:
            assert [group for group in one if group in other] == [group for group in other if group in one]


@EXPENSIVE
@given(st.data())
def test_any_wants_arrive_once_and_are_read_once_per_domain(data: st.DataObject) -> None:
    """Regions of any kind, several of a tensor on one rank (equal ones too), ranks that want nothing."""
    tensors = {f"t{i}": ("U8", data.draw(shapes())) for i in range(data.draw(st.integers(1, 3)))}
    count = data.draw(st.integers(1, 4))
    job = [
        {name: data.draw(st.lists(regions(shape), max_size=2)) for name, (_, shape) in tensors.items()}
        for _ in range(count)
    ]
    domains = tuple(data.draw(st.integers(0, 1)) for _ in range(count))
    policy = Policy(domains, data.draw(st.sampled_from([0, 3, 1000])), data.draw(st.sampled_from([64, ROOM])))
    check(plan_job(index_of(tensors), job, policy), policy)


@EXPENSIVE
@given(st.data())
def test_mesh_layouts_arrive_once_and_are_read_once_by_the_job(data: st.DataObject) -> None:
    tensors = {f"t{i}": (data.draw(st.sampled_from(["F32", "U8", "BF16"])), data.draw(shapes(1))) for i in range(2)}
    layouts = {name: data.draw(mesh_layouts(len(shape))) for name, (_, shape) in tensors.items()}
    count = 1 + max(len(layout.ranks) for layout in layouts.values())  # the last rank is outside of every mesh
    job: Job = [{} for _ in range(count)]
    for name, (_, shape) in tensors.items():
        for rank, region in enumerate(mesh_sharding(shape, layouts[name], count).regions):
            if region is not None:
                job[rank][name] = [region]
    policy = Policy((0,) * count, data.draw(st.sampled_from([0, 1000])), ROOM)
    planned = plan_job(index_of(tensors), job, policy)
    check(planned, policy)
    assert not planned.plans[-1].streams


def test_readers_of_a_group_are_balanced_to_an_element() -> None:
    tensors = {f"t{i}": ("F32", (i % 7, 3)) for i in range(50)} | {"scalar": ("F64", ()), "odd": ("F32", (1001,))}
    index = index_of(tensors)
    policy = Policy((0,) * 4, 1000, ROOM)
    planned = plan_job(index, [{name: [whole(shape)] for name, (_, shape) in tensors.items()}] * 4, policy)
    simulation = check(planned, policy)
    assert len(planned.plans[0].streams) == 1
    assert max(simulation.by_rank.values()) - min(simulation.by_rank.values()) <= 2 * 8


def test_columns_are_read_in_whole_rows_and_long_rows_by_who_wants_them() -> None:
    index = index_of({"w": ("F32", (8, 16))})
    columns = [{"w": [box((0, 8 * at), (8, 8))]} for at in range(2)]
    rows = [{"w": [box((4 * at, 0), (4, 16))]} for at in range(2)]
    policy = Policy((0, 0), 64, ROOM)
    exchanged = plan_job(index, columns, policy).plans[0]
    ((stream),) = exchanged.streams
    assert [piece.region.dims for piece in stream.pieces(0, 0)] == [(((0, 4),), ((0, 16),))]
    assert not exchanged.direct.tensors
    alone = plan_job(index, rows, policy).plans[0]
    assert not alone.streams
    assert alone.direct.bytes_wanted == 256


def test_rows_that_only_one_rank_wants_are_not_read_by_others() -> None:
    """Ranks 0 and 1 share the first half of the rows; the second half is rank 1's alone."""
    index = index_of({"w": ("F32", (8, 16))})
    job: Job = [{"w": [box((0, 0), (4, 16))]}, {"w": [whole((8, 16))]}]
    policy = Policy((0, 0), 0, ROOM)
    planned = plan_job(index, job, policy)
    check(planned, policy)
    assert [plan.direct.bytes_wanted for plan in planned.plans] == [0, 256]


@pytest.mark.parametrize(("dtype", "shape"), [("F4", (6, 6)), ("F6_E2M3", (5, 8)), ("F4", (10,))])
def test_packed_dtypes_are_cut_at_whole_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    index = index_of({"w": (dtype, shape)})
    policy = Policy((0,) * 3, 1000, 200)
    check(plan_job(index, [{"w": [whole(shape)]}] * 3, policy), policy)


def test_packed_rows_that_share_bytes_are_read_by_every_holder() -> None:
    index = index_of({"w": ("F4", (4, 3))})
    policy = Policy((0, 0), 1000, ROOM)
    planned = plan_job(index, [{"w": [whole((4, 3))]}] * 2, policy)
    assert [(plan.direct.bytes_wanted, plan.streams) for plan in planned.plans] == [(6, ()), (6, ())]


def test_a_domain_of_one_rank_reads_what_it_would_read_by_itself() -> None:
    index = index_of({"w": ("F32", (8, 16)), "v": ("F32", (3,))})
    job: Job = [{"w": [whole((8, 16))], "v": [whole((3,))]}] * 3
    planned = plan_job(index, job, Policy((0, 1, 2), 1000, ROOM))
    for load, plan in zip(planned.loads, planned.plans, strict=True):
        assert (plan.direct.tensors, plan.streams) == (load.tensors, ())


def test_the_plan_depends_neither_on_the_order_of_names_nor_on_who_computes_it() -> None:
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {f"t{i}": ("F32", (4 + i % 3, 6)) for i in range(30)}
    index = index_of(tensors)
    job: Job = [
        {name: [box((0, 3 * (rank % 2)), (shape[0], 3))] for name, (_, shape) in tensors.items()} for rank in range(4)
    ]
    policy = Policy((0,) * 4, 1000, ROOM)
    first = plan_job(index, job, policy)
    names = sorted(tensors, key=lambda name: name[::-1])
    again = plan_job(index, [{name: mine[name] for name in names} for mine in job], policy)
    digests = [[stream.digest() for stream in plan.streams] for plan in first.plans]
    assert digests == [[stream.digest() for stream in plan.streams] for plan in again.plans]
    assert all(told == digests[0] for told in digests)


@EXPENSIVE
@given(st.integers(2, 6), st.integers(8 * 6 * 32, 4000), st.sampled_from(["common", "columns"]))
def test_buffers_of_a_round_stay_within_their_memory(count: int, exchange_bytes: int, kind: str) -> None:
    shape = (60, 12)
    job: Job = [{"w": [whole(shape) if kind == "common" else box((0, 2 * at), (60, 2))]} for at in range(count)]
    planned = plan_job(index_of({"w": ("F32", shape)}), job, Policy((0,) * count, 1000, exchange_bytes))
    for rank, plan in enumerate(planned.plans):
        for stream in plan.streams:
            for number in range(stream.num_rounds):
                reads = [piece_bytes([*stream.pieces(member, number)], None) for member in range(count)]
                parts = [piece_bytes([*stream.pieces(member, number)], rank) for member in range(count)]
                sent = 0 if stream.is_common else reads[rank]
                assert 2 * reads[rank] + sent + sum(parts) - parts[rank] <= exchange_bytes


def piece_bytes(pieces: list, rank: int | None) -> int:  # type: ignore[type-arg]
    return sum(
        part.region.num_elements * piece.segment.bits // 8
        for piece in pieces
        for part in piece.parts
        if rank is None or rank in part.holders
    )
