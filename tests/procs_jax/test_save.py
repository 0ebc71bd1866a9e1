"""Saves from real JAX jobs of several processes with several devices."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.tools.s3 import Bucket, reaching

import shardferry.jax as sf
import shardferry.torch as sft

if TYPE_CHECKING:
    from pathlib import Path

    from .pool import JaxJobs

# Per tensor shape, dtype and spec on a mesh of axes a and b, whose product is 8. "rows" and "copy" are large enough
# to be cut over their holders, "thin" is exchanged before it is written.
TENSORS: dict[str, tuple[tuple[int, ...], Any, tuple[Any, ...]]] = {
    "rows": ((512, 4096), np.float32, ("a",)),
    "copy": ((256, 4096), np.float32, ()),
    "thin": ((2048, 64), ml_dtypes.bfloat16, (None, ("b", "a"))),
    "both": ((256, 64), np.int32, ("b", "a")),
    "eight": ((64, 8), ml_dtypes.float8_e5m2, ("b",)),
    "packed": ((16, 64), ml_dtypes.float4_e2m1fn, ("a",)),
    "norm": ((40,), np.float16, ()),
    "scalar": ((), np.float32, ()),
    "empty": ((0, 8), np.float32, ("a",)),
}


def values() -> dict[str, np.ndarray]:
    """Return arrays of random bits, the same in every process."""
    random = np.random.default_rng(1)
    made = {}
    for name, (shape, dtype, _) in TENSORS.items():
        bits = np.frombuffer(random.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), np.uint8).copy()
        if np.dtype(dtype) == ml_dtypes.float4_e2m1fn:
            bits &= 0xF
        made[name] = bits.view(dtype).reshape(shape)
    return made


def arrays(mesh_shape: tuple[int, int], order: list[int]) -> dict[str, jax.Array]:
    mesh = Mesh(np.array(jax.devices())[order].reshape(mesh_shape), ("a", "b"))
    made = values()
    return {
        name: jax.make_array_from_callback(
            shape, NamedSharding(mesh, PartitionSpec(*spec)), made[name].__getitem__, dtype=dtype
        )
        for name, (shape, dtype, spec) in TENSORS.items()
    }


def save_all(path: str, mesh_shape: tuple[int, int], order: list[int]) -> list[tuple[int, dict[str, float]]]:
    report = sf.save(path, arrays(mesh_shape, order), max_shard_size="3MB", replicas="check")
    return [(rank.bytes_written, rank.seconds) for rank in report.ranks]


EMPTY = torch.zeros(0, 8)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What torch's side writes of the same tensors."""
    tensors = {}
    for name, array in values().items():
        bits = array.reshape(-1).view(np.uint8)
        dtype = getattr(torch, array.dtype.name, None)
        if array.dtype == ml_dtypes.float4_e2m1fn:
            packed = torch.from_numpy(bits[::2] | bits[1::2] << 4)
            tensors[name] = packed.view(torch.float4_e2m1fn_x2).reshape(array.shape[0], -1)
        else:
            assert dtype is not None
            tensors[name] = torch.frombuffer(bytearray(bits), dtype=dtype).reshape(array.shape) if bits.size else EMPTY
    path = tmp_path_factory.mktemp("torch") / "saved"
    sft.save_state_dict(tensors, path, max_shard_size="3MB")
    return path


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    ("processes", "devices", "mesh_shape", "order"),
    [
        (2, 4, (4, 2), [0, 1, 2, 3, 4, 5, 6, 7]),
        (2, 4, (2, 4), [0, 4, 1, 5, 2, 6, 3, 7]),
        (4, 2, (2, 4), [0, 2, 4, 6, 1, 3, 5, 7]),
        # The devices of a process lie strewn over the mesh: three of a row and one below, or two on a diagonal.
        (2, 4, (2, 4), [0, 1, 2, 4, 3, 5, 6, 7]),
        (4, 2, (2, 4), [0, 2, 4, 6, 3, 1, 7, 5]),
        (1, 8, (4, 2), [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_the_files_are_those_torch_writes(  # noqa: PLR0917 - fixtures and parameters
    jax_job: JaxJobs,
    tmp_path: Path,
    reference: Path,
    processes: int,
    devices: int,
    mesh_shape: tuple[int, int],
    order: list[int],
) -> None:
    reports = jax_job(processes, devices).run(save_all, str(tmp_path / "out"), mesh_shape, order)
    assert content(tmp_path / "out") == content(reference)
    written = [num_bytes for num_bytes, _ in reports[0]]
    assert sum(written) == sum(array.nbytes for name, array in values().items()) - values()["packed"].nbytes // 2
    assert max(written) < 1.2 * min(written) + (1 << 20)


def save_to_and_load_from_a_bucket(endpoint: str, url: str) -> tuple[str, list[str]]:
    """Return how a save has published, and the names of arrays that come back with other bytes."""
    made = arrays((2, 4), [0, 4, 1, 5, 2, 6, 3, 7])
    with reaching(endpoint):
        report = sf.save(url, made, max_shard_size="3MB")
        loaded = sf.load(url, made)
    differ = [name for name, array in made.items() if bits_of(array) != bits_of(loaded[name])]
    return report.protocol, differ


def bits_of(array: jax.Array) -> list[bytes]:
    return [np.asarray(shard.data).tobytes() for shard in array.addressable_shards]


def test_a_bucket_gets_the_files_torch_writes_and_gives_them_back(
    jax_job: JaxJobs, s3_endpoint: str, reference: Path
) -> None:
    bucket = Bucket(s3_endpoint, f"bucket-{secrets.token_hex(4)}")

    told = jax_job(2, 4).run(save_to_and_load_from_a_bucket, s3_endpoint, f"s3://{bucket.name}/ckpt")

    assert told == [("upload", [])] * 2
    assert {key.removeprefix("ckpt/"): bucket.get(key) for key in bucket.objects()} == content(reference)
    assert not bucket.uploads()
