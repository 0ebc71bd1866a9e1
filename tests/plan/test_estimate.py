"""A price says what a load then reads and exchanges, and the cheapest way is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.expensive import EXPENSIVE

from shardferry.convert.ops import Stored
from shardferry.errors import ShardingError
from shardferry.format.index import CheckpointIndex, FileInfo, TensorInfo
from shardferry.geometry.region import whole
from shardferry.geometry.sharding import MeshLayout, Sharding, Split, region_at
from shardferry.geometry.spans import region_to_spans
from shardferry.plan.catalogue import Held
from shardferry.plan.costmodel import PRESETS, CostModel
from shardferry.plan.estimate import FAST_STORAGE, STRATEGIES, Estimate, choose_strategy, may_gain
from shardferry.plan.load import Wanted, plan_load
from shardferry.plan.requests import plan_requests
from shardferry.plan.simulate import consecutive_nodes, parse_mesh, parse_rule, simulate_job
from shardferry.plan.target import region_of
from shardferry.testing.strategies import mesh_layouts, regions, shapes
from shardferry.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardferry.plan.estimate import ReadOnce
    from shardferry.plan.target import Layout

HEADER = 8
WORLD = 4
LOCAL = PRESETS["local"]


def index_of(shapes: Mapping[str, tuple[int, ...]], *, num_files: int = 1, itemsize: int = 1) -> CheckpointIndex:
    """Return an index of files that hold the tensors one after another."""
    infos: dict[str, TensorInfo] = {}
    sizes = [HEADER] * num_files
    for at, (name, shape) in enumerate(shapes.items()):
        file = at * num_files // len(shapes)
        size = int(np.prod(shape, dtype=np.int64)) * itemsize
        infos[name] = TensorInfo({1: "U8", 2: "BF16"}[itemsize], shape, f"f{file}", (sizes[file], sizes[file] + size))
        sizes[file] += size
    return CheckpointIndex("/", infos, {f"f{at}": FileInfo(size, HEADER, "") for at, size in enumerate(sizes)}, {})


def held(index: CheckpointIndex, name: str, layout: Layout | None, world_size: int = WORLD) -> Held:
    """Return a tensor that all ranks of the world have, or those its layout names."""
    ranks = tuple(sorted(layout.ranks)) if isinstance(layout, MeshLayout) else tuple(range(world_size))
    return Held("U8", index.tensors[name].shape, layout, ranks)


def byte_set(spans: Sequence[tuple[int, int]], file: str) -> set[tuple[str, int]]:
    return {(file, at) for start, stop in spans for at in range(start, stop)}


def reads_of(index: CheckpointIndex, job: Mapping[str, Held], rank: int, seek_bytes: int) -> list[set[tuple[str, int]]]:
    """Return the bytes that each request of a rank's own load would fetch."""
    wanted = []
    for name, one in job.items():
        region = region_of(one.layout, one.shape, rank) if rank in one.ranks else None
        if region is not None:
            wanted.append(Wanted(name, Stored(name, one.shape), region))
    found = []
    for request in plan_requests(plan_load(index, wanted, seek_bytes), max_bytes=GIB):
        copies = [piece.copy for piece in request.pieces]
        if len(copies) > 1:
            span = (copies[0].first_byte, copies[-1].first_byte + copies[-1].num_bytes)
            found.append(byte_set([span], request.file))
            continue
        (copy,) = copies
        region = copy.region
        if copy.access == "rows":
            at = max(dim for dim, size in enumerate(copy.shape) if region.dims[dim] != ((0, size),))
            region = type(region)((*region.dims[:at], ((0, copy.shape[at]),), *region.dims[at + 1 :]))
        spans = [(copy.start + a, copy.start + b) for a, b in region_to_spans(region, copy.shape, 8).tolist()]
        found.append(byte_set(spans, request.file))
    return found


@st.composite
def jobs(draw: st.DrawFn) -> tuple[CheckpointIndex, dict[str, Held], tuple[int, ...]]:
    """Draw up to four tensors in up to two files, each cut in its own way or not at all, and nodes."""
    named = {f"t{at}": draw(shapes(min_dims=1)) for at in range(draw(st.integers(1, 4)))}
    index = index_of(named, num_files=draw(st.integers(1, min(2, len(named)))))
    job = {}
    for name, shape in named.items():
        mesh = mesh_layouts(len(shape)).filter(lambda layout: len(layout.ranks) <= WORLD)
        own = st.lists(regions(shape), min_size=WORLD, max_size=WORLD).map(
            lambda parts, shape=shape: Sharding(shape, tuple(parts))  # type: ignore[misc]
        )
        job[name] = held(index, name, draw(st.one_of(mesh, own, st.none())))
    nodes = draw(st.sampled_from([(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 2, 3), (0, 0, 0, 1)]))
    return index, job, nodes


