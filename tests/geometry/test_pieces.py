"""Pieces of regions hold the elements that plain enumeration says, each once and in order."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from shardferry.geometry.atoms import atoms_of
from shardferry.geometry.pieces import intersect, run_regions, united
from shardferry.geometry.region import Region
from shardferry.geometry.sharding import Sharding
from shardferry.testing.strategies import regions, shapes


def elements(region: Region) -> list[tuple[int, ...]]:
    return list(product(*([i for a, b in dim for i in range(a, b)] for dim in region.dims)))


@given(st.data())
def test_what_two_regions_have_in_common_is_what_both_hold(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    one, other = data.draw(regions(shape)), data.draw(regions(shape))
    common = intersect(one, other)
    expected = sorted(set(elements(one)) & set(elements(other)))
    assert ([] if common is None else elements(common)) == expected


@given(st.data())
def test_united_regions_cover_the_same_elements_once(data: st.DataObject) -> None:
    shape = data.draw(shapes(min_dims=1))
    held = [data.draw(regions(shape)) for _ in range(3)]
    parts = [atom.region for atom in atoms_of(Sharding(shape, tuple(held))) if atom.holders]
    covered = [element for region in united(parts) for element in elements(region)]
    assert sorted(covered) == sorted({element for region in held for element in elements(region)})


def test_columns_of_the_same_rows_become_whole_rows() -> None:
    columns = [Region((((0, 3),), ((start, start + 2),))) for start in (0, 2, 4)]
    assert united(columns) == (Region((((0, 3),), ((0, 6),))),)


@given(st.data())
def test_a_run_of_elements_is_cut_into_few_regions_in_order(data: st.DataObject) -> None:
    region = data.draw(regions(data.draw(shapes())))
    every = elements(region)
    start = data.draw(st.integers(0, len(every)))
    stop = data.draw(st.integers(start, len(every)))
    pieces = list(run_regions(region, start, stop))
    assert [element for piece in pieces for element in elements(piece)] == every[start:stop]
    assert len(pieces) <= max(1, 2 * len(region.dims) - 1)
