"""Every layout loads what torch itself would have put there: real processes, real FSDP2, TP and DTensor."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import shardferry.torch as sf
from shardferry.errors import InvalidInputError, MismatchError, RankFailedError, ShardingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .pool import RankPool

ROWS = 10  # uneven over 4 ranks


class Block(nn.Module):
    """Two linear layers, an embedding, a norm, and buffers of every kind."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 8)
        self.up = nn.Linear(8, rows)
        self.down = nn.Linear(rows, 8)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("cache", torch.zeros(4), persistent=False)


def numbered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a state dict in which every element of every tensor is another number."""
    start = 1
    numbers = {}
    for name, tensor in model.state_dict().items():
        numbers[name] = torch.arange(start, start + tensor.numel()).reshape(tensor.shape).to(tensor.dtype)
        start += tensor.numel()
    return numbers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of `Block` whose tensors are numbered."""
    path = tmp_path_factory.mktemp("block")
    save_file(numbered(Block()), path / "model.safetensors")
    return str(path)


@pytest.fixture(scope="module")
def odd_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with 9 rows, on which the two meanings of FSDP2-over-TP placements differ."""
    path = tmp_path_factory.mktemp("odd")
    save_file(numbered(Block(9)), path / "model.safetensors")
    return str(path)


def shard_fsdp(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def shard_fsdp_by_module(model: Block) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)


def shard_hsdp(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("rep", "fsdp")))


def shard_tp(model: nn.Module) -> None:
    apply_tp(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def shard_fsdp_tp(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("fsdp", "tp"))
    apply_tp(model, mesh["tp"])
    fully_shard(model, mesh=mesh["fsdp"])


def shard_hsdp_tp(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("rep", "fsdp", "tp"))
    apply_tp(model, mesh["tp"])
    fully_shard(model, mesh=mesh["rep", "fsdp"])


def apply_tp(model: nn.Module, mesh: DeviceMesh) -> None:
    plan = {"embed": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)


SHARDERS = [shard_fsdp, shard_fsdp_by_module, shard_hsdp, shard_tp, shard_fsdp_tp, shard_hsdp_tp]


def compare_with_torch(path: str, rows: int, sharder: Callable[[nn.Module], None], device: str) -> list[str]:
    """Load into a sharded model; return what differs from the model that torch sharded with these values."""
    expected = Block(rows)
    expected.load_state_dict(load_file(f"{path}/model.safetensors"))
    sharder(expected)
    with torch.device(device):
        model = Block(rows)
    model.cache = torch.ones(4)
    sharder(model)
    report = sf.load_model(model, path)
    assert report.total.bytes_read >= report.total.bytes_wanted > 0
    return list(differences(expected, model))


def differences(expected: nn.Module, model: nn.Module) -> Iterator[str]:
    for (name, want), (other, got) in zip(expected.state_dict().items(), model.state_dict().items(), strict=True):
        assert name == other
        if not torch.equal(local(want), local(got)) or type(want) is not type(got):
            yield f"{name}: {local(want).tolist()} != {local(got).tolist()}"
        if isinstance(want, DTensor) and isinstance(got, DTensor) and want.placements != got.placements:
            yield f"{name}: {want.placements} != {got.placements}"


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("sharder", SHARDERS, ids=lambda sharder: sharder.__name__)
def test_a_sharded_model_gets_what_torch_would_have_put_there(
    ranks: RankPool, checkpoint: str, sharder: Callable[[nn.Module], None], device: str
) -> None:
    assert ranks(4).run(compare_with_torch, checkpoint, ROWS, sharder, device) == [[]] * 4


@pytest.mark.parametrize("sharder", [shard_fsdp, shard_tp], ids=lambda sharder: sharder.__name__)
def test_two_ranks_load_like_four(ranks: RankPool, checkpoint: str, sharder: Callable[[nn.Module], None]) -> None:
    assert ranks(2).run(compare_with_torch, checkpoint, ROWS, sharder, "meta") == [[]] * 2


def test_fsdp_over_tp_cuts_the_tp_axis_first_where_a_dim_does_not_divide(ranks: RankPool, odd_checkpoint: str) -> None:
    assert ranks(8).run(compare_with_torch, odd_checkpoint, 9, shard_fsdp_tp, "meta") == [[]] * 8


def test_a_tp_rank_that_holds_nothing_loads_under_fsdp(ranks: RankPool, tmp_path: Path) -> None:
    """FSDP2 says [0, 0] of such a part, though the layout gives it [4, 0]."""
    save_file(numbered(Block(1)), tmp_path / "model.safetensors")
    assert ranks(4).run(compare_with_torch, str(tmp_path), 1, shard_fsdp_tp, "meta") == [[]] * 4


def forward_after_load(path: str) -> float:
    """Return how far the first forward of a loaded FSDP2 model is from the unsharded one, after FSDP2 padded."""
    whole = nn.Sequential(nn.Linear(8, ROWS), nn.Linear(ROWS, 8))
    file = load_file(f"{path}/model.safetensors")
    names = {"0.weight": "up.weight", "0.bias": "up.bias", "1.weight": "down.weight", "1.bias": "down.bias"}
    whole.load_state_dict({name: file[stored] for name, stored in names.items()})
    with torch.device("meta"):
        model = nn.ModuleDict({"up": nn.Linear(8, ROWS), "down": nn.Linear(ROWS, 8)})
    fully_shard(model["up"])
    fully_shard(model["down"])
    sf.load_model(model, path, strict=False)
    storage = [local(parameter.detach()).untyped_storage().data_ptr() for parameter in model.parameters()]
    value = torch.ones(2, 8)
    difference = (model["down"](model["up"](value)) - whole(value)).abs().max()
    after = [local(tensor).untyped_storage().data_ptr() for tensor in model.state_dict().values()]
    assert storage == after, "FSDP2 copied what was loaded into other storage"
    return float(difference)


def test_fsdp_computes_with_what_was_loaded_and_does_not_copy_it(ranks: RankPool, checkpoint: str) -> None:
    assert max(ranks(4).run(forward_after_load, checkpoint)) < 1e-2


def load_through_state_dict(path: str, told_by: str) -> list[str]:
    """Load the detached state dict of an FSDP2-over-TP model; return what differs."""
    expected = Block(9)
    expected.load_state_dict(load_file(f"{path}/model.safetensors"))
    shard_fsdp_tp(expected)
    model = Block(9)
    shard_fsdp_tp(model)
    state = model.state_dict()
    if told_by == "model":
        sf.load_state_dict(state, path, model=model)
    else:
        sf.load_state_dict(state, path)
    return list(differences(expected, model))


@pytest.mark.parametrize("told_by", ["model", "local sizes"])
def test_a_detached_state_dict_of_fsdp_over_tp_loads_right(ranks: RankPool, odd_checkpoint: str, told_by: str) -> None:
    assert ranks(8).run(load_through_state_dict, odd_checkpoint, told_by) == [[]] * 8


def load_dtensors(path: str, mesh_shape: tuple[int, ...], layouts: list[tuple[str, list[Placement]]]) -> list[str]:
    """Load empty DTensors of these placements; return those that differ from `distribute_tensor`."""
    mesh = init_device_mesh("cpu", mesh_shape)
    file = load_file(f"{path}/model.safetensors")
    wrong = []
    for name, placements in layouts:
        want = distribute_tensor(file[name], mesh, placements)
        state: dict[str, torch.Tensor] = {
            name: DTensor.from_local(
                torch.zeros_like(want.to_local()),
                mesh,
                placements,
                run_check=False,
                shape=want.shape,
                stride=want.stride(),
            )
        }
        sf.load_state_dict(state, path, strict=False)
        if not torch.equal(local(state[name]), want.to_local()):
            wrong.append(f"{name} {placements}")
    return wrong


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tensors of several shapes, numbered."""
    path = tmp_path_factory.mktemp("tensors")
    shapes = {"m": (12, 7), "cube": (4, 6, 5), "v": (5,), "scalar": (), "few": (2, 3), "none": (0, 4)}
    state = {name: torch.arange(torch.Size(shape).numel()).reshape(shape).float() for name, shape in shapes.items()}
    save_file(state, path / "model.safetensors")
    return str(path)


