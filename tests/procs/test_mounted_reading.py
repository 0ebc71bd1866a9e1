"""What reading once fetches, counted by the server.

Two nodes see a file server through mounts that share no cache, or ask a web server.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import save_file
from tests.tools.servers import proxy
from tests.tools.slow_http import slow_web
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import shardferry.torch as sf
from shardferry.errors import RankFailedError, StorageError
from shardferry.execute.costs import mount_of_location, remember
from shardferry.plan.costmodel import PRESETS, CostModel
from shardferry.storage.location import locate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.tools.mounts import MakeMounts, SlowMounts

    from shardferry.torch.shardings import GivenSharding

    from .pool import RankPool

Layout = Literal["copies", "columns", "halves", "small"]

NODES = (0, 0, 1, 1)
FILE = "model.safetensors"
ROWS, WIDTH, SMALL = 4096, 8192, 4000
NUMBERS = np.random.default_rng(0).integers(-(1 << 15), 1 << 15, (ROWS, WIDTH), np.int16)


def stored(layout: Layout) -> dict[str, np.ndarray]:
    """Return 64 MiB of tensors, each in odd shapes, with a scalar among them."""
    if layout == "small":
        parts = np.array_split(NUMBERS.reshape(-1), SMALL)
        return {f"{number:04}": part for number, part in enumerate(parts)} | {"scalar": np.array(7, np.int16)}
    return {"weight": NUMBERS}


def wanted(layout: Layout, rank: int) -> dict[str, np.ndarray]:
    """Return what a rank must get."""
    if layout == "columns":
        return {"weight": np.array_split(NUMBERS, 4, axis=1)[rank]}
    if layout == "halves":
        return {"weight": np.array_split(NUMBERS, 2, axis=1)[rank % 2]}
    return stored(layout)


def shardings_of(layout: Layout) -> dict[str, GivenSharding]:
    """Return how tensors are cut: over all ranks, or over those of each node."""
    if layout == "columns":
        return {"weight": (init_device_mesh("cpu", (4,)), (Shard(1),))}
    if layout == "halves":
        return {"weight": (init_device_mesh("cpu", (2, 2)), (Replicate(), Shard(1)))}
    return {}


@pytest.fixture
def mounts(make_mounts: MakeMounts, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SlowMounts]:
    """The mounts of two nodes, of a checkpoint with the layout that the test is for, or of copies."""
    save_file(stored(getattr(request, "param", "copies")), tmp_path / FILE)
    with make_mounts(tmp_path, nodes=2) as mounts:
        yield mounts


@contextmanager
def measured(cache: Path, path: Path | str, model: CostModel) -> Iterator[None]:
    """Let this rank have a probed cost model of what the path or URL is on."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(cache)
    try:
        remember(mount_of_location(locate(path)), model)
        yield
    finally:
        del os.environ["XDG_CACHE_HOME"]
        os.environ.update({} if before is None else {"XDG_CACHE_HOME": before})


def fetch(
    mounts: SlowMounts, layout: Layout, read_once: Literal["always", "never"], caches: Path
) -> tuple[str, list[int], bool]:
    """Load with empty page caches; return the strategy, what each node fetched, and whether all arrived."""
    rank = dist.get_rank()
    expected = wanted(layout, rank)
    state = {name: torch.zeros(part.shape, dtype=torch.int16) for name, part in expected.items()}
    shardings = shardings_of(layout)
    if rank == 0:
        for node in range(2):
            mounts.drop(FILE, node)
        mounts.reset()
    dist.barrier()
    # Every rank gives the path of its node's mount.
    path = mounts.paths[NODES[rank]]
    with measured(caches / str(rank), path, replace(PRESETS["network_mount"], node_bandwidth=1e8)):
        report = sf.load_state_dict(state, path, node_of_rank=NODES, read_once=read_once, shardings=shardings)
    right = all(np.array_equal(tensor.numpy(), expected[name]) for name, tensor in state.items())
    return report.strategy, [mounts.counts(node)["read_bytes"] for node in range(2)], right


def load_what_breaks(mounts: SlowMounts) -> tuple[str, float]:
    """Load what the server can no longer read to its end; return the error, and the seconds until it came."""
    state = {"weight": torch.zeros(ROWS, WIDTH, dtype=torch.int16)}
    begin = time.monotonic()
    with pytest.raises((StorageError, RankFailedError)) as caught:
        sf.load_state_dict(state, mounts.paths[NODES[dist.get_rank()]], node_of_rank=NODES, read_once="always")
    return str(caught.value), time.monotonic() - begin


def test_a_read_that_fails_on_one_nodes_mount_is_raised_on_all_ranks(ranks: RankPool, mounts: SlowMounts) -> None:
    size = (mounts.paths[0] / FILE).stat().st_size
    mounts.break_bytes(FILE, size - 4096, size)  # rank 3 reads the last quarter
    told = ranks(4).run(load_what_breaks, mounts)
    assert mounts.counts(1)["faults"]
    assert not mounts.counts(0)["faults"]
    for rank, (message, seconds) in enumerate(told):
        assert "Input/output error" in message
        assert FILE in message
        assert rank == 3 or "rank 3" in message
        assert seconds < 10


