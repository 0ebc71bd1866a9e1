"""Requests read every wanted byte once, and a hole only where that is cheaper than another request."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from shardferry.convert.ops import Stored
from shardferry.format.index import CheckpointIndex, FileInfo, TensorInfo
from shardferry.geometry.region import Region, box, whole
from shardferry.geometry.spans import region_to_spans
from shardferry.plan.load import Wanted, plan_load
from shardferry.plan.requests import Request, plan_requests
from shardferry.testing.strategies import regions, shapes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def index_of(files: Mapping[str, Sequence[tuple[int, ...]]]) -> CheckpointIndex:
    """Return an index of files that hold U8 tensors of these shapes, one after another."""
    infos, sizes = {}, {}
    for file, held in files.items():
        at = 24
        for position, shape in enumerate(held):
            size = whole(shape).num_elements
            infos[f"{file}.{position}"] = TensorInfo("U8", shape, file, (at, at + size))
            at += size
        sizes[file] = FileInfo(at, 24, "")
    return CheckpointIndex("/", infos, sizes, {})


def spans_of(request: Request) -> list[tuple[int, int]]:
    """Return the bytes of its file that a request is for, piece by piece."""
    found: list[tuple[int, int]] = []
    for _, copy in request.pieces:
        found += [(a, b) for a, b in (region_to_spans(copy.region, copy.shape, 8) + copy.start).tolist()]
    return found


@given(st.data(), st.integers(4, 60), st.integers(0, 20))
def test_every_byte_is_in_one_request_and_holes_are_cheap(data: st.DataObject, max_bytes: int, seek_bytes: int) -> None:
    files = {name: data.draw(st.lists(shapes(), max_size=4)) for name in ("a", "b")}
    index = index_of(files)
    wanted = [
        Wanted(name, Stored(name, info.shape), data.draw(regions(info.shape))) for name, info in index.tensors.items()
    ]
    requests = list(plan_requests(plan_load(index, wanted, seek_bytes), max_bytes=max_bytes))
    read = sorted((request.file, byte) for request in requests for a, b in spans_of(request) for byte in range(a, b))
    expected = sorted(
        (info.file, byte)
        for want, info in zip(wanted, index.tensors.values(), strict=True)
        for a, b in (region_to_spans(want.region, info.shape, 8) + info.span[0]).tolist()
        for byte in range(a, b)
    )
    assert read == expected
    for request in requests:
        if len(request.pieces) > 1:
            spans = spans_of(request)
            assert len(spans) == len(request.pieces)
            assert all(0 <= start - stop < seek_bytes or start == stop for (_, stop), (start, _) in pairwise(spans))
            assert sum(stop - start for start, stop in spans) <= max_bytes
            assert spans[-1][1] - spans[0][0] <= max(max_bytes, seek_bytes)


def small(*held: Region) -> list[Request]:
    index = index_of({"f": [(8, 8)] * len(held)})
    wanted = [Wanted(name, Stored(name, (8, 8)), region) for name, region in zip(index.tensors, held, strict=True)]
    return list(plan_requests(plan_load(index, wanted, seek_bytes=33), max_bytes=200))


def test_neighbours_are_read_by_one_request_up_to_its_size() -> None:
    assert [len(request.pieces) for request in small(*[whole((8, 8))] * 5)] == [3, 2]


def test_a_hole_is_read_along_if_it_is_cheaper_than_a_seek() -> None:
    upper, lower = box((0, 0), (4, 8)), box((4, 0), (4, 8))
    assert [len(request.pieces) for request in small(upper, upper)] == [2]
    assert [len(request.pieces) for request in small(upper, lower)] == [1, 1]


def test_a_request_spans_as_much_as_another_would_cost_for_few_wanted_bytes() -> None:
    files = index_of({"f": [(64,)] * 4})
    wanted = [Wanted(name, Stored(name, (64,)), box((0,), (8,))) for name in files.tensors]

    requests = plan_requests(plan_load(files, wanted, seek_bytes=150), max_bytes=40)

    assert [len(request.pieces) for request in requests] == [3, 1]


def test_a_copy_with_holes_of_its_own_stays_alone() -> None:
    columns = box((0, 0), (8, 4))
    assert [len(request.pieces) for request in small(whole((8, 8)), columns, whole((8, 8)))] == [1, 1, 1]