def test_placements_mean_what_distribute_tensor_makes_of_them(ranks: RankPool, tensors: str) -> None:
    one: list[tuple[str, list[Placement]]] = [
        ("m", [Shard(0)]),
        ("m", [Shard(1)]),
        ("m", [Shard(-1)]),
        ("m", [Replicate()]),
        ("cube", [Shard(1)]),
        ("cube", [Shard(2)]),
        ("v", [Shard(0)]),
        ("scalar", [Replicate()]),
        ("few", [Shard(0)]),
        ("none", [Shard(0)]),
        ("none", [Shard(1)]),
    ]
    two: list[tuple[str, list[Placement]]] = [
        ("m", [Shard(0), Shard(1)]),
        ("m", [Shard(1), Shard(0)]),
        ("v", [Shard(0), Shard(0)]),
        ("cube", [Replicate(), Shard(2)]),
        ("cube", [Shard(2), Replicate()]),
        ("m", [_StridedShard(0, split_factor=2), Shard(0)]),
    ]
    three: list[tuple[str, list[Placement]]] = [
        ("cube", [Shard(0), Shard(1), Shard(2)]),
        ("m", [Replicate(), Shard(0), Shard(0)]),
    ]
    assert ranks(4).run(load_dtensors, tensors, (4,), one) == [[]] * 4
    assert ranks(4).run(load_dtensors, tensors, (2, 2), two) == [[]] * 4
    assert ranks(4).run(load_dtensors, tensors, (2, 1, 2), three) == [[]] * 4