def wanted_of(index: CheckpointIndex, job: Mapping[str, Held]) -> list[set[tuple[str, int]]]:
    """Return the bytes each rank wants."""
    found: list[set[tuple[str, int]]] = [set() for _ in range(WORLD)]
    for name, one in job.items():
        info = index.tensors[name]
        for rank in one.ranks:
            region = region_of(one.layout, one.shape, rank)
            if region is not None:
                spans = region_to_spans(region, one.shape, 8) + info.span[0]
                found[rank] |= byte_set(spans.tolist(), info.file)
    return found


def on_node(sets: Sequence[set[tuple[str, int]]], nodes: Sequence[int]) -> list[set[tuple[str, int]]]:
    return [set().union(*(s for s, n in zip(sets, nodes, strict=True) if n == node)) for node in range(max(nodes) + 1)]


@EXPENSIVE
@given(jobs())
def test_what_ranks_want_is_counted_byte_by_byte(
    drawn: tuple[CheckpointIndex, dict[str, Held], tuple[int, ...]],
) -> None:
    index, job, nodes = drawn
    estimate = choose_strategy(job, index, nodes, LOCAL)
    wanted = wanted_of(index, job)
    assert estimate.rank_wanted.tolist() == [len(one) for one in wanted]
    assert estimate.bytes_wanted == len(set().union(*wanted))


@EXPENSIVE
@given(jobs())
def test_read_once_reads_every_wanted_byte_once_per_domain(
    drawn: tuple[CheckpointIndex, dict[str, Held], tuple[int, ...]],
) -> None:
    index, job, nodes = drawn
    estimate = choose_strategy(job, index, nodes, LOCAL)
    wanted = wanted_of(index, job)
    per_node, per_job = estimate.price("read-once per node"), estimate.price("read-once per job")
    assert per_job.storage_bytes == len(set().union(*wanted))
    assert per_node.storage_bytes == sum(map(len, on_node(wanted, nodes)))
    assert not per_node.received_remote.any()


@EXPENSIVE
@given(jobs(), st.sampled_from([0, 2, 5, 20]))
def test_independent_reading_is_priced_as_it_is_planned(
    drawn: tuple[CheckpointIndex, dict[str, Held], tuple[int, ...]], seek_bytes: int
) -> None:
    index, job, nodes = drawn
    reads = [reads_of(index, job, rank, seek_bytes) for rank in range(WORLD)]
    cost = replace(LOCAL, seek_bytes=seek_bytes, has_page_cache=False)
    price = choose_strategy(job, index, nodes, cost).price("independent")
    assert price.rank_bytes.tolist() == [sum(map(len, requests)) for requests in reads]
    assert price.storage_bytes == price.rank_bytes.sum()
    shared = choose_strategy(job, index, nodes, replace(cost, has_page_cache=True)).price("independent")
    fetched = on_node([set().union(*requests) for requests in reads], nodes)
    wanted = on_node(wanted_of(index, job), nodes)
    for node, size in enumerate(shared.node_bytes.tolist()):
        assert len(wanted[node]) <= size
        assert seek_bytes or size == len(fetched[node])


@EXPENSIVE
@given(jobs())
def test_whole_files_are_those_of_which_anything_is_wanted(
    drawn: tuple[CheckpointIndex, dict[str, Held], tuple[int, ...]],
) -> None:
    index, job, nodes = drawn
    sizes = {file: info.size - HEADER for file, info in index.files.items()}
    wanted = wanted_of(index, job)
    for has_page_cache in (True, False):
        cost = replace(LOCAL, has_page_cache=has_page_cache)
        price = choose_strategy(job, index, nodes, cost).price("whole files")
        groups = on_node(wanted, nodes) if has_page_cache else wanted
        assert price.storage_bytes == sum(sum(sizes[file] for file in {file for file, _ in one}) for one in groups)


COSTS = st.builds(
    CostModel,
    seek_bytes=st.integers(0, 100),
    stream_bandwidth=st.floats(1, 1e3),
    node_bandwidth=st.floats(1, 1e3),
    shared_bandwidth=st.one_of(st.just(float("inf")), st.floats(1, 1e3)),
    streams=st.integers(1, 8),
    has_page_cache=st.booleans(),
    interconnect_bandwidth=st.floats(1, 1e3),
    rank_bandwidth=st.floats(1, 1e3),
    source=st.just("drawn"),
)


