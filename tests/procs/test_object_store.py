"""A job of real processes and a bucket: sharded saves and loads, what they cost the server, and failing together."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import pytest
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from tests.tools.s3 import Bucket, reaching
from tests.tools.servers import Fault, Proxy, proxy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardferry.torch as sf

from .test_load_layouts import Block, local, numbered, shard_fsdp, shard_tp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .pool import RankPool

ROWS = 1 << 16
# Columns of a row of 2 MiB, which is too long to be read whole.
COLUMNS = 1 << 19
# Opening, where everything is well, has a share of this: a request may bring nothing for 3 s, and is made again once.
TIMEOUT_S = 9.0
# Requests that are not for the first bytes of a file.
TENSORS = r"GET .*bytes=(?!0-131071)"


@pytest.fixture
def store(s3_endpoint: str) -> Iterator[tuple[Bucket, Proxy]]:
    with proxy(s3_endpoint) as state:
        yield Bucket(s3_endpoint, f"bucket-{secrets.token_hex(4)}"), state


def block() -> Block:
    model = Block(ROWS)
    model.load_state_dict(numbered(model))
    return model


def save_on_each_rank(endpoint: str, url: str) -> tuple[int, int]:
    with reaching(endpoint):
        model = block()
        shard_fsdp(model)
        total = sf.save_model(model, url, max_shard_size="2MB").total
        return total.bytes_written, total.peak_extra_bytes


def load_on_each_rank(
    endpoint: str, url: str, sharder: str, nodes: list[int], timeout_s: float = 600.0
) -> tuple[int, int]:
    with reaching(endpoint):
        model = Block(ROWS)
        {"fsdp": shard_fsdp, "tp": shard_tp}[sharder](model)
        total = sf.load_model(model, url, node_of_rank=nodes, timeout_s=timeout_s).total
    expected = block()
    {"fsdp": shard_fsdp, "tp": shard_tp}[sharder](expected)
    for (name, one), two in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(local(one), local(two)), name
    return total.bytes_read, total.requests


def whole(bucket: Bucket) -> dict[str, torch.Tensor]:
    files = [bucket.get(key) for key in bucket.objects() if key.endswith(".safetensors")]
    return {name: value for file in files for name, value in load_bytes(file).items()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_sharded_model_is_saved_to_a_bucket_and_loaded_from_it(
    ranks: RankPool, store: tuple[Bucket, Proxy], world_size: int
) -> None:
    bucket, state = store
    url = f"s3://{bucket.name}/ckpt"

    ranks(world_size).run(save_on_each_rank, state.url, url)

    saved, expected = whole(bucket), numbered(block())
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    assert not bucket.uploads()
    size = sum(len(bucket.get(key)) for key in bucket.objects())
    for sharder in ("fsdp", "tp"):
        state.reset()
        told = ranks(world_size).run(load_on_each_rank, state.url, url, sharder, list(range(world_size)))
        headers = sum(line.endswith("bytes=0-131071") for line in state.log)  # more than they are, by one rank
        assert headers <= len(bucket.objects()), sharder
        assert state.sent <= 1.02 * size + headers * 131_072, sharder
        assert told[0] == told[1]


class Strided(nn.Module):
    """Tensors cut along their inner dim: of short rows, of which whole ones are read, and of long ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, ROWS)
        self.down = nn.Linear(ROWS, 8)
        self.wide = nn.Linear(COLUMNS, 4)


def shard_strided(model: nn.Module, mesh_shape: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("fsdp", "tp"))
    parallelize_module(
        model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel(), "wide": RowwiseParallel()}
    )
    if mesh_shape[0] > 1:
        fully_shard(model, mesh=mesh["fsdp"])


def load_as_planned(
    endpoint: str, url: str, mesh_shape: tuple[int, int], read_once: Literal["always", "never"]
) -> dict[str, int]:
    """Plan a load and make it; return what was planned and what the report says."""
    with reaching(endpoint), torch.device("meta"):
        model = Strided()
    shard_strided(model, mesh_shape)
    with reaching(endpoint):
        estimate = sf.plan_load(model, url, node_of_rank=[0, 0, 1, 1], read_once=read_once)
        total = sf.load_model(model, url, node_of_rank=[0, 0, 1, 1], read_once=read_once).total
    expected = Strided()
    expected.load_state_dict(numbered(expected))
    shard_strided(expected, mesh_shape)
    for (name, one), two in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(local(one), local(two)), name
    price = estimate.price(estimate.chosen)
    return {
        "planned runs": int(price.node_requests.sum()),
        "planned bytes": price.storage_bytes,
        "bytes": total.bytes_read,
        "requests": total.requests,
    }


def spans_asked_for(state: Proxy) -> list[tuple[int, int]]:
    """Return the ranges of requests for tensors, ascending; there is one file."""
    asked = (line.rpartition("bytes=")[2].split("-") for line in state.log if re.search(TENSORS, line))
    return sorted((int(start), int(last) + 1) for start, last in asked)