def load_strided(path: str) -> list[int]:
    """Return the first elements of the rows of `m` that this rank gets under a strided shard over two ranks."""
    mesh = init_device_mesh("cpu", (2,))
    state: dict[str, torch.Tensor] = {
        "m": DTensor.from_local(torch.zeros(6, 7), mesh, [_StridedShard(0, split_factor=2)], run_check=False)
    }
    sf.load_state_dict(state, path, strict=False)
    return [int(row) // 7 for row in local(state["m"])[:, 0].tolist()]


def test_a_strided_shard_gets_its_piece_of_every_group(ranks: RankPool, tensors: str) -> None:
    """A reader that knows only a first offset gives rank 0 the rows 0 to 5 here."""
    assert ranks(2).run(load_strided, tensors) == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]


def load_partial(path: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    state: dict[str, torch.Tensor] = {"m": DTensor.from_local(torch.zeros(12, 7), mesh, [Partial()], run_check=False)}
    with pytest.raises(ShardingError, match=r"m: the values on mesh axis 0 are partial"):
        sf.load_state_dict(state, path, strict=False)
    return "refused"


def test_unreduced_values_are_refused(ranks: RankPool, tensors: str) -> None:
    assert ranks(2).run(load_partial, tensors) == ["refused"] * 2


def load_submesh(path: str) -> list[float] | None:
    """Only ranks 2 and 3 have the tensor."""
    mesh = DeviceMesh("cpu", [2, 3])
    rank = dist.get_rank()
    state: dict[str, torch.Tensor] = {}
    if rank >= 2:
        state["v"] = DTensor.from_local(
            torch.zeros(3 if rank == 2 else 2), mesh, [Shard(0)], run_check=False, shape=torch.Size([5]), stride=(1,)
        )
    sf.load_state_dict(state, path, strict=False)
    held: list[float] | None = local(state["v"]).tolist() if state else None
    return held


def test_a_mesh_need_not_cover_the_world(ranks: RankPool, tensors: str) -> None:
    assert ranks(4).run(load_submesh, tensors) == [None, None, [0, 1, 2], [3, 4]]


class Experts(nn.Module):
    """What an expert-parallel framework keeps: this rank's experts as a plain tensor."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.cube = nn.Parameter(torch.zeros(count, 6, 5))


def load_plain_experts(path: str) -> list[float]:
    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        model = Experts(2)
    sf.load_model(model, path, strict=False, shardings={"cube": (mesh, [Shard(0)])})
    return [float(expert[0, 0]) for expert in model.cube]


def test_plain_experts_that_differ_by_rank_load_with_a_sharding_given(ranks: RankPool, tensors: str) -> None:
    assert ranks(2).run(load_plain_experts, tensors) == [[0, 30], [60, 90]]


def load_plain_experts_without_telling(path: str) -> str:
    state: dict[str, torch.Tensor] = {"cube": torch.zeros(2, 6, 5)}
    with pytest.raises(MismatchError, match=r"cube: model \[2, 6, 5\], checkpoint \[4, 6, 5\]"):
        sf.load_state_dict(state, path, strict=False)
    return "refused"


def test_plain_experts_without_a_sharding_are_refused(ranks: RankPool, tensors: str) -> None:
    assert ranks(2).run(load_plain_experts_without_telling, tensors) == ["refused"] * 2


def load_stages(path: str) -> list[str]:
    """Pipeline stages: ranks 0 and 1 have `up`, ranks 2 and 3 the rest, each stage sharded over its two ranks."""
    rank = dist.get_rank()
    first, second = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    file = load_file(f"{path}/model.safetensors")
    wanted = {name for name in file if name.startswith("up.") == (rank < 2)}
    state: dict[str, torch.Tensor] = {
        name: distribute_tensor(torch.zeros_like(file[name]), first if rank < 2 else second, [Replicate()])
        for name in wanted
    }
    sf.load_state_dict(state, path)
    return sorted(name for name in wanted if not torch.equal(local(state[name]), file[name]))


def test_pipeline_stages_have_only_their_names_and_none_is_unexpected(ranks: RankPool, checkpoint: str) -> None:
    assert ranks(4).run(load_stages, checkpoint) == [[]] * 4


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def load_tied(path: str) -> bool:
    with torch.device("meta"):
        model = Tied()
    fully_shard(model)
    sf.load_model(model, path)
    assert model.head.weight is model.embed.weight
    whole = cast("DTensor", model.head.weight).full_tensor()
    return torch.equal(whole, load_file(f"{path}/model.safetensors")["embed.weight"])


def test_tied_parameters_stay_tied_and_need_one_name_in_the_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    save_file({"embed.weight": torch.arange(24.0).reshape(6, 4)}, tmp_path / "model.safetensors")
    assert ranks(2).run(load_tied, str(tmp_path)) == [True, True]


def load_disagreeing(path: str) -> str:
    mesh = init_device_mesh("cpu", (4,))
    rank = dist.get_rank()
    dim = 1 if rank == 2 else 0
    size = (12, 2 if rank < 3 else 1) if dim else (3, 7)
    state: dict[str, torch.Tensor] = {
        "m": DTensor.from_local(
            torch.zeros(size), mesh, [Shard(dim)], run_check=False, shape=torch.Size([12, 7]), stride=(7, 1)
        )
    }
    with pytest.raises(ShardingError) as caught:
        sf.load_state_dict(state, path, strict=False)
    return str(caught.value)


def test_ranks_that_disagree_are_named_with_the_tensor(ranks: RankPool, tensors: str) -> None:
    messages = ranks(4).run(load_disagreeing, tensors)
    assert len(set(messages)) == 1
    assert "ranks disagree about m" in messages[0]
    assert "ranks 0-1, 3 have F32 [12, 7] on a mesh of shape (4,) (dim 0 over axis 0)" in messages[0]
    assert "ranks 2 have F32 [12, 7] on a mesh of shape (4,) (dim 1 over axis 0)" in messages[0]


def load_what_one_rank_cannot(path: str, wrong: str) -> tuple[str, float]:
    """One rank alone has a tensor or an option that is wrong; then all load what is right."""
    mine = wrong if dist.get_rank() == 1 else ""
    state: dict[str, torch.Tensor] = {"v": torch.zeros(5, dtype=torch.complex128 if mine == "dtype" else None)}
    options = {"stric": True} if mine == "option" else {}
    start = time.monotonic()
    with pytest.raises((InvalidInputError, RankFailedError, TypeError)) as caught:
        sf.load_state_dict(state, path, strict=False, **options)  # type: ignore[arg-type]  # on purpose
    seconds = time.monotonic() - start
    sf.load_state_dict({"v": torch.zeros(5)}, path, strict=False)
    return str(caught.value), seconds


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("dtype", "v: safetensors files cannot hold torch.complex128"), ("option", "unknown option stric")],
)
def test_what_one_rank_cannot_even_prepare_is_raised_on_all_at_once(
    ranks: RankPool, tensors: str, wrong: str, words: str
) -> None:
    told = ranks(3).run(load_what_one_rank_cannot, tensors, wrong)
    assert all(words in message for message, _ in told)
    assert all("failed on rank 1 of 3" in message for message, _ in (told[0], told[2]))
    assert max(seconds for _, seconds in told) < 5
