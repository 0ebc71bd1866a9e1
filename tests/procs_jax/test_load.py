"""Loads in real JAX jobs of several processes with several devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors.numpy import load_file, save_file

import shardferry.jax as sf

if TYPE_CHECKING:
    from pathlib import Path

    from shardferry.plan.estimate import ReadOnce

    from .pool import JaxJobs

# Shapes that divide by 8 in the dims that are cut; bytes are random, so NaNs of every kind are among them. Those of the
# floats here XLA changes when it moves them.
SHAPES = {
    "tall": (64, 24),
    "wide": (8, 4096),
    "thin": (512, 16),
    "three": (4, 8, 8),
    "norm": (40,),
    "scalar": (),
    "empty": (0, 8),
    "odd": (7, 8),
}
DTYPES = (np.uint32, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2)
# Per tensor the specs it can have on a mesh of axes a and b, whose product is 8.
SPECS: dict[str, list[tuple[Any, ...]]] = {
    "tall": [(), ("a",), ("b",), (("a", "b"),), (("b", "a"),), ("a", "b"), ("b", "a")],
    "wide": [(None, "a"), (None, ("b", "a")), (None, ("a", "b")), ("a", "b"), ()],
    "thin": [(None, "a"), (None, ("b", "a")), ("b", "a"), ("a", "b")],
    "three": [("a", None, "b"), (None, ("a", "b")), (None, "b", None)],
    "norm": [("a",), (("b", "a"),), ()],
    "scalar": [()],
    "empty": [("a",), (), (None, "b")],
    "odd": [(None, "a"), ()],
}


def tensors() -> dict[str, np.ndarray]:
    """Return arrays of random bits, the same in every process."""
    random = np.random.default_rng(0)
    return {
        f"{name}.{np.dtype(dtype)}": np.frombuffer(
            random.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype
        ).reshape(shape)
        for name, shape in SHAPES.items()
        for dtype in DTYPES
    }


def load_every_spec(path: str, mesh_shape: tuple[int, int], order: list[int], read_once: ReadOnce) -> list[str]:
    """Load all tensors under all specs and return what is not as NumPy cuts it."""
    mesh = Mesh(np.array(jax.devices())[order].reshape(mesh_shape), ("a", "b"))
    stored = tensors()
    target, names = {}, {}
    for name, array in stored.items():
        for spec in SPECS[name.split(".")[0]]:
            key = f"{name} {spec}".replace(".", "_")
            sharding = NamedSharding(mesh, PartitionSpec(*spec))
            target[key] = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
            names[key] = name
    wrong = []
    # One spec of each tensor at a time: two arrays of a tree do not have the same name.
    for at in range(max(map(len, SPECS.values()))):
        chosen = {}
        for name in stored:
            keys = [key for key in target if names[key] == name]
            chosen[keys[at % len(keys)]] = target[keys[at % len(keys)]]
        nodes = [0] * jax.process_count()
        made = sf.load(path, chosen, names=names.get, read_once=read_once, node_of_rank=nodes, exchange_bytes=1 << 20)
        for key, array in made.items():
            right = stored[names[key]]
            if array.sharding != chosen[key].sharding or array.dtype != right.dtype:
                wrong.append(f"{key}: {array.sharding}")
            wrong += [
                f"{key}: {shard.index}"
                for shard in array.addressable_shards
                if np.asarray(shard.data).tobytes() != right[shard.index].tobytes()
            ]
    return wrong


@pytest.mark.parametrize("read_once", ["never", "always"])
@pytest.mark.parametrize(
    ("processes", "devices", "mesh_shape", "order"),
    [
        (2, 4, (4, 2), [0, 1, 2, 3, 4, 5, 6, 7]),
        (2, 4, (2, 4), [0, 4, 1, 5, 2, 6, 3, 7]),
        (2, 4, (2, 4), [0, 1, 5, 4, 6, 7, 2, 3]),
        (4, 2, (4, 2), [0, 1, 2, 3, 4, 5, 6, 7]),
        (4, 2, (2, 4), [0, 2, 4, 6, 1, 3, 5, 7]),
    ],
)
def test_every_process_gets_what_its_devices_hold(  # noqa: PLR0917 - fixtures and parameters
    jax_job: JaxJobs,
    tmp_path: Path,
    processes: int,
    devices: int,
    mesh_shape: tuple[int, int],
    order: list[int],
    read_once: ReadOnce,
) -> None:
    sf.save(tmp_path, tensors())
    job = jax_job(processes, devices)
    assert job.run(load_every_spec, str(tmp_path), mesh_shape, order, read_once) == [[]] * processes


def load_replicated(path: str) -> tuple[int, int, int, list[str]]:
    """Load odd shapes that every process wants, two ways of cutting them; return bytes read and sent by all."""
    mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("data", "model"))
    stored = load_file(f"{path}/model.safetensors")
    specs = {"embed": PartitionSpec(None, "model"), "up": PartitionSpec("model"), "odd": PartitionSpec()}
    target = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, specs[name]))
        for name, array in stored.items()
    }
    reports: list[sf.LoadReport] = []
    nodes = [0] * jax.process_count()
    made = sf.load(path, target, read_once="always", node_of_rank=nodes, on_report=reports.append)
    wrong = [
        f"{name} {shard.index}"
        for name, array in made.items()
        for shard in array.addressable_shards
        if np.asarray(shard.data).tobytes() != stored[name][shard.index].tobytes()
    ]
    total = reports[0].total
    return total.bytes_read, total.bytes_sent, sum(array.nbytes for array in stored.values()), wrong


@pytest.mark.parametrize(("processes", "devices"), [(2, 4), (4, 2)])
def test_what_all_want_is_read_once_and_sent_to_each_other_once(
    jax_job: JaxJobs, tmp_path: Path, processes: int, devices: int
) -> None:
    random = np.random.default_rng(2)
    shapes = {"embed": (4001, 64), "up": (1024, 501), "odd": (1021, 503)}
    arrays = {name: np.frombuffer(random.bytes(2 * a * b), np.uint16).reshape(a, b) for name, (a, b) in shapes.items()}
    save_file(arrays, tmp_path / "model.safetensors")
    for read, sent, total, wrong in jax_job(processes, devices).run(load_replicated, str(tmp_path)):
        assert not wrong
        assert total <= read <= 1.02 * total
        assert sent == (processes - 1) * total


def count_programs(path: str) -> list[int]:
    """Return how many programs two loads compile, the second one of arrays of other shapes, and one program."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:  # noqa: ARG001 - called so
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    mesh = Mesh(np.array(jax.devices()), ("all",))
    whole, counts = NamedSharding(mesh, PartitionSpec()), []
    jax.monitoring.register_event_duration_secs_listener(listen)
    for name in ("first", "second"):
        target = {
            key: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=whole)
            for key, array in load_file(f"{path}/{name}.safetensors").items()
        }
        compiled.clear()
        sf.load(f"{path}/{name}.safetensors", target, read_once="always", node_of_rank=[0] * jax.process_count())
        counts.append(len(compiled))
    compiled.clear()
    jax.jit(lambda: 1)()
    jax.monitoring.unregister_event_duration_listener(listen)
    return [*counts, len(compiled)]


