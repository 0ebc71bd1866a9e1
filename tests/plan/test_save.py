"""What ranks write is every byte of every tensor once, with and without an exchange."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardferry.errors import ShardingError
from shardferry.format.writer import FileLayout
from shardferry.geometry.region import Region, box
from shardferry.geometry.sharding import MeshLayout, Sharding, Split, region_at
from shardferry.geometry.spans import region_to_spans
from shardferry.plan.catalogue import (
    Held,
    inventory_to_bytes,
    make_catalogue,
    names_to_bytes,
    replica_names,
    spokesmen,
)
from shardferry.plan.costmodel import PRESETS, CostModel
from shardferry.plan.exchange import (
    Choice,
    choose_exchange,
    direct_row_bytes,
    part_write,
    parts_of,
    plan_rounds,
    turn_of,
)
from shardferry.plan.save import SPLIT_MIN_BYTES, Write, plan_save, split_write
from shardferry.plan.target import Target
from shardferry.testing.strategies import mesh_layouts, shapes
from shardferry.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Mapping

NOTHING: frozenset[str] = frozenset()
LOCAL = CostModel(128 * KIB, GIB, 2 * GIB, math.inf, 4, True, 5 * GIB, GIB, "a local disk")  # noqa: FBT003
SLOW_LINKS = CostModel(128 * KIB, GIB, 2 * GIB, math.inf, 4, True, 5 * GIB, GIB / 4, "slow links")  # noqa: FBT003
ROWS = MeshLayout((2,), (0, 1), (Split(0, 0),))
COLUMNS = MeshLayout((2,), (0, 1), (Split(0, 1),))
SHAPES = {"thin": (128, 256), "just thin": (128, 2 * 65000), "long": (128, 2 * 65536), "few": (8, 256)}


def one_file(catalogue: dict[str, Held], width: int = 1) -> FileLayout:
    at, spans = 16, {}
    for name, held in catalogue.items():
        size = math.prod(held.shape) * width
        spans[name] = (at, at + size)
        at += size
    return FileLayout("f", b" " * 16, spans, at)


def writes_of(catalogue: dict[str, Held], rank: int, exchanged: frozenset[str] = NOTHING) -> tuple[Write, ...]:
    dtypes = dict.fromkeys(catalogue, "U8")
    return plan_save(catalogue, [one_file(catalogue)], dtypes, rank=rank, exchanged=exchanged)


def bytes_of(write: Write) -> list[int]:
    return [
        write.start + byte
        for start, stop in region_to_spans(write.region, write.shape, 8).tolist()
        for byte in range(start, stop)
    ]


def elements(region: Region, array: np.ndarray) -> np.ndarray:
    for dim, held in enumerate(region.dims):
        array = np.take(array, np.array([i for a, b in held for i in range(a, b)], np.int64), axis=dim)
    return array


@given(st.data(), st.integers(1, 30))
def test_every_byte_is_written_once_from_the_right_place(data: st.DataObject, max_bytes: int) -> None:
    shape = data.draw(shapes(min_dims=1))
    layout = data.draw(mesh_layouts(len(shape)))
    count = len(layout.ranks)
    catalogue = {"w": Held("U8", shape, layout, tuple(range(count)))}
    whole = np.arange(math.prod(shape)).reshape(shape)
    seen: list[int] = []
    for rank in range(count):
        local = elements(region_at(shape, layout, layout.ranks.index(rank)), whole)
        for write in writes_of(catalogue, rank):
            for piece in split_write(write, max_bytes):
                seen += bytes_of(piece)
                assert np.array_equal(elements(piece.local, local), elements(piece.region, whole))
    assert sorted(seen) == list(range(16, 16 + whole.size))


@given(st.data(), st.integers(1, 40))
def test_the_boxes_of_an_exchange_are_contiguous_and_their_parts_fill_them_once(
    data: st.DataObject, box_bytes: int
) -> None:
    shape = data.draw(shapes(min_dims=1))
    layout = data.draw(mesh_layouts(len(shape)))
    count = len(layout.ranks)
    held = Held("U8", shape, layout, tuple(range(count)))
    catalogue = {"w": held}
    rounds = plan_rounds(
        catalogue,
        [one_file(catalogue)],
        {"w": "U8"},
        exchanged=frozenset({"w"}),
        box_bytes=box_bytes,
    )
    seen: list[int] = []
    for boxes in rounds:
        assert len({box.owner for box in boxes}) == len(boxes)
        assert {box.owner for box in boxes} <= set(layout.ranks)
        turns = [turn_of(boxes, catalogue, {"w": "U8"}, rank) for rank in range(count)]
        sent = [pair for turn in turns for pair in turn.outgoing]
        assert Counter(sent) == Counter(pair for turn in turns for pair in turn.incoming)
        for one in boxes:
            spans = region_to_spans(one.region, shape, 8)
            assert len(spans) <= 1
            parts = [part_write(one, part, held, "U8") for part in parts_of(one, held, "U8")]
            filled = [byte for part in parts for byte in bytes_of(part)]
            assert sorted(filled) == [16 + byte for start, stop in spans.tolist() for byte in range(start, stop)]
            seen += filled
    assert sorted(seen) == list(range(16, 16 + math.prod(shape)))


def test_a_large_replica_is_cut_over_its_holders_and_a_small_one_has_one_writer() -> None:
    everywhere = MeshLayout((4,), (0, 1, 2, 3), ())
    large, small = (4, SPLIT_MIN_BYTES), (4, 16)
    catalogue = {
        "large": Held("U8", large, everywhere, (0, 1, 2, 3)),
        "small": Held("U8", small, everywhere, (0, 1, 2, 3)),
    }
    writes = [write for rank in range(4) for write in writes_of(catalogue, rank)]
    assert [write.num_bytes for write in writes if write.name == "large"] == [SPLIT_MIN_BYTES] * 4
    assert [write.num_bytes for write in writes if write.name == "small"] == [64]


def test_a_vector_is_cut_at_whole_pages() -> None:
    everywhere = MeshLayout((3,), (0, 1, 2), ())
    size = 2 * SPLIT_MIN_BYTES + 5
    catalogue = {"v": Held("U8", (size,), everywhere, (0, 1, 2))}
    spans = [
        bytes_of(write)[:: max(1, write.num_bytes - 1)] for rank in range(3) for write in writes_of(catalogue, rank)
    ]
    assert [(span[0] - 16) % 4096 for span in spans] == [0, 0, 0]
    assert spans[-1][-1] == 15 + size


@pytest.mark.parametrize("rank", [0, 1])
def test_elements_on_no_rank_are_refused_on_every_rank(rank: int) -> None:
    halves = Sharding((4, 4), (box((0, 0), (2, 4)), box((2, 0), (1, 4))))
    with pytest.raises(ShardingError, match=r"w: elements \[3-4, 0-4\] of shape \[4, 4\] are on no rank"):
        writes_of({"w": Held("U8", (4, 4), halves, (0, 1))}, rank)


def test_a_rank_of_the_mesh_that_does_not_take_part_is_missed() -> None:
    rows = MeshLayout((2,), (0, 1), (Split(0, 0),))
    with pytest.raises(ShardingError, match="on no rank"):
        writes_of({"w": Held("U8", (4, 4), rows, (0,))}, 0)


def choice_of(
    shapes: Mapping[str, tuple[int, ...]],
    cost: CostModel,
    nodes: tuple[int, ...] = (0, 0),
    layout: MeshLayout = COLUMNS,
) -> Choice:
    catalogue = {name: Held("U8", shape, layout, (0, 1)) for name, shape in shapes.items()}
    return choose_exchange(catalogue, dict.fromkeys(shapes, "U8"), cost, nodes, box_bytes=8 << 20)


def test_only_tensors_that_would_be_written_in_many_thin_rows_are_exchanged() -> None:
    """On a local disk a row of 64 KiB is worth a write of its own, as it was measured to be."""
    exchanged, why = choice_of(SHAPES, LOCAL)
    assert exchanged == {"thin", "just thin"}
    assert why == (
        "exchange for 2 of 4 tensors: rows of 128 B to 63.5 KiB are below 64.0 KiB, where a request costs more than to "
        "send them to one writer (a local disk); holders write the others"
    )


def test_a_save_without_thin_rows_is_direct_and_says_so() -> None:
    exchanged, why = choice_of(SHAPES, LOCAL, layout=ROWS)
    assert not exchanged
    assert why == "direct: holders write their own bytes, none in many rows below 64.0 KiB (a local disk)"
    assert choice_of(SHAPES, LOCAL, (0,)).why == "direct: one rank writes everything"


@pytest.mark.parametrize(
    ("cost", "nodes", "limit"),
    [
        (LOCAL, (0, 0), 64 << 10),
        (replace(LOCAL, seek_bytes=32 << 10), (0, 0), 16 << 10),  # a request costs less
        (SLOW_LINKS, (0, 0), 16 << 10),  # sending costs more
        (replace(LOCAL, node_bandwidth=1 << 32), (0, 0), 32 << 10),  # a seek takes less time
        (replace(LOCAL, interconnect_bandwidth=1 << 30), (0, 1), 64 << 10),
        (replace(LOCAL, interconnect_bandwidth=1 << 30), (0, 0, 1, 1), 32 << 10),  # two ranks share a link
        (replace(LOCAL, interconnect_bandwidth=1 << 30), (0, 0, 0, 0), 64 << 10),
        (PRESETS["network_mount"], (0, 1), 1 << 20),  # what a client sends at a time
    ],
)
def test_how_long_rows_must_be_to_be_written_alone_follows_from_the_cost_model(
    cost: CostModel, nodes: tuple[int, ...], limit: int
) -> None:
    assert direct_row_bytes(cost, nodes, 8 << 20) == limit


def test_a_local_disk_exchanges_the_rows_that_were_measured_to_be_slow() -> None:
    """A long write was 1.8 times as fast as rows of 16 KiB, 1.2 times as rows of 64 KiB; an exchange costs as much."""
    assert 32 * KIB <= direct_row_bytes(PRESETS["local"], (0, 0), 8 * MIB) <= 64 * KIB


def test_rows_of_half_a_box_are_not_exchanged() -> None:
    assert direct_row_bytes(PRESETS["network_mount"], (0, 1), 1 << 16) == 1 << 15


def catalogue_of(by_rank: list[list[Target]]) -> dict[str, Held]:
    inventories = [inventory_to_bytes(targets, rank) for rank, targets in enumerate(by_rank)]
    speakers = {ranks[0] for ranks in spokesmen(inventories).values()}
    names = [names_to_bytes(targets) if rank in speakers else b"" for rank, targets in enumerate(by_rank)]
    return make_catalogue(inventories, names)


def test_ranks_learn_all_names_though_few_send_them() -> None:
    rows = MeshLayout((2,), (0, 1), (Split(0, 0),))
    shared = Target(("w10",), "U8", (4, 4), (2, 4), (rows,))
    plain = Target(("w2",), "U8", (3,), (3,))
    expert = Target(("e",), "U8", (2,), (2,))
    by_rank = [[shared, plain], [shared, plain], [expert]]
    inventories = [inventory_to_bytes(targets, rank) for rank, targets in enumerate(by_rank)]
    assert sorted(spokesmen(inventories).values()) == [(0, 1), (2,)]
    catalogue = catalogue_of(by_rank)
    assert list(catalogue) == ["e", "w2", "w10"]
    assert catalogue["w10"] == Held("U8", (4, 4), rows, (0, 1))
    assert catalogue["e"].ranks == (2,)
    assert replica_names(catalogue, 0, check_declared=False) == ["w2"]


def test_one_name_under_two_layouts_is_refused() -> None:
    rows = MeshLayout((2,), (0, 1), (Split(0, 0),))
    mine = Target(("w",), "U8", (4, 4), (2, 4), (rows,))
    with pytest.raises(ShardingError, match=r"ranks disagree about w: rank 0 has .*mesh.*; rank 1 has .*plain tensor"):
        catalogue_of([[mine], [Target(("w",), "U8", (4, 4), (4, 4))]])


def test_the_local_sizes_of_all_ranks_tell_which_layout_is_meant() -> None:
    in_order = MeshLayout((4, 2), tuple(range(8)), (Split(0, 0, 2), Split(1, 0)))
    last = MeshLayout((4, 2), tuple(range(8)), (Split(1, 0), Split(0, 0)))
    by_rank = [[Target(("v",), "U8", (9,), region_at((9,), last, rank).shape, (in_order, last))] for rank in range(8)]
    assert catalogue_of(by_rank)["v"].layout == last


def test_a_local_tensor_no_layout_gives_is_refused() -> None:
    rows = MeshLayout((2,), (0, 1), (Split(0, 0),))
    with pytest.raises(ShardingError, match="w: a rank holds a local tensor"):
        catalogue_of([[Target(("w",), "U8", (4, 4), (3, 4), (rows,))], [Target(("w",), "U8", (4, 4), (2, 4), (rows,))]])
