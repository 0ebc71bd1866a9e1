"""Loads in one process with eight devices."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors.numpy import save_file

import shardferry.jax as sf
from shardferry import InvalidInputError, MismatchError, ShardingError
from shardferry.conversions import Convert, Stack, Transpose
from shardferry.format.dtypes import BITS

if TYPE_CHECKING:
    from pathlib import Path


def struct(
    shape: tuple[int, ...], dtype: object = np.float32, sharding: jax.sharding.Sharding | None = None
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def cut(*spec: object, memory_kind: str | None = None) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    return NamedSharding(mesh, PartitionSpec(*spec), memory_kind=memory_kind)


def saved(folder: Path, **tensors: np.ndarray) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def raw(folder: Path, dtype: str, shape: tuple[int, ...], data: bytes) -> Path:
    """Write a checkpoint of one tensor w, given as bytes."""
    header = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    header += b" " * (-len(header) % 8)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    return folder


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_an_array_has_exactly_the_sharding_asked_for(tmp_path: Path) -> None:
    path = saved(tmp_path, w=numbers(8, 4))
    for sharding in (cut("a"), cut("a", None), cut(("b", "a")), cut(None, "b", memory_kind="pinned_host")):
        made = sf.load(path, {"w": struct((8, 4), sharding=sharding)})["w"]
        assert made.sharding == sharding
        assert made.sharding.memory_kind == sharding.memory_kind
        assert np.array_equal(made, numbers(8, 4))


def test_without_a_sharding_an_array_is_on_all_devices(tmp_path: Path) -> None:
    made = sf.load(saved(tmp_path, w=numbers(3)), {"w": struct((3,))})["w"]
    assert made.sharding.is_fully_replicated
    assert made.sharding.device_set == set(jax.devices())


def test_an_array_may_be_on_one_device(tmp_path: Path) -> None:
    here = SingleDeviceSharding(jax.devices()[3])
    made = sf.load(saved(tmp_path, w=numbers(3)), {"w": struct((3,), sharding=here)})["w"]
    assert made.sharding == here


def test_a_donated_array_leaves_its_copies_alone(tmp_path: Path) -> None:
    path = saved(tmp_path, w=numbers(1024))
    first, second = (sf.load(path, {"w": struct((1024,), sharding=cut())})["w"] for _ in range(2))
    jax.jit(lambda x: x + 1, donate_argnums=0)(first).block_until_ready()
    assert np.array_equal(second, numbers(1024))


@jax.tree_util.register_dataclass
@dataclass
class Block:
    weight: Any
    more: list[Any]


def test_names_are_key_paths_through_lists_dicts_and_dataclasses(tmp_path: Path) -> None:
    path = saved(tmp_path, **{"block.weight": numbers(4), "block.more.0": numbers(2), "block.more.1.x": numbers(3)})
    made = sf.load(path, {"block": Block(struct((4,)), [struct((2,)), {"x": struct((3,))}])})
    assert isinstance(made["block"], Block)
    assert np.array_equal(made["block"].more[1]["x"], numbers(3))


def test_a_flax_state_is_loaded_with_its_variables(tmp_path: Path) -> None:
    model = nnx.eval_shape(lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    made = nnx.merge(graph, sf.load(saved(tmp_path, kernel=numbers(3, 2), bias=numbers(2)), state))
    assert np.array_equal(made(jnp.ones((1, 3))), np.ones((1, 3)) @ numbers(3, 2) + numbers(2))


def test_an_equinox_module_keeps_its_functions(tmp_path: Path) -> None:
    shapes = eqx.filter_eval_shape(lambda: eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0)))
    tensors = {
        f"layers.{at}.{name}": numbers(*((2, 2) if name == "weight" else (2,)))
        for at in (0, 1)
        for name in ("weight", "bias")
    }
    model = sf.load(saved(tmp_path, **tensors), shapes)
    assert model.activation is shapes.activation
    assert np.array_equal(model.layers[1].weight, numbers(2, 2))


@pytest.mark.parametrize("names", [{"here": "there"}, {"here": "there"}.get])
def test_a_mapping_or_a_function_says_what_the_checkpoint_calls_an_array(tmp_path: Path, names: sf.Names) -> None:
    made = sf.load(saved(tmp_path, there=numbers(4)), {"here": struct((4,))}, names=names)
    assert np.array_equal(made["here"], numbers(4))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("spec", [("a",), (None, "a"), (None, None, "a"), (None, ("b", "a")), ("b", "a"), ()])
def test_named_tensors_are_stacked(tmp_path: Path, dim: int, spec: tuple[Any, ...]) -> None:
    layers = [numbers(8, 8) + at for at in range(8)]
    path = saved(tmp_path, **{f"l{at}": layer for at, layer in enumerate(layers)})
    target = {"layers": struct((8, 8, 8), sharding=cut(*spec))}
    names = sf.Stacked(tuple(f"l{at}" for at in range(8)), dim)
    assert np.array_equal(sf.load(path, target, names={"layers": names})["layers"], np.stack(layers, dim))


def test_a_list_of_names_is_stacked_along_a_new_first_dim(tmp_path: Path) -> None:
    path = saved(tmp_path, x=numbers(4), y=numbers(4) + 1)
    made = sf.load(path, {"both": struct((2, 4))}, names={"both": ["x", "y"]})["both"]
    assert np.array_equal(made, [numbers(4), numbers(4) + 1])
    with pytest.raises(InvalidInputError, match=r"^both: 1 names are stacked along dim 0, but its shape is \[2, 4\]"):
        sf.load(path, {"both": struct((2, 4))}, names={"both": ["x"]})


@pytest.mark.parametrize("spec", [("a",), (None, "a"), (("b", "a"), None), ("b", "a"), ()])
def test_conversions_turn_the_checkpoints_tensors_into_the_trees(tmp_path: Path, spec: tuple[Any, ...]) -> None:
    layers = [numbers(16, 8) + at for at in range(8)]
    path = saved(tmp_path, **{f"h.{at}.proj.weight": layer for at, layer in enumerate(layers)})
    rule = Convert(("h.{l}.proj.weight",), ("proj.kernel",), (Stack(0), Transpose(1, 2)))
    target = {"proj": {"kernel": struct((8, 8, 16), sharding=cut(*spec))}}
    made = sf.load(path, target, conversions=[rule])
    assert np.array_equal(made["proj"]["kernel"], np.stack([layer.T for layer in layers]))


def test_none_leaves_an_array_out(tmp_path: Path) -> None:
    target = {"a": struct((4,)), "b": struct((4,))}
    made = sf.load(saved(tmp_path, a=numbers(4)), target, names={"b": None})
    assert made["b"] is target["b"]


def test_missing_and_unexpected_names_are_one_error_or_are_reported(tmp_path: Path) -> None:
    path, target = (
        saved(tmp_path, a=numbers(8), c=numbers(1)),
        {"a": struct((8,)), "b": struct((8,), sharding=cut("a"))},
    )
    with pytest.raises(MismatchError, match=r"(?s)missing \(1;.*    b\n.*unexpected \(1;.*    c"):
        sf.load(path, target)
    reports: list[sf.LoadReport] = []
    made = sf.load(path, target, strict=False, on_report=reports.append)
    assert (reports[0].missing, reports[0].unexpected) == (("b",), ("c",))
    assert made["b"] is target["b"]


def test_a_wrong_shape_is_told_once_however_many_parts_it_has(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"shape \(1; the shapes differ\):\n    w: model \[8\], checkpoint \[4\]$"):
        sf.load(saved(tmp_path, w=numbers(4)), {"w": struct((8,), sharding=cut("a"))})


def test_a_sharding_that_does_not_divide_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ShardingError, match=r"^w: the sharding does not fit shape \[6\]"):
        sf.load(saved(tmp_path, w=numbers(6)), {"w": struct((6,), sharding=cut("a"))})


def test_a_sharding_left_to_the_compiler_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardingError, match=r"^w: .* leaves a dim to the compiler"):
        sf.load(saved(tmp_path, w=numbers(8)), {"w": struct((8,), sharding=cut(PartitionSpec.UNCONSTRAINED))})


def test_64_bits_are_never_cut_in_silence(tmp_path: Path) -> None:
    path = saved(tmp_path, w=np.arange(3))
    with pytest.raises(InvalidInputError, match=r"^w: JAX would silently truncate int64 to 32 bits"):
        sf.load(path, {"w": struct((3,), np.int64)})
    with pytest.raises(MismatchError, match="w: model I32, checkpoint I64"):
        sf.load(path, {"w": struct((3,), np.int32)})
    with jax.enable_x64(True):  # noqa: FBT003 - JAX's signature
        assert np.array_equal(sf.load(path, {"w": struct((3,), np.int64)})["w"], np.arange(3))


@pytest.mark.parametrize(("stored", "wanted"), [(np.int64, np.int32), (np.uint64, np.uint32)])
@pytest.mark.parametrize("on_host", [True, False])
def test_integers_lose_their_upper_half_when_asked_and_only_if_it_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: type, wanted: type, *, on_host: bool
) -> None:
    monkeypatch.setattr("shardferry.jax.filler.is_on_host", lambda _: on_host)
    limits = np.iinfo(wanted)
    values: np.ndarray = np.array([limits.min, 0, 1, limits.max], stored)
    target = {"ids.weight": struct((4,), wanted, sharding=cut("a"))}
    reports: list[sf.LoadReport] = []
    made = sf.load(saved(tmp_path, **{"ids.weight": values}), target, cast="integers", on_report=reports.append)
    assert made["ids.weight"].dtype == wanted
    assert np.array_equal(made["ids.weight"], values)
    assert reports[0].total.num_cast == 4
    values[2] = int(limits.max) + 1
    with pytest.raises(MismatchError, match=rf"^ids.weight: the checkpoint holds {values[2]}, which does not fit"):
        sf.load(saved(tmp_path, **{"ids.weight": values}), target, cast="integers")


@pytest.mark.parametrize(("stored", "wanted"), [("I64", np.uint32), ("U64", np.int32), ("I32", np.int16)])
def test_other_integers_are_never_cast(tmp_path: Path, stored: str, wanted: type) -> None:
    path = raw(tmp_path, stored, (2,), bytes(2 * BITS[stored] // 8))
    with pytest.raises(MismatchError, match=rf"w: model \w+, checkpoint {stored}"):
        sf.load(path, {"w": struct((2,), wanted)}, cast="integers")


def test_an_unknown_cast_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cast is 'ints'; it must be False, True or 'integers'"):
        sf.load(saved(tmp_path, w=numbers(3)), {"w": struct((3,))}, cast="ints")  # type: ignore[arg-type]


def test_floats_are_cast_when_the_target_says_so(tmp_path: Path) -> None:
    values = np.array([1.5, 3e38, 1e-8, -2], np.float64)
    path = saved(tmp_path, w=values)
    made = sf.load(path, {"w": struct((4,), np.float32, sharding=cut("a"))})["w"]
    assert np.array_equal(made, values.astype(np.float32))
    with pytest.warns(UserWarning, match="1 finite values became infinite"):
        half = sf.load(path, {"w": struct((4,), np.float16)})["w"]
    assert half.dtype == np.float16
    with pytest.raises(MismatchError, match="w: model F32, checkpoint F64"):
        sf.load(path, {"w": struct((4,))}, cast=False)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.float8_e4m3, ml_dtypes.float6_e2m3fn])
def test_a_dtype_files_cannot_hold_is_refused_by_name(tmp_path: Path, dtype: object) -> None:
    with pytest.raises(InvalidInputError, match=r"^w: safetensors files cannot hold"):
        sf.load(saved(tmp_path, w=numbers(3)), {"w": struct((3,), dtype)})


def test_a_random_key_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"^k: safetensors files cannot hold key<fry>"):
        sf.load(saved(tmp_path, w=numbers(3)), {"k": jax.eval_shape(lambda: jax.random.key(0))})


NARROW = {
    "BOOL": np.bool_,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "C64": np.complex64,
}


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("spec", [("a",), (None, "b"), ()])
def test_bits_arrive_as_they_are_stored(tmp_path: Path, name: str, spec: tuple[Any, ...]) -> None:
    bits = np.random.default_rng(0).bytes(256 * BITS[name] // 8)
    if name == "BOOL":
        bits = bytes(byte & 1 for byte in bits)
    made = sf.load(raw(tmp_path, name, (16, 16), bits), {"w": struct((16, 16), NARROW[name], sharding=cut(*spec))})["w"]
    assert np.asarray(made).tobytes() == bits


@pytest.mark.parametrize("spec", [("a",), (None, "b"), (("b", "a"), None), ()])
def test_packed_elements_are_taken_apart(tmp_path: Path, spec: tuple[Any, ...]) -> None:
    packed = np.random.default_rng(0).bytes(16 * 32 // 2)
    target = {"w": struct((16, 32), ml_dtypes.float4_e2m1fn, sharding=cut(*spec))}
    made = sf.load(raw(tmp_path, "F4", (16, 32), packed), target)["w"]
    elements = [half for byte in packed for half in (byte & 15, byte >> 4)]
    assert np.asarray(made).view(np.uint8).reshape(-1).tolist() == elements


def test_a_process_that_holds_both_halves_may_cut_a_packed_byte(tmp_path: Path) -> None:
    target = {"w": struct((2, 2), ml_dtypes.float4_e2m1fn, sharding=cut(None, "b"))}
    made = sf.load(raw(tmp_path, "F4", (2, 2), b"\x21\x43"), target)["w"]
    assert np.asarray(made).view(np.uint8).tolist() == [[1, 2], [3, 4]]


def test_parts_for_accelerators_are_sent_when_they_are_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path for devices that do not use host memory as it is, on the CPU."""
    monkeypatch.setattr("shardferry.jax.filler.is_on_host", lambda _: False)
    tensors = {f"w{at}": numbers(256, 4096) + at for at in range(6)}
    path = saved(tmp_path, **tensors, empty=numbers(0, 8), one=np.array(3, np.float32))
    specs = [("a",), (None, "a"), (("b", "a"), None), ("b", "a"), (), (None, "b")]
    target = {name: struct((256, 4096), sharding=cut(*spec)) for name, spec in zip(tensors, specs, strict=True)}
    reports: list[sf.LoadReport] = []
    target |= {"empty": struct((0, 8), sharding=cut("a")), "one": struct((), np.float16)}
    made = sf.load(path, target, budget_bytes=8 << 20, on_report=reports.append)
    assert made["empty"].shape == (0, 8)
    assert made["one"] == 3
    for name, right in tensors.items():
        assert made[name].sharding == target[name].sharding
        assert np.array_equal(made[name], right)
    assert reports[0].total.num_cast == 1
    assert reports[0].total.peak_extra_bytes < 14 << 20


def test_a_mapping_of_what_is_not_in_the_tree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="names= has gone, but the tree has no such key path"):
        sf.load(saved(tmp_path, w=numbers(3)), {"w": struct((3,))}, names={"gone": "w"})


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unknown option read_twice; a load takes budget_bytes"):
        sf.load(saved(tmp_path, w=numbers(3)), {"w": struct((3,))}, read_twice=True)  # type: ignore[call-arg]
