"""What a node warms: the union of what its ranks read, per file as spans or whole, split by bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardferry.convert.ops import Stored, concatenate
from shardferry.format.dtypes import tensor_bytes
from shardferry.format.index import CheckpointIndex, FileInfo, TensorInfo
from shardferry.geometry.region import box
from shardferry.geometry.sharding import MeshLayout, Sharding, Split, region_at
from shardferry.plan.catalogue import Held
from shardferry.plan.load import Wanted
from shardferry.plan.warm import (
    CUT_BYTES,
    FileReads,
    fit_room,
    node_wants,
    plan_warm,
    reading_cost,
    reads_whole,
    share_of,
)
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardferry.convert.ops import Expression
    from shardferry.geometry.region import Region

SEEK = 12 * MIB  # measured by others on a cross-region network mount; the table below is theirs
NUM_RANKS = 4


def index_of(files: Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]], header_bytes: int = 0) -> CheckpointIndex:
    """Return an index of files whose tensors lie one after another in the order given."""
    tensors: dict[str, TensorInfo] = {}
    infos: dict[str, FileInfo] = {}
    for file, named in files.items():
        at = header_bytes
        for name, (dtype, shape) in named.items():
            stop = at + tensor_bytes(dtype, shape)
            tensors[name] = TensorInfo(dtype, shape, file, (at, stop))
            at = stop
        infos[file] = FileInfo(at, header_bytes, "")
    return CheckpointIndex("/ckpt", tensors, infos, {})


def plan(
    index: CheckpointIndex, wanted: Sequence[Wanted], seek_bytes: int, same: Mapping[str, str] | None = None
) -> dict[str, FileReads]:
    identities = {file: (same or {}).get(file, file) for file in index.files}
    return {file.file: file for file in plan_warm(index, wanted, identities=identities, seek_bytes=seek_bytes)}


# 2 layers of 32 experts of 2048 x 2048 BF16 in one file of 512 MiB, read by 4 ranks: per rank what it needs and in how
# many spans, whether the experts are stored packed or each for itself and, unconverted, needed by all.
@pytest.mark.parametrize(
    ("num_nodes", "needed_mib", "num_spans", "cost_and_whole_mib", "strategy"),
    [
        pytest.param(1, 128, 2, (152, 128), "whole", id="packed, 1 node"),
        pytest.param(2, 128, 2, (152, 256), "spans", id="packed, 2 nodes"),
        pytest.param(4, 128, 2, (152, 512), "spans", id="packed, 4 nodes"),
        pytest.param(1, 512, 1, (524, 128), "whole", id="per expert, 1 node"),
        pytest.param(2, 512, 1, (524, 256), "whole", id="per expert, 2 nodes"),
        pytest.param(4, 512, 1, (524, 512), "whole", id="per expert, 4 nodes"),
    ],
)
def test_a_rank_decides_as_the_published_table(
    num_nodes: int, needed_mib: int, num_spans: int, cost_and_whole_mib: tuple[int, int], strategy: str
) -> None:
    cost_mib, whole_mib = cost_and_whole_mib
    whole_bytes = 512 * MIB // (NUM_RANKS // num_nodes)
    assert whole_bytes == whole_mib * MIB
    assert reading_cost(needed_mib * MIB, num_spans, SEEK) == cost_mib * MIB
    whole = reads_whole(needed_mib * MIB, num_spans, whole_bytes=whole_bytes, seek_bytes=SEEK)
    assert ("whole" if whole else "spans") == strategy


def experts_job(names: Sequence[str], shape: tuple[int, ...]) -> dict[str, Held]:
    layout = MeshLayout((NUM_RANKS,), tuple(range(NUM_RANKS)), (Split(0, 0),))
    return {name: Held("BF16", shape, layout, tuple(range(NUM_RANKS))) for name in names}


def ranks_of_node(node: int, num_nodes: int) -> range:
    each = NUM_RANKS // num_nodes
    return range(node * each, (node + 1) * each)


@pytest.mark.parametrize(("num_nodes", "strategy"), [(1, "whole"), (2, "spans"), (4, "spans")])
def test_packed_experts_are_read_as_spans_on_several_nodes(num_nodes: int, strategy: str) -> None:
    index = index_of({"model": {f"layers.{layer}.experts": ("BF16", (32, 2048, 2048)) for layer in range(2)}})
    job = experts_job(list(index.tensors), (32, 2048, 2048))
    for node in range(num_nodes):
        file = plan(index, list(node_wants(job, {}, ranks_of_node(node, num_nodes))), SEEK)["model"]
        assert file.strategy == strategy
        assert file.bytes_wanted == 512 * MIB // num_nodes
        assert len(file.spans) == (1 if num_nodes == 1 else 2)


@pytest.mark.parametrize(("num_nodes", "strategy"), [(1, "whole"), (2, "spans"), (4, "spans")])
@pytest.mark.parametrize("in_order", [int, str])
def test_experts_stored_one_by_one_are_read_as_spans_too_when_the_conversion_is_known(
    num_nodes: int, strategy: str, in_order: type
) -> None:
    """Stored in order of the numbers, or as most writers do it, of the names: 0, 1, 10, 11, ...

    Then a node's experts lie apart, and holes of one expert (8 MiB) are cheaper to read than to skip.
    """
    stored = [f"layers.{layer}.experts.{e}" for layer in range(2) for e in sorted(range(32), key=in_order)]
    index = index_of({"model": dict.fromkeys(stored, ("BF16", (2048, 2048)))})
    sources: dict[str, Expression] = {
        f"layers.{layer}.experts": concatenate(
            [Stored(f"layers.{layer}.experts.{e}", (2048, 2048)) for e in range(32)], dim=0
        )
        for layer in range(2)
    }
    job = experts_job(list(sources), (32 * 2048, 2048))
    for node in range(num_nodes):
        file = plan(index, list(node_wants(job, sources, ranks_of_node(node, num_nodes))), SEEK)["model"]
        assert file.bytes_wanted == 512 * MIB // num_nodes
        assert file.strategy in {strategy, "bridged" if in_order is str and strategy == "spans" else strategy}


def test_experts_stored_one_by_one_are_wanted_whole_when_no_conversion_is_known() -> None:
    stored = [f"layers.0.experts.{e}" for e in range(32)]
    index = index_of({"model": dict.fromkeys(stored, ("BF16", (2048, 2048)))})
    job = {name: Held("BF16", (2048, 2048), None, tuple(range(NUM_RANKS))) for name in stored}
    assert plan(index, list(node_wants(job, {}, [3])), SEEK)["model"].strategy == "whole"


def test_what_several_ranks_of_a_node_hold_is_counted_once() -> None:
    index = index_of({"model": {"w": ("F32", (8, 4)), "norm": ("F32", (4,))}})
    halves = MeshLayout((2, 2), (0, 1, 2, 3), (Split(1, 0),))  # ranks 0 and 2 hold the same half
    job = {"w": Held("F32", (8, 4), halves, (0, 1, 2, 3)), "norm": Held("F32", (4,), None, (0, 1, 2, 3))}
    wanted = list(node_wants(job, {}, [0, 2]))
    assert [want.name for want in wanted] == ["w", "norm"]
    assert plan(index, wanted, 1)["model"].spans.tolist() == [[0, 64], [128, 144]]


CUTS = st.lists(
    st.builds(Split, st.integers(0, 2), st.integers(0, 2), st.integers(1, 3)), max_size=3, unique_by=lambda s: s.axis
)


@given(st.tuples(*[st.integers(1, 6)] * 3), CUTS, st.sets(st.integers(0, 11), min_size=1))
def test_a_node_wants_each_element_that_any_of_its_ranks_holds(
    shape: tuple[int, int, int], cuts: list[Split], ranks: set[int]
) -> None:
    layout = MeshLayout((2, 3, 2), tuple(range(12)), tuple(cuts))
    expected = np.zeros(shape, bool)
    for rank in ranks:
        expected[region_mask(region_at(shape, layout, rank))] = True
    index = index_of({"model": {"w": ("U8", shape)}})
    wanted = list(node_wants({"w": Held("U8", shape, layout, layout.ranks)}, {}, ranks))
    spans = np.zeros(expected.size, bool)
    files = plan_warm(index, wanted, identities={"model": 0}, seek_bytes=0)
    for start, stop in files[0].spans.tolist() if files else ():
        spans[start:stop] = True
    assert sum(file.bytes_wanted for file in files) == expected.sum()
    assert np.array_equal(spans.reshape(shape), expected)


def region_mask(region: Region) -> tuple[np.ndarray, ...]:
    return np.ix_(*([at for start, stop in dim for at in range(start, stop)] for dim in region.dims))


def test_ranks_without_a_part_want_nothing() -> None:
    index = index_of({"model": {"w": ("F32", (2, 4)), "v": ("F32", (4,))}})
    regions = Sharding((2, 4), (box((0, 0), (2, 4)), None, box((2, 0), (0, 4))))
    job = {"w": Held("F32", (2, 4), regions, (0, 1, 2)), "v": Held("F32", (4,), None, (0,))}
    assert not list(node_wants(job, {}, [1, 2]))
    assert plan_warm(index, [], identities={"model": 0}, seek_bytes=1) == ()


def test_columns_that_neighbours_share_make_whole_rows() -> None:
    index = index_of({"model": {"w": ("F32", (1000, 8)), "v": ("F32", (1000, 8))}}, header_bytes=100)
    columns = MeshLayout((4,), (0, 1, 2, 3), (Split(0, 1),))
    job = {"w": Held("F32", (1000, 8), columns, (0, 1, 2, 3))}
    assert plan(index, list(node_wants(job, {}, range(4))), 1)["model"].spans.tolist() == [[100, 32100]]
    two = plan(index, list(node_wants(job, {}, [1, 2])), 1)["model"]
    assert (len(two.spans), two.spans[0].tolist(), two.bytes_wanted) == (1000, [108, 124], 16000)


def test_holes_are_bridged_if_reading_them_costs_less_than_a_seek() -> None:
    index = index_of({"model": dict.fromkeys("abcdef", ("U8", (100,)))})
    wanted = [Wanted(name, Stored(name, (100,)), box((0,), (100,))) for name in "ac"]
    assert plan(index, wanted, 100)["model"].spans.tolist() == [[0, 100], [200, 300]]
    bridged = plan(index, wanted, 101)["model"]
    assert (bridged.strategy, bridged.spans.tolist(), bridged.bytes_wanted) == ("bridged", [[0, 300]], 200)
    assert plan(index, wanted, 300)["model"].strategy == "whole"


def test_two_names_of_the_same_bytes_are_read_once() -> None:
    index = index_of({"one": {"a": ("U8", (100,))}, "other": {"b": ("U8", (100,))}, "third": {"c": ("U8", (100,))}})
    wanted = [Wanted(name, Stored(name, (100,)), box((at,), (50,))) for name, at in (("a", 0), ("b", 25), ("c", 0))]
    files = plan(index, wanted, 1, same={"other": "one"})
    assert {name: file.spans.tolist() for name, file in files.items()} == {"one": [[0, 75]], "third": [[0, 50]]}


SPANS = st.lists(st.integers(1, 60), min_size=2, max_size=20).map(
    lambda steps: np.cumsum(steps)[: len(steps) // 2 * 2].reshape(-1, 2).astype(np.int64) * CUT_BYTES // 7
)


def reads(spans: Sequence[np.ndarray]) -> list[FileReads]:
    return [FileReads(str(number), "spans", rows, 0, "") for number, rows in enumerate(spans)]


def bytes_of(files: Sequence[FileReads]) -> list[tuple[str, int, int]]:
    """Return every span of the files, those that touch joined."""
    joined: list[tuple[str, int, int]] = []
    for file in files:
        for start, stop in file.spans.tolist():
            if joined and joined[-1][0] == file.file and joined[-1][2] == start:
                joined[-1] = (file.file, joined[-1][1], stop)
            else:
                joined.append((file.file, start, stop))
    return joined


@given(st.lists(SPANS, min_size=1, max_size=4), st.integers(1, 9))
def test_shares_are_all_bytes_once_and_nearly_equal(spans: list[np.ndarray], num_shares: int) -> None:
    files = reads(spans)
    shares = [share_of(files, num_shares, share) for share in range(num_shares)]
    again = [FileReads(part.file, "spans", part.spans, 0, "") for share in shares for part in share]
    assert bytes_of(again) == bytes_of(files)
    even = sum(file.num_bytes for file in files) / num_shares
    for share in shares:
        assert abs(sum(int((part.spans[:, 1] - part.spans[:, 0]).sum()) for part in share) - even) <= CUT_BYTES + 1


@given(st.lists(SPANS, min_size=1, max_size=4), st.integers(0, 300 * CUT_BYTES))
def test_what_fits_is_the_first_part_and_no_more_than_the_room(spans: list[np.ndarray], room: int) -> None:
    files = reads(spans)
    kept, left_out = fit_room(files, [file.num_bytes for file in files], room)
    total = sum(file.num_bytes for file in files)
    assert sum(file.num_bytes for file in kept) == min(room, total) == total - left_out
    assert [file.file for file in kept] == [file.file for file in files][: len(kept)]


def test_what_is_there_already_needs_no_room() -> None:
    files = reads([np.array([[0, 100]]), np.array([[0, 100]])])
    kept, left_out = fit_room(files, [0, 100], 60)
    assert ([file.spans.tolist() for file in kept], left_out) == ([[[0, 100]], [[0, 60]]], 40)
