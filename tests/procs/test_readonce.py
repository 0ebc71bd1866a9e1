"""Reading once and exchanging gives every rank the same tensors as reading alone, with each byte read once."""

from __future__ import annotations

import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardferry.torch as sf
from shardferry.errors import InvalidInputError, RankFailedError, ShardferryError

from .pool import RankPool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardferry.execute.report import LoadReport

NODES = (0, 0, 1, 1)
ROWS, WIDTH = 301, 64  # 301 rows are uneven over 4 ranks and over 2
LATE_S = 20


class Block(nn.Module):
    """Layers cut along each dim, small tensors, a scalar and a tensor that is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, ROWS)
        self.down = nn.Linear(ROWS, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(20))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(0, 3))


def leave_replicated(model: nn.Module) -> None:
    del model


def shard_tp(model: nn.Module) -> None:
    apply_tp(model, (4,), ("tp",))


def shard_fsdp(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))


def shard_hsdp(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "fsdp")))


def shard_fsdp_tp(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])


def apply_tp(model: nn.Module, shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of `Block` in which every element is another number."""
    path = tmp_path_factory.mktemp("once")
    start = 1
    numbers = {}
    for name, tensor in Block().state_dict().items():
        numbers[name] = torch.arange(start, start + tensor.numel()).reshape(tensor.shape).to(tensor.dtype)
        start += tensor.numel()
    save_file(numbers, path / "model.safetensors")
    return str(path)


def load(path: str, sharder: Callable[[nn.Module], None], **options: object) -> tuple[nn.Module, LoadReport]:
    with torch.device("meta"):
        model = Block()
    sharder(model)
    return model, sf.load_model(model, path, node_of_rank=NODES, **options)  # type: ignore[arg-type]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stored_bytes() -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in Block().state_dict().values())


def compare(path: str, sharder: Callable[[nn.Module], None], exchange_bytes: int) -> tuple[list[str], int, int, str]:
    """Load alone and once; return what differs, bytes read and received in all, and the strategy."""
    alone, _ = load(path, sharder, read_once="never")
    once, report = load(path, sharder, read_once="always", exchange_bytes=exchange_bytes)
    wrong = [
        name
        for (name, want), got in zip(alone.state_dict().items(), once.state_dict().values(), strict=True)
        if not torch.equal(local(want), local(got))
    ]
    return wrong, report.total.bytes_read, report.total.bytes_received, report.strategy


@pytest.mark.parametrize("exchange_bytes", [1 << 20, 1 << 28])
@pytest.mark.parametrize("sharder", [leave_replicated, shard_tp, shard_fsdp, shard_hsdp, shard_fsdp_tp])
def test_every_layout_loads_as_when_each_rank_reads_alone(
    ranks: RankPool, checkpoint: str, sharder: Callable[[nn.Module], None], exchange_bytes: int
) -> None:
    told = ranks(4).run(compare, checkpoint, sharder, exchange_bytes)
    assert [wrong for wrong, *_ in told] == [[]] * 4
    _, num_read, num_received, strategy = told[0]
    if strategy.startswith("read-once per job"):
        assert num_read == stored_bytes()
    else:
        assert strategy.startswith("read-once per node")
        assert stored_bytes() <= num_read <= 2 * stored_bytes()
    assert num_received


def load_by_default(path: str) -> tuple[str, int]:
    """Load on one node without options; return the strategy and the bytes received."""
    model = Block()
    report = sf.load_model(model, path)
    return report.strategy, report.total.bytes_received


def test_ranks_of_one_machine_read_for_themselves(ranks: RankPool, checkpoint: str) -> None:
    ((strategy, received), _) = ranks(2).run(load_by_default, checkpoint)
    assert strategy.startswith("independent: every rank reads its own bytes; all ranks share one page cache")
    assert received == 0


def load_with_different_options(path: str) -> str:
    mode = "always" if dist.get_rank() else "auto"
    with pytest.raises(ShardferryError) as caught:
        load(path, leave_replicated, read_once=mode)
    return str(caught.value)