@pytest.mark.parametrize("layout", ["copies", "columns", "small"])
def test_reading_once_asks_the_server_for_each_byte_once(
    ranks: RankPool, make_mounts: MakeMounts, tmp_path: Path, layout: Layout
) -> None:
    """Without a page cache, for which the kernel would read ahead of every share."""
    save_file(stored(layout), tmp_path / FILE)
    with make_mounts(tmp_path, nodes=2, direct_io=True) as mounts:
        told = ranks(4).run(fetch, mounts, layout, "always", tmp_path)
    size = NUMBERS.nbytes
    for strategy, fetched, right in told:
        assert right
        assert strategy.startswith("read-once per job")
        assert size <= sum(fetched) <= 1.02 * size
        assert max(fetched) <= 0.52 * size


@pytest.mark.parametrize(
    ("mounts", "layout"), [(layout, layout) for layout in ("copies", "columns", "small")], indirect=["mounts"]
)
def test_with_page_caches_reading_alone_asks_once_per_node_and_reading_once_for_half_of_that(
    ranks: RankPool, mounts: SlowMounts, tmp_path: Path, layout: Layout
) -> None:
    size, ahead = NUMBERS.nbytes, 2 << 20
    for _, fetched, right in ranks(4).run(fetch, mounts, layout, "never", tmp_path):
        assert right
        # Ranks of one node may ask for the same page at the same time before it is there.
        assert min(fetched) >= 0.99 * size, fetched  # pages that the mount was tried with are there already
        assert max(fetched) <= 1.1 * size + ahead, fetched
    for _, fetched, right in ranks(4).run(fetch, mounts, layout, "always", tmp_path):
        assert right
        assert size <= sum(fetched) <= 1.02 * size + 2 * ahead


def load_from_web(url: str, layout: Layout, caches: Path) -> tuple[str, int, int, bool]:
    """Load by default; return the strategy, bytes read and requests as reported, and whether all arrived."""
    rank = dist.get_rank()
    expected = wanted(layout, rank)
    state = {name: torch.zeros(part.shape, dtype=torch.int16) for name, part in expected.items()}
    with measured(caches / str(rank), url, replace(PRESETS["object_store"], node_bandwidth=1e8)):
        report = sf.load_state_dict(state, url, node_of_rank=NODES, shardings=shardings_of(layout))
    right = all(np.array_equal(tensor.numpy(), expected[name]) for name, tensor in state.items())
    return report.strategy, report.total.bytes_read, report.total.requests, right


@pytest.mark.parametrize("layout", ["copies", "halves"])
def test_a_web_server_is_asked_for_each_byte_once(ranks: RankPool, tmp_path: Path, layout: Layout) -> None:
    save_file(stored(layout), tmp_path / FILE)
    with slow_web(tmp_path, latency_ms=0, rate_mb=10_000) as upstream, proxy(upstream) as server:
        told = ranks(4).run(load_from_web, f"{server.url}/{FILE}", layout, tmp_path)
    size = (tmp_path / FILE).stat().st_size
    assert size <= server.sent <= 1.02 * size
    for strategy, num_bytes, requests, right in told:
        assert right
        assert strategy.startswith("read-once per job")
        opening = len(server.log) - requests  # of the header, by rank 0
        assert opening in {1, 2}
        assert server.sent - num_bytes <= size - NUMBERS.nbytes + (128 << 10)


def load_halves_of_rows(path: Path, caches: Path, seek_bytes: tuple[int, int]) -> list[int]:
    """Each of two ranks of one node holds half the columns; return the requests of each rank."""
    rank = dist.get_rank()
    state = {"weight": torch.zeros(ROWS, WIDTH // 2, dtype=torch.int16)}
    shardings = {"weight": (init_device_mesh("cpu", (2,)), (Shard(1),))}
    with measured(caches / str(rank), path, replace(PRESETS["network_mount"], seek_bytes=seek_bytes[rank])):
        report = sf.load_state_dict(state, path, shardings=shardings)
    return [told.requests for told in report.ranks]


def test_every_rank_reads_holes_along_as_rank_0s_cost_model_says(
    ranks: RankPool, mounts: SlowMounts, tmp_path: Path
) -> None:
    path = mounts.paths[0]
    for requests in ranks(2).run(load_halves_of_rows, path, tmp_path / "dear", (1 << 20, 1)):
        assert max(requests) < ROWS // 10
    for requests in ranks(2).run(load_halves_of_rows, path, tmp_path / "cheap", (1, 1 << 20)):
        assert min(requests) >= ROWS


def load_uncached(path: Path, caches: Path) -> tuple[str, bool]:
    """Load on one node by default; return the strategy, and whether all arrived."""
    state = {"weight": torch.zeros(ROWS, WIDTH, dtype=torch.int16)}
    probed = replace(PRESETS["network_mount"], node_bandwidth=2e7, has_page_cache=False)
    with measured(caches / str(dist.get_rank()), path, probed):
        report = sf.load_state_dict(state, path)
    return report.strategy, np.array_equal(state["weight"].numpy(), NUMBERS)


def test_ranks_of_one_node_read_once_what_their_mount_does_not_cache(
    ranks: RankPool, make_mounts: MakeMounts, tmp_path: Path
) -> None:
    save_file(stored("copies"), tmp_path / FILE)
    with make_mounts(tmp_path, direct_io=True) as mounts:
        for strategy, right in ranks(2).run(load_uncached, mounts.paths[0], tmp_path):
            assert right
            assert strategy.startswith("read-once per node")
        assert NUMBERS.nbytes <= mounts.counts()["read_bytes"] <= 1.02 * NUMBERS.nbytes
