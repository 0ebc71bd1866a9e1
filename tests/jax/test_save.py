"""Saves from one process with eight devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

import shardferry
import shardferry.jax as sf
from shardferry import CheckpointExistsError, InvalidInputError
from shardferry.conversions import Convert, Custom
from shardferry.format.dtypes import BITS
from shardferry.geometry.region import Region
from shardferry.jax.sources import ArraySource, Held
from shardferry.plan.save import Write

if TYPE_CHECKING:
    from pathlib import Path

    from tests.tools.s3 import Bucket


def cut(*spec: object) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    return NamedSharding(mesh, PartitionSpec(*spec))


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_what_is_saved_is_loaded_again(tmp_path: Path) -> None:
    tree = {"a": [jax.device_put(numbers(8, 4), cut("a", "b")), numbers(3)], "b": {"c": jax.device_put(2.5, cut())}}
    report = sf.save(tmp_path / "out", tree)
    assert report.files == ("model.safetensors",)
    made = sf.load(tmp_path / "out", tree)
    assert made["a"][0].sharding == cut("a", "b")
    assert jax.tree.all(jax.tree.map(np.array_equal, made, tree))


def test_what_is_saved_to_a_bucket_is_loaded_from_it(bucket: Bucket) -> None:
    tree = {"w": jax.device_put(numbers(8, 4), cut("a", "b")), "column": jax.device_put(numbers(8, 4), cut(None, "b"))}
    report = sf.save(f"s3://{bucket.name}/out", tree, max_shard_size=200)
    assert report.protocol == "upload"
    assert [key.removeprefix("out/") for key in bucket.objects()] == [*report.files, "model.safetensors.index.json"]
    made = sf.load(f"s3://{bucket.name}/out", tree)
    assert jax.tree.all(jax.tree.map(np.array_equal, made, tree))
    with pytest.raises(CheckpointExistsError):
        sf.save(f"s3://{bucket.name}/out", tree)


def test_a_flax_model_is_saved_under_its_key_paths(tmp_path: Path) -> None:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    sf.save(tmp_path / "out", nnx.state(model, nnx.Param))
    assert np.array_equal(load_file(tmp_path / "out" / "model.safetensors")["kernel"], model.kernel[...])


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("spec", [("a",), (None, "a"), (None, None, "a"), ("b", "a"), ()])
def test_a_stacked_array_is_saved_as_its_tensors(tmp_path: Path, dim: int, spec: tuple[str | None, ...]) -> None:
    array = jax.device_put(numbers(8, 8, 8), cut(*spec))
    names = tuple(f"l{at}" for at in range(8))
    sf.save(tmp_path / "out", {"layers": array}, names={"layers": sf.Stacked(names, dim)})
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(saved) == sorted(names)
    assert np.array_equal(np.stack([saved[name] for name in names], dim), numbers(8, 8, 8))


def test_what_a_function_computes_is_saved_and_loaded_again(tmp_path: Path) -> None:
    step = Custom(lambda arrays: arrays[0][::-1], (8, 4), "F32")
    rule = Convert(("w",), ("x",), (step,), back=Convert(("x",), ("w",), (step,)))
    tree = {"x": jax.device_put(numbers(8, 4), cut("a", "b"))}
    sf.save(tmp_path / "out", tree, conversions=[rule])
    assert np.array_equal(load_file(tmp_path / "out" / "model.safetensors")["w"], numbers(8, 4)[::-1])
    assert np.array_equal(sf.load(tmp_path / "out", tree, conversions=[rule])["x"], numbers(8, 4))


# As in files: F4 has two elements in a byte, which NumPy keeps apart.
EVERY: dict[str, Any] = {
    "BOOL": np.bool_,
    "F4": ml_dtypes.float4_e2m1fn,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "C64": np.complex64,
    "F64": np.float64,
    "I64": np.int64,
    "U64": np.uint64,
}


@pytest.mark.parametrize("name", EVERY)
def test_bits_of_every_dtype_are_saved_and_loaded_as_they_are(tmp_path: Path, name: str) -> None:
    dtype = np.dtype(EVERY[name])
    bits = np.random.default_rng(0).integers(0, 256, 16 * 8 * dtype.itemsize, np.uint8)
    bits &= {"BOOL": 1, "F4": 15}.get(name, 255)
    with jax.enable_x64(True):  # noqa: FBT003 - JAX's signature
        array = jax.device_put(bits.view(dtype).reshape(16, 8), cut("a", "b"))
        sf.save(tmp_path / "out", {"w": array})
        made = sf.load(tmp_path / "out", {"w": jax.ShapeDtypeStruct((16, 8), dtype, sharding=cut("b", "a"))})["w"]
    assert shardferry.open_checkpoint(tmp_path / "out").tensors["w"].dtype == name
    stored = (tmp_path / "out/model.safetensors").read_bytes()[-BITS[name] * 16 :]
    assert stored == (bits[::2] | bits[1::2] << 4 if name == "F4" else bits).tobytes()
    assert np.asarray(made).tobytes() == bits.tobytes()


def test_floats_are_cast_when_asked(tmp_path: Path) -> None:
    sf.save(tmp_path / "out", {"w": jax.device_put(numbers(8, 4), cut("a"))}, dtype=jnp.bfloat16)
    saved = sf.load(tmp_path / "out", {"w": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)})
    assert np.array_equal(saved["w"], numbers(8, 4).astype(ml_dtypes.bfloat16))


def test_numpy_arrays_of_64_bits_are_saved_whole(tmp_path: Path) -> None:
    tree = {"ids": np.array([2**40 + 1, -1]), "seeds": np.array([2**63 + 1], np.uint64), "x": np.array([1 + 2**-50])}
    sf.save(tmp_path / "out", tree)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(saved[name].dtype == array.dtype and np.array_equal(saved[name], array) for name, array in tree.items())


def test_existing_checkpoints_are_refused_or_replaced(tmp_path: Path) -> None:
    sf.save(tmp_path / "out", {"w": numbers(3)})
    with pytest.raises(CheckpointExistsError):
        sf.save(tmp_path / "out", {"w": numbers(4)})
    sf.save(tmp_path / "out", {"w": numbers(4)}, on_existing="replace")
    assert np.array_equal(load_file(tmp_path / "out" / "model.safetensors")["w"], numbers(4))


def test_leaves_that_are_no_arrays_are_refused_by_name(tmp_path: Path) -> None:
    model = eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))
    with pytest.raises(InvalidInputError, match=r"^activation, final_activation of the tree are no arrays"):
        sf.save(tmp_path / "out", model)
    sf.save(tmp_path / "out", eqx.filter(model, eqx.is_array))
    with pytest.raises(InvalidInputError, match=r"^w of the tree have a shape but no values"):
        sf.save(tmp_path / "other", {"w": jax.ShapeDtypeStruct((3,), np.float32)})


def test_two_arrays_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="a and b are both called w"):
        sf.save(tmp_path / "out", {"a": numbers(3), "b": numbers(3)}, names=lambda _: "w")


def test_from_an_accelerator_only_what_is_written_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path for devices whose memory the host cannot see, on the CPU."""
    array = jnp.asarray(numbers(6, 8))
    monkeypatch.setattr(Held, "host_bits", lambda *_: None)
    source = ArraySource([Held(((0, 6), (0, 8)), array)], "F32", (6, 8))
    region = Region((((1, 3), (4, 5)), ((2, 6),)))
    write = Write("w", "f", 0, "F32", (6, 8), region, region, "w")
    out = np.empty(3 * 4 * 4, np.uint8)
    assert source.direct(write) is None
    source.fetch(write, out)
    assert np.array_equal(out.view(np.float32).reshape(3, 4), numbers(6, 8)[[1, 2, 4]][:, 2:6])