def test_options_that_differ_by_rank_are_an_error_that_names_them(ranks: RankPool, checkpoint: str) -> None:
    messages = ranks(4).run(load_with_different_options, checkpoint)
    assert all("ranks 0 and 1 call this load with different read_once: 'auto' and 'always'" in m for m in messages)


def load_with_wrong_options(path: str) -> list[str]:
    messages = []
    for options in ({"read_once": "sometimes"}, {"exchange_bytes": 1000}):
        with pytest.raises((InvalidInputError, RankFailedError)) as caught:
            load(path, leave_replicated, **options)
        messages.append(str(caught.value))
    return messages


def test_options_that_cannot_be_are_refused_on_all_ranks(ranks: RankPool, checkpoint: str) -> None:
    for first, second in ranks(4).run(load_with_wrong_options, checkpoint):
        assert "read_once is 'sometimes'" in first
        assert "exchange_bytes is 1000; it must be a number of bytes, at least 1048576 (1.00 MiB)" in second


def load_late(path: str, moment: str) -> bool:
    """Rank 2 is late: before it calls, or within the load, where its first bytes are placed."""
    model = Block()
    is_late = dist.get_rank() == 2

    def be_late(_: object) -> None:
        if is_late and moment == "within" and not late:
            late.append(True)
            time.sleep(LATE_S)

    late: list[bool] = []
    if is_late and moment == "before":
        time.sleep(LATE_S)
    timeout_s = {"before": 3 * LATE_S, "within": 5}[moment]
    report = sf.load_model(
        model, path, node_of_rank=NODES, read_once="always", on_progress=be_late, timeout_s=timeout_s
    )
    return bool(late) == (is_late and moment == "within") and report.total.bytes_received > 0


def test_a_rank_that_is_late_is_waited_for(ranks: RankPool, checkpoint: str) -> None:
    """Later than the process group's limit, and within a load than that of a rank that gives no sign of life.

    Two jobs wait at the same time.
    """
    others = RankPool()
    try:
        with ThreadPoolExecutor() as threads:
            jobs = [
                threads.submit(pool(4, gloo_timeout_s=LATE_S / 2).run, load_late, checkpoint, moment)
                for pool, moment in ((ranks, "before"), (others, "within"))
            ]
        assert [job.result() for job in jobs] == [[True] * 4] * 2
    finally:
        others.close()


def load_from_own_copy(folder: str, damage: str) -> tuple[str, float]:
    """Each node has its own copy of the checkpoint; rank 2's is damaged after it was opened, or rank 2 is killed."""
    path = f"{folder}/{NODES[dist.get_rank()]}"
    with torch.device("meta"):
        model = Block()

    def interfere(_: object) -> None:
        if dist.get_rank() != 2:
            return
        if damage == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(5, "Input/output error")

    start = time.monotonic()
    with pytest.raises((OSError, RankFailedError)) as caught:
        sf.load_model(
            model, path, node_of_rank=NODES, read_once="always", exchange_bytes=1 << 20, on_progress=interfere
        )
    return str(caught.value), time.monotonic() - start


@pytest.fixture
def copies(tmp_path: Path, checkpoint: str) -> Path:
    """A folder with a copy of the checkpoint for each node."""
    for node in set(NODES):
        shutil.copytree(checkpoint, tmp_path / str(node))
    return tmp_path


def test_a_read_that_fails_on_one_rank_is_raised_on_all_and_none_hangs(ranks: RankPool, copies: Path) -> None:
    told = ranks(4).run(load_from_own_copy, str(copies), "error")
    assert all("Input/output error" in message for message, _ in told)
    assert all("rank 2" in message for rank, (message, _) in enumerate(told) if rank != 2)
    assert max(seconds for _, seconds in told) < 10


def test_a_rank_killed_in_an_exchange_is_named_by_all_others(ranks: RankPool, copies: Path) -> None:
    outcomes = ranks(4).outcomes(load_from_own_copy, str(copies), "kill")
    assert outcomes[2].status == "died"
    for rank in (0, 1, 3):
        message, seconds = outcomes[rank].value
        assert "rank 2" in message
        assert seconds < 10