@pytest.fixture
def strided(request: pytest.FixtureRequest) -> Iterator[tuple[str, Proxy]]:
    """Give the URL of a stored `Strided`, in a bucket or on a web server, and what counts the requests for it."""
    content = save_bytes(numbered(Strided()), {"format": "pt"})
    if request.param == "s3":
        bucket, state = request.getfixturevalue("store")
        bucket.put("model.safetensors", content)
        yield f"s3://{bucket.name}", state
        return
    server, root = request.getfixturevalue("web")
    folder = root / secrets.token_hex(4)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    with proxy(server) as state:
        yield f"{state.url}/{folder.name}", state


@pytest.mark.parametrize("read_once", ["never", "always"])
@pytest.mark.parametrize(
    ("strided", "mesh_shape"), [("s3", (1, 4)), ("s3", (2, 2)), ("http", (1, 4))], indirect=["strided"]
)
def test_strided_shards_ask_a_server_for_no_more_than_was_planned(
    ranks: RankPool, strided: tuple[str, Proxy], mesh_shape: tuple[int, int], read_once: str
) -> None:
    url, state = strided

    told, *_ = ranks(4).run(load_as_planned, state.url, url, mesh_shape, read_once)

    spans = spans_asked_for(state)
    assert len(spans) == told["requests"]
    assert sum(stop - start for start, stop in spans) == told["bytes"] <= told["planned bytes"]
    # Of a run that ranks read for each other each reads its share: what is planned is the run.
    joined = sum(stop == start for (_, stop), (start, _) in pairwise(spans)) if read_once == "always" else 0
    assert len(spans) - joined <= told["planned runs"]


@pytest.mark.parametrize(
    "fault",
    [Fault("status", first=2, code=403, match=TENSORS), Fault("etag", first=2, match=TENSORS)],
    ids=["denied", "changed"],
)
def test_what_one_rank_is_told_ends_the_load_on_all(ranks: RankPool, store: tuple[Bucket, Proxy], fault: Fault) -> None:
    bucket, state = store
    url = f"s3://{bucket.name}/ckpt"
    ranks(2).run(save_on_each_rank, state.url, url)
    fault.seen = fault.done = 0
    state.fault = fault

    outcomes = ranks(2).outcomes(load_on_each_rank, state.url, url, "tp", [0, 1])

    assert {outcome.status for outcome in outcomes} == {"raised"}
    assert all("ckpt/model-" in outcome.error for outcome in outcomes), [outcome.error for outcome in outcomes]


@pytest.mark.parametrize("kind", ["trickle", "stall", "status"])
def test_a_server_that_brings_nothing_ends_the_load_on_all_within_the_time_given(
    ranks: RankPool, store: tuple[Bucket, Proxy], kind: str
) -> None:
    bucket, state = store
    url = f"s3://{bucket.name}/ckpt"
    ranks(2).run(save_on_each_rank, state.url, url)
    state.fault = Fault(kind, match=TENSORS)
    began = time.monotonic()

    outcomes = ranks(2).outcomes(load_on_each_rank, state.url, url, "tp", [0, 1], TIMEOUT_S)

    assert {outcome.status for outcome in outcomes} == {"raised"}
    assert all("ckpt/model-" in outcome.error for outcome in outcomes), [outcome.error for outcome in outcomes]
    assert all("gave up after" in outcome.error for outcome in outcomes), [outcome.error for outcome in outcomes]
    assert max(outcome.ended_at for outcome in outcomes) - began < 5 * TIMEOUT_S


def test_a_refused_part_ends_the_save_on_all_and_leaves_nothing(ranks: RankPool, store: tuple[Bucket, Proxy]) -> None:
    bucket, state = store
    state.fault = Fault("status", first=1, code=403, match="PUT .*partNumber")

    outcomes = ranks(2).outcomes(save_on_each_rank, state.url, f"s3://{bucket.name}/ckpt")

    assert {outcome.status for outcome in outcomes} == {"raised"}
    assert all("access was denied" in outcome.error for outcome in outcomes), [outcome.error for outcome in outcomes]
    assert not bucket.objects()
    assert not bucket.uploads()


def test_two_processes_repack_from_bucket_to_bucket(store: tuple[Bucket, Proxy]) -> None:
    bucket, state = store
    tensors = {"w": torch.arange(100_001.0), "s": torch.tensor(1.5), "v": torch.arange(50_000)}
    bucket.put("a/model.safetensors", save_bytes(tensors, {"format": "pt"}))
    bucket.put("a/config.json", b"{}")
    environment = {**os.environ, **Bucket.environment(state.url), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    arguments = [
        "repack",
        f"s3://{bucket.name}/a",
        f"s3://{bucket.name}/b",
        "--max-shard-size",
        "300KB",
        "--ranks",
        "2",
    ]

    command = [sys.executable, "-m", "shardferry.cli", *arguments]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=100)

    files = {key: bucket.get(key) for key in bucket.objects() if key.startswith("b/") and key.endswith(".safetensors")}
    repacked = {name: value for file in files.values() for name, value in load_bytes(file).items()}
    assert len(files) == 3
    assert repacked.keys() == tensors.keys()
    assert all(torch.equal(repacked[name], tensors[name]) for name in tensors)
    assert "b/config.json" in bucket.objects()
    assert not bucket.uploads()
