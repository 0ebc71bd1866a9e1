"""Every layout a NamedSharding can express: what each device gets, and what is saved again, beside plain NumPy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import shardferry.jax as sf
from shardferry import ShardingError

if TYPE_CHECKING:
    from pathlib import Path

# Per dim the mesh axes that cut it, the first one into the largest pieces.
Spec = tuple[tuple[str, ...], ...]


class Case(NamedTuple):
    """An array of one shape over a mesh.

    Attributes:
        mesh: Size of every axis, by name.
        devices: Number of the device at every position of the mesh, row-major; any order.
        spec: Per dim the axes that cut it; later dims are not cut.
        shape: Of the array.
    """

    mesh: dict[str, int]
    devices: tuple[int, ...]
    spec: Spec
    shape: tuple[int, ...]

    @property
    def sharding(self) -> NamedSharding:
        devices = np.array([jax.devices()[at] for at in self.devices]).reshape(tuple(self.mesh.values()))
        return NamedSharding(Mesh(devices, tuple(self.mesh)), PartitionSpec(*self.spec))

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, np.int32, sharding=self.sharding)


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)


def pieces(case: Case) -> dict[int, np.ndarray]:
    """Return what every device holds, by its number: every dim cut once per axis of its spec, in order."""
    found = {}
    for device, position in zip(case.devices, np.ndindex(*case.mesh.values()), strict=True):
        coordinate = dict(zip(case.mesh, position, strict=True))
        piece = numbered(case.shape)
        for dim, axes in enumerate(case.spec):
            for axis in axes:
                piece = np.split(piece, case.mesh[axis], dim)[coordinate[axis]]
        found[device] = piece
    return found


ALL = tuple(range(8))
SHUFFLED = (6, 7, 1, 2, 0, 4, 5, 3)
FLAT, TWO, CUBE = {"d": 8}, {"data": 4, "model": 2}, {"x": 2, "y": 2, "z": 2}
CASES = {
    "one axis": Case(FLAT, ALL, (("d",),), (24, 3)),
    "inner dim": Case(FLAT, ALL, ((), (), ("d",)), (2, 1, 16)),
    "one element each": Case(FLAT, (1, 0, 2, 3, 7, 6, 4, 5), (("d",),), (8,)),
    "replicated": Case(FLAT, ALL, (), (2, 7, 3)),
    "scalar": Case(TWO, ALL, (), ()),
    "nothing": Case(TWO, ALL, (("model",),), (0, 3)),
    "partly replicated": Case(TWO, ALL, ((), ("data",)), (2, 8)),
    "partly replicated, shuffled": Case(TWO, SHUFFLED, (("model",),), (6, 2)),
    "two dims": Case(TWO, ALL, (("data",), ("model",)), (8, 6)),
    "two dims, minor axis first": Case(TWO, SHUFFLED, (("model",), (), ("data",)), (4, 3, 8)),
    "two axes of a dim": Case(TWO, ALL, (("data", "model"),), (16,)),
    "two axes of a dim, minor first": Case(TWO, ALL, (("model", "data"),), (16,)),
    "two axes of an inner dim, shuffled": Case(TWO, SHUFFLED, ((), ("model", "data")), (3, 8)),
    "three axes of a dim": Case(CUBE, ALL, (("z", "x", "y"),), (16, 2)),
    "axes of a dim with one between": Case(CUBE, SHUFFLED, (("x", "z"), ("y",)), (8, 2)),
    "three dims": Case(CUBE, (0, 2, 4, 6, 1, 3, 5, 7), (("z",), (), ("y",), ("x",)), (6, 2, 4, 2)),
    "half of the devices": Case({"m": 2, "n": 2}, (3, 1, 0, 2), (("n",),), (4, 2)),
    "an axis of one": Case({"p": 1, "q": 4}, (7, 5, 4, 6), (("p",), ("q",)), (3, 8)),
    "one device": Case({"p": 1}, (5,), (("p",),), (3,)),
}


def check(case: Case, folder: Path) -> None:
    """Load an array and save it again: every device has its piece, and the checkpoint comes out as it went in."""
    save_file({"w": numbered(case.shape)}, folder / "model.safetensors")
    made = sf.load(folder, {"w": case.struct})
    held = {shard.device.id: np.asarray(shard.data) for shard in made["w"].addressable_shards}
    assert held.keys() == set(case.devices)
    for device, piece in pieces(case).items():
        assert np.array_equal(held[device], piece), device
    sf.save(folder / "again", made, on_existing="replace")
    again = sf.load(folder / "again", {"w": jax.ShapeDtypeStruct(case.shape, np.int32)})["w"]
    assert np.array_equal(again, numbered(case.shape))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_device_gets_its_piece(tmp_path: Path, case: Case) -> None:
    check(case, tmp_path)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2), (2, 3), (3, 2), (5,), (1, 4), (2, 2)]))
    mesh = dict(zip("xyz", sizes, strict=False))
    devices = draw(st.permutations(ALL))[: math.prod(sizes)]
    dims = draw(st.integers(0, 3))
    spec: list[tuple[str, ...]] = [()] * dims
    for axis in draw(st.permutations(sorted(mesh))) if dims else ():
        dim = draw(st.integers(-1, dims - 1))
        if dim >= 0:
            spec[dim] = (*spec[dim], axis)
    shape = [draw(st.integers(0, 3)) * math.prod(mesh[axis] for axis in axes) for axes in spec]
    return Case(mesh, tuple(devices), tuple(spec), tuple(shape))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_any_layout_gives_every_device_its_piece(tmp_path: Path, case: Case) -> None:
    check(case, tmp_path)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case(FLAT, ALL, (("d",),), (10,)), ("10", "8")),
        (Case({"a": 2, "b": 4}, ALL, (("a",),), (3,)), ("3", "2")),
        (Case({"m": 2, "n": 2}, (0, 1, 2, 3), (("n",), (), ("m",)), (5, 1, 4)), ("5", "2")),
        (Case(TWO, ALL, ((), ("model", "data")), (8, 12)), ("12", "8")),
    ],
)
def test_a_dim_that_does_not_divide_is_refused(tmp_path: Path, case: Case, words: tuple[str, ...]) -> None:
    save_file({"w": numbered(case.shape)}, tmp_path / "model.safetensors")
    with pytest.raises(ShardingError, match=r"^w: the sharding does not fit shape .*divi") as refused:
        sf.load(tmp_path, {"w": case.struct})
    assert all(word in str(refused.value) for word in words)