@EXPENSIVE
@given(jobs(), COSTS)
def test_no_way_a_load_could_take_is_cheaper_than_the_chosen_one(
    drawn: tuple[CheckpointIndex, dict[str, Held], tuple[int, ...]], cost: CostModel
) -> None:
    index, job, nodes = drawn
    ways: tuple[ReadOnce, ...] = ("auto", "always", "never")
    auto, always, never = (choose_strategy(job, index, nodes, cost, read_once=way) for way in ways)
    best = auto.price(auto.chosen).seconds
    shares = cost.has_page_cache  # then a node already fetches each byte once, and alone does not exchange it as well
    assert best <= auto.price("independent").seconds
    alone = (shares and len(set(nodes)) == 1) or not may_gain(nodes, cost)
    assert best <= auto.price("read-once per job").seconds or (alone and auto.chosen == "independent")
    assert shares or best <= auto.price("read-once per node").seconds
    assert not (shares and auto.chosen == "read-once per node")
    assert always.chosen.startswith("read-once")
    assert never.chosen == "independent"


@EXPENSIVE
@given(jobs(), COSTS, st.randoms())
def test_the_order_in_which_a_job_is_told_does_not_matter(
    drawn: tuple[CheckpointIndex, dict[str, Held], tuple[int, ...]], cost: CostModel, random: object
) -> None:
    index, job, nodes = drawn
    names = list(job)
    random.shuffle(names)  # type: ignore[attr-defined]
    first = choose_strategy(job, index, nodes, cost)
    second = choose_strategy({name: job[name] for name in names}, index, nodes, cost)
    assert [(p.storage_bytes, p.seconds) for p in first.prices] == [(p.storage_bytes, p.seconds) for p in second.prices]
    assert (first.chosen, first.why) == (second.chosen, second.why)


@EXPENSIVE
@given(
    jobs(),
    COSTS,
    st.sampled_from(["stream_bandwidth", "node_bandwidth", "shared_bandwidth", "streams", "interconnect_bandwidth"]),
)
def test_nothing_gets_slower_when_something_gets_faster(
    drawn: tuple[CheckpointIndex, dict[str, Held], tuple[int, ...]], cost: CostModel, field: str
) -> None:
    index, job, nodes = drawn
    faster = replace(cost, **{field: 2 * getattr(cost, field)})
    before, after = (choose_strategy(job, index, nodes, one) for one in (cost, faster))
    for strategy in STRATEGIES:
        assert after.price(strategy).seconds <= before.price(strategy).seconds * (1 + 1e-12)


