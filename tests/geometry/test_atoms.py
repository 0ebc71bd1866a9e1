"""Atoms cover every element once and know exactly who holds it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardferry.geometry.atoms import atoms_of, uncovered
from shardferry.geometry.region import Region, box, whole
from shardferry.geometry.sharding import Sharding, mesh_sharding
from shardferry.testing.strategies import mesh_layouts, regions, shapes

from .oracle import gather, numbered


def check_atoms(sharding: Sharding) -> None:
    array = numbered(sharding.shape)
    held = [set(gather(array, r).reshape(-1).tolist()) if r is not None else set() for r in sharding.regions]
    seen: dict[int, tuple[int, ...]] = {}
    for atom in atoms_of(sharding):
        for element in gather(array, atom.region).reshape(-1).tolist():
            assert element not in seen
            seen[element] = atom.holders
    truth = {e: tuple(r for r, mine in enumerate(held) if e in mine) for e in range(array.size)}
    assert seen == truth


@given(st.data())
def test_atoms_of_a_mesh_layout(data: st.DataObject) -> None:
    shape = data.draw(shapes(min_dims=1))
    layout = data.draw(mesh_layouts(len(shape)))
    check_atoms(mesh_sharding(shape, layout, len(layout.ranks) + 1))


@given(st.data())
def test_atoms_of_any_regions(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    count = data.draw(st.integers(1, 4))
    held = [data.draw(st.one_of(st.none(), regions(shape))) for _ in range(count)]
    check_atoms(Sharding(shape, tuple(held)))


def test_a_layout_of_many_intervals_has_few_atoms() -> None:
    """A packed weight cut over 64 ranks is 64 atoms of two intervals, not 128 boxes."""
    packed = tuple(Region((((r, r + 1), (64 + r, 65 + r)), ((0, 4),))) for r in range(64))
    assert len(atoms_of(Sharding((128, 4), packed))) == 64


def test_elements_nobody_holds_are_found() -> None:
    missing = uncovered(Sharding((4, 4), (box((0, 0), (2, 4)), box((2, 0), (2, 2)))))
    assert [region.dims for region in missing] == [(((2, 4),), ((2, 4),))]
    assert uncovered(Sharding((4, 4), (whole((4, 4)), None))) == ()


def test_a_scalar_is_one_atom() -> None:
    assert [atom.holders for atom in atoms_of(Sharding((), (whole(()), None, whole(()))))] == [(0, 2)]
