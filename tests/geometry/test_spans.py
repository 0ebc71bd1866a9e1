"""Spans are where NumPy says the bytes are."""

from __future__ import annotations

import itertools
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardferry.errors import InvalidInputError
from shardferry.geometry.region import box, whole
from shardferry.geometry.spans import collapse, flat_span, merge_spans, region_to_spans
from shardferry.testing.strategies import regions, shapes

from .oracle import gather, numbered


@given(st.data(), st.sampled_from([8, 16, 32, 64]))
def test_spans_are_the_bytes_of_the_local_tensor_in_its_own_order(data: st.DataObject, bits: int) -> None:
    shape = data.draw(shapes())
    region = data.draw(regions(shape))
    width = bits // 8
    elements = gather(numbered(shape), region).reshape(-1)
    wanted = (elements[:, None] * width + np.arange(width)).reshape(-1).tolist()
    spans = region_to_spans(region, shape, bits)
    assert [byte for start, stop in spans.tolist() for byte in range(start, stop)] == wanted
    assert (spans[1:, 0] > spans[:-1, 1]).all(), "spans that touch are one span"
    assert collapse(region, shape, bits).num_bytes == len(wanted)


@given(st.data(), st.sampled_from([4, 6]))
def test_packed_dtypes_are_cut_at_whole_bytes_or_refused(data: st.DataObject, bits: int) -> None:
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)) * 4
    region = data.draw(regions((rows, columns)))
    held = gather(numbered((rows, columns)), region).reshape(-1)
    bit_list = [element * bits + bit for element in held.tolist() for bit in range(bits)]
    runs = [bit for at, bit in enumerate(bit_list) if at == 0 or bit_list[at - 1] != bit - 1]
    aligned = all(bit % 8 == 0 for bit in runs) and all(
        (bit + 1) % 8 == 0 for at, bit in enumerate(bit_list) if at == len(bit_list) - 1 or bit_list[at + 1] != bit + 1
    )
    if not aligned:
        with pytest.raises(InvalidInputError, match="byte"):
            region_to_spans(region, (rows, columns), bits)
        return
    spans = region_to_spans(region, (rows, columns), bits)
    assert [byte for start, stop in spans.tolist() for byte in range(start * 8, stop * 8)] == bit_list


@given(st.data(), st.sampled_from([4, 8, 16]))
def test_a_box_is_flat_if_its_bytes_lie_together(data: st.DataObject, bits: int) -> None:
    shape = [size + 1 for size in data.draw(shapes())]
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    place = [(start, data.draw(st.integers(start + 1, size))) for start, size in zip(starts, shape, strict=True)]
    region = box([start for start, _ in place], [stop - start for start, stop in place])
    try:
        spans = region_to_spans(region, tuple(shape), bits).tolist()
    except InvalidInputError:
        with suppress(InvalidInputError):
            assert flat_span(place, shape, bits) is None
        return
    span = flat_span(place, shape, bits)
    assert spans == [list(span)] if span else len(spans) > 1


def test_a_cut_of_the_first_dim_is_one_span() -> None:
    assert region_to_spans(box((2, 0, 0), (3, 4, 5)), (8, 4, 5), 16).tolist() == [[80, 200]]


def test_a_scalar_is_one_span_of_its_width() -> None:
    assert region_to_spans(whole(()), (), 32).tolist() == [[0, 4]]


def test_tensors_above_2_to_the_31_elements_do_not_overflow() -> None:
    shape = (1 << 17, 1 << 17)
    assert region_to_spans(box((shape[0] - 1, 4), (1, 2)), shape, 16).tolist() == [[34359476232, 34359476236]]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=8), st.integers(0, 5))
def test_merging_covers_the_same_bytes_and_bridges_only_small_holes(pairs: list[tuple[int, int]], gap: int) -> None:
    spans = np.array([(start, start + length) for start, length in pairs], np.int64).reshape(-1, 2)
    merged = merge_spans(spans, gap).tolist()
    covered = {byte for start, stop in spans.tolist() for byte in range(start, stop)}
    assert covered <= {byte for start, stop in merged for byte in range(start, stop)}
    assert all(second[0] - first[1] > gap for first, second in itertools.pairwise(merged))
    for start, stop in merged:
        holes = [byte for byte in range(start, stop) if byte not in covered]
        longest = max(
            (sum(1 for other in range(byte, stop) if set(range(byte, other + 1)) <= set(holes)) for byte in holes),
            default=0,
        )
        assert longest <= gap