def replicated(num_nodes: int, ranks_per_node: int, cost: CostModel, num_bytes: int = 4 * GIB) -> Estimate:
    """Return the estimate of a model of which every rank wants all."""
    index = index_of({f"layers.{at}.weight": (num_bytes // 64, 2) for at in range(16)}, itemsize=2)
    mesh = parse_mesh(f"dp={num_nodes * ranks_per_node}")
    return choose_strategy(
        simulate_job(index, mesh, []), index, consecutive_nodes(mesh.world_size, ranks_per_node), cost
    )


def test_ranks_that_share_a_page_cache_read_for_themselves() -> None:
    assert replicated(1, 4, LOCAL).chosen == "independent"


def test_nodes_behind_one_slow_server_read_once_for_all() -> None:
    behind = replace(PRESETS["network_mount"], shared_bandwidth=100e6, node_bandwidth=100e6)
    estimate = replicated(2, 2, behind)
    independent, once = estimate.price("independent"), estimate.price("read-once per job")
    assert estimate.chosen == "read-once per job"
    assert independent.storage_bytes == 2 * once.storage_bytes
    assert independent.seconds / once.seconds == pytest.approx(2, rel=0.1)
    assert "would take" in estimate.why


def test_storage_faster_than_the_links_is_not_worth_an_exchange() -> None:
    fast = replace(LOCAL, node_bandwidth=40 * GIB, stream_bandwidth=40 * GIB)
    assert replicated(2, 2, fast).chosen == "independent"


@pytest.mark.parametrize(
    "limit",
    [
        lambda cost, rate: replace(cost, node_bandwidth=rate),
        lambda cost, rate: replace(cost, stream_bandwidth=rate / cost.streams),
        lambda cost, rate: replace(cost, shared_bandwidth=2 * rate),
    ],
    ids=["a node", "its streams", "all nodes"],
)
def test_where_nothing_is_to_be_gained_no_exchange_saves_a_tenth(
    limit: Callable[[CostModel, float], CostModel],
) -> None:
    """Reading once gains most in many rounds, where reading and receiving overlap."""
    links = replace(PRESETS["memory"], seek_bytes=0, interconnect_bandwidth=GIB, rank_bandwidth=100 * GIB)
    for factor, gains in ((2, True), (9, True), (FAST_STORAGE, False), (50, False)):
        cost = limit(links, factor * GIB)
        estimate = replicated(2, 1, cost, num_bytes=64 * GIB)
        gain = estimate.price("independent").seconds / estimate.price("read-once per job").seconds
        assert may_gain((0, 1), cost) == gains
        assert gains or gain <= 1.1


def test_on_memory_ranks_of_several_nodes_have_nothing_to_gain() -> None:
    assert not may_gain((0, 0, 1, 1), PRESETS["memory"])
    assert may_gain((0, 0, 1, 1), PRESETS["local"])
    assert may_gain((0, 0, 1, 1), replace(PRESETS["memory"], has_page_cache=False))


def test_an_object_store_is_asked_for_each_byte_once() -> None:
    estimate = replicated(2, 8, PRESETS["object_store"])
    assert estimate.chosen.startswith("read-once")
    assert estimate.price("independent").storage_bytes == 16 * estimate.egress_bytes // (
        1 if estimate.chosen.endswith("job") else 2
    )


def test_columns_over_nodes_are_read_in_whole_rows_once() -> None:
    index = index_of({"w": (4096, 4096)}, itemsize=2)
    mesh = parse_mesh("tp=8")
    job = simulate_job(index, mesh, [parse_rule("w=1@tp", mesh)])
    estimate = choose_strategy(job, index, consecutive_nodes(8, 4), PRESETS["object_store"])
    independent, once = estimate.price("independent"), estimate.price("read-once per job")
    assert once.storage_bytes == 32 * MIB
    assert independent.storage_bytes == 8 * 32 * MIB  # rows are shorter than a seek
    assert once.exchange_bytes == 28 * MIB  # of what it wants, each rank reads one eighth itself
    assert int(once.received_remote.sum()) == 16 * MIB
    assert once.node_requests.sum() <= 8


def test_a_long_run_is_one_request_and_neighbours_are_joined() -> None:
    index = index_of({f"t{at}": (1024, 1024) for at in range(8)})
    mesh = parse_mesh("dp=2")
    estimate = choose_strategy(simulate_job(index, mesh, []), index, (0, 1), LOCAL)
    assert estimate.price("independent").node_requests.tolist() == [1, 1]
    assert estimate.price("read-once per job").node_requests.tolist() == [1, 1]


def test_a_cut_through_a_packed_byte_is_refused_by_name() -> None:
    info = TensorInfo("F4", (2, 6), "f", (8, 14))
    index = CheckpointIndex("/", {"packed": info}, {"f": FileInfo(14, 8, "")}, {})
    mesh = parse_mesh("tp=2")
    with pytest.raises(ShardingError, match="packed"):
        choose_strategy(simulate_job(index, mesh, [parse_rule(".*=1@tp", mesh)]), index, (0, 0), LOCAL)


def test_a_job_of_nothing_costs_nothing() -> None:
    estimate = choose_strategy({}, index_of({"w": (4,)}), (0, 0), LOCAL)
    assert estimate.chosen == "independent"
    assert [price.seconds for price in estimate.prices] == [0, 0, 0, 0]


def test_equal_layouts_told_as_different_objects_are_one_pattern() -> None:
    index = index_of({"a": (4, 4), "b": (4, 4)})
    job = {name: held(index, name, MeshLayout((WORLD,), tuple(range(WORLD)), (Split(0, 0),))) for name in "ab"}
    given_whole = Sharding((4, 4), tuple(region_at((4, 4), job["a"].layout, rank) for rank in range(WORLD)))
    by_mesh = choose_strategy(job, index, (0, 0, 1, 1), LOCAL)
    by_region = choose_strategy({name: held(index, name, given_whole) for name in "ab"}, index, (0, 0, 1, 1), LOCAL)
    assert [p.node_bytes.tolist() for p in by_mesh.prices] == [p.node_bytes.tolist() for p in by_region.prices]
    assert whole((4, 4)).num_elements * 2 == by_mesh.bytes_wanted