def test_arrays_of_other_shapes_travel_by_the_same_programs(jax_job: JaxJobs, tmp_path: Path) -> None:
    """Each carrier size is a program: compiling takes as long as sending some megabytes."""
    first: dict[str, tuple[int, ...]] = {"a": (3, 1 << 20), "b": (7, 11)}
    second: dict[str, tuple[int, ...]] = {"a": (5, 999_983), "b": (13,), "c": (4, 4, 4)}
    for file, shapes in (("first", first), ("second", second)):
        arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
        save_file(arrays, tmp_path / f"{file}.safetensors")
    for in_first, in_second, in_one in jax_job(2, 4).run(count_programs, str(tmp_path)):
        assert in_first <= 3
        assert (in_second, in_one) == (0, 1)


def load_what_is_local(path: str) -> list[str]:
    """Load and save arrays on devices of this process alone, and one that no sharding is given for."""
    here = jax.local_devices()
    shardings = {
        "one": SingleDeviceSharding(here[-1]),
        "copies": NamedSharding(Mesh(np.array(here), ("x",)), PartitionSpec()),
        "cut": NamedSharding(Mesh(np.array(here), ("x",)), PartitionSpec("x")),
        "everywhere": None,
    }
    target = {name: jax.ShapeDtypeStruct((8, 4), np.float32, sharding=sharding) for name, sharding in shardings.items()}
    made = sf.load(path, target)
    sf.save(f"{path}/again", made)
    again = load_file(f"{path}/again/model.safetensors")
    assert made["everywhere"].sharding.device_set == set(jax.devices())
    return [
        name
        for name, sharding in shardings.items()
        if (sharding and made[name].sharding != sharding)
        or any(not np.array_equal(shard.data, NUMBERS[shard.index]) for shard in made[name].addressable_shards)
        or not np.array_equal(again[name], NUMBERS)
    ]


NUMBERS = np.arange(32, dtype=np.float32).reshape(8, 4)


@pytest.mark.parametrize(("processes", "devices"), [(2, 4), (1, 1)])
def test_arrays_may_be_on_devices_of_one_process(
    jax_job: JaxJobs, tmp_path: Path, processes: int, devices: int
) -> None:
    save_file(dict.fromkeys(("one", "copies", "cut", "everywhere"), NUMBERS), tmp_path / "model.safetensors")
    assert jax_job(processes, devices).run(load_what_is_local, str(tmp_path)) == [[]] * processes
