"""A plan's styles cut what the frameworks that run the plan cut; what cannot be cut is refused before reading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from diffusers import Flux2Transformer2DModel
from diffusers.hooks import tensor_parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from shardferry.errors import CheckpointWarning, InvalidInputError, ShardingError
from shardferry.geometry.region import Region, whole
from shardferry.geometry.sharding import Sharding
from shardferry.plan.target import region_of
from shardferry.torch.plans import over_mesh, shardings_from_plan
from shardferry.torch.shardings import given_layout, layouts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardferry.geometry.region import Intervals
    from shardferry.torch.shardings import GivenSharding

STYLES_AND_SHAPES = [
    (style, shape)
    for style in sorted(ALL_PARALLEL_STYLES)
    for shape in [(8,), (8, 12), (4, 8, 12)]
    if style != "embedding_colwise" or len(shape) > 1  # an embedding has two dims
]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Return a mesh of two ranks without processes: layouts need none."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


class Weights(nn.Module):
    """A module whose parameters have these shapes."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))


def regions(given: GivenSharding, shape: tuple[int, ...]) -> list[Region | None]:
    return [region_of(given_layout(given, len(shape), "w"), shape, rank) for rank in range(2)]


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(("style", "shape"), STYLES_AND_SHAPES)
def test_every_style_of_transformers_cuts_what_it_cuts_there(
    mesh: DeviceMesh, style: str, name: str, shape: tuple[int, ...]
) -> None:
    theirs = Weights(**{name: shape})
    ALL_PARALLEL_STYLES[style].shard_param(theirs, name, mesh)
    ours = shardings_from_plan(nn.ModuleDict({"m": Weights(**{name: shape})}), {"m": style}, mesh)
    made: Any = theirs.get_parameter(name)
    if hasattr(made, "placements"):
        (layout,) = layouts_of(made, None, name)
        assert regions(ours[f"m.{name}"], shape) == [region_of(layout, shape, rank) for rank in range(2)]
    elif style == "sequence_parallel":  # it makes its DTensors when it installs the forward
        assert ours == {f"m.{name}": (mesh, (Replicate(),))}
    else:
        assert ours == {}


def test_a_model_is_cut_as_its_own_plan_cuts_it(mesh: DeviceMesh) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=33,
    )  # fmt: skip
    with torch.device("meta"):
        model, theirs = LlamaForCausalLM(config), LlamaForCausalLM(config)
    ours = shardings_from_plan(model, None, mesh)
    apply_tensor_parallelism(theirs, mesh, theirs._expand_parallel_plan(theirs.tp_plan))  # noqa: SLF001 - resolves `*`
    made: dict[str, Any] = {name: tensor for name, tensor in theirs.named_parameters() if hasattr(tensor, "placements")}
    assert ours.keys() == made.keys()
    for name, tensor in made.items():
        (layout,) = layouts_of(tensor, None, name)
        shape = tuple(tensor.shape)
        assert regions(ours[name], shape) == [region_of(layout, shape, rank) for rank in range(2)]


class PackedColwiseParallel:
    """Named as the style of diffusers."""

    def __init__(self, blocks: list[int] | None = None) -> None:
        self.blocks = blocks


class PackedRowwiseParallel(PackedColwiseParallel):
    """Named as the style of diffusers."""


def rows(sharding: GivenSharding, dim: int) -> list[Intervals | None]:
    assert isinstance(sharding, Sharding)
    return [None if region is None else region.dims[dim] for region in sharding.regions]


def test_packed_blocks_are_cut_one_by_one_with_their_bias(mesh: DeviceMesh) -> None:
    model = nn.ModuleDict({"proj": Weights(weight=(16, 3), bias=(16,))})
    cut = shardings_from_plan(model, {"proj": PackedColwiseParallel([1, 1, 2])}, mesh)
    expected = [((0, 2), (4, 6), (8, 12)), ((2, 4), (6, 8), (12, 16))]
    assert rows(cut["proj.weight"], 0) == expected
    assert rows(cut["proj.bias"], 0) == expected


def test_blocks_come_from_the_module_where_the_style_has_none(mesh: DeviceMesh) -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([Weights(weight=(3, 8), bias=(3,))])})
    setattr(model.get_submodule("blocks.0"), "_tp_packed_row_blocks", [2, 6])  # noqa: B010 - diffusers' own name
    cut = shardings_from_plan(model, {"blocks.*": PackedRowwiseParallel()}, mesh)
    assert rows(cut["blocks.0.weight"], 1) == [((0, 1), (2, 5)), ((1, 2), (5, 8))]
    assert cut["blocks.0.bias"] == (mesh, (Replicate(),))


@pytest.mark.parametrize(
    ("shape", "style", "message"),
    [
        ((16, 3), PackedColwiseParallel(), "has no blocks, and its module has no _tp_packed_col_blocks"),
        ((16, 3), PackedColwiseParallel([1, 2]), r"blocks \(1, 2\) add up to 3, which does not divide dim 0 of 16"),
        (
            (9, 3),
            PackedColwiseParallel([1, 2]),
            "a block of 3 along dim 0 does not divide over the 2 ranks of mesh axis",
        ),
        ((6, 3), "packed_colwise", "a block of 3 along dim 0 does not divide"),
        ((3, 4, 4), "grouped_gemm", "dim 0 of 3 does not divide over the 2 ranks of mesh axis 'tp'"),
        ((4, 4), "colwize", "style 'colwize', which is not known"),
        ((4, 4), nn.Identity(), "style Identity, which is not known"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(
    mesh: DeviceMesh, shape: tuple[int, ...], style: object, message: str
) -> None:
    model = nn.ModuleDict({"proj": Weights(weight=shape)})
    with pytest.raises((ShardingError, InvalidInputError), match=rf"^proj\.weight: .*{message}"):
        shardings_from_plan(model, {"proj": style}, mesh)


def test_fewer_key_value_heads_than_ranks_are_refused_or_shared_when_asked(mesh: DeviceMesh) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1,
        vocab_size=32,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    with pytest.raises(ShardingError, match="1 key-value heads do not divide over the 2 ranks"):
        shardings_from_plan(model, None, mesh)
    cut = shardings_from_plan(model, None, mesh, key_value_heads="replicate")
    assert rows(cut["model.layers.0.self_attn.k_proj.weight"], 0) == [((0, 4),), ((0, 4),)]
    assert cut["model.layers.0.self_attn.q_proj.weight"] == (mesh, (Shard(0),))


def test_a_rule_that_matches_nothing_is_reported(mesh: DeviceMesh) -> None:
    model = nn.ModuleDict({"proj": Weights(weight=(4, 4))})
    with pytest.warns(CheckpointWarning, match="match nothing in the model: prog"):
        shardings_from_plan(model, {"proj": "colwise", "prog": "rowwise"}, mesh)


def test_a_mesh_of_several_axes_and_a_model_without_plan_are_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(InvalidInputError, match="the mesh has 2"):
        shardings_from_plan(nn.Linear(2, 2), {}, DeviceMesh("cpu", [[0, 1]]))
    with pytest.raises(InvalidInputError, match="Linear has no plan of its own"):
        shardings_from_plan(nn.Linear(2, 2), None, mesh)


def test_the_own_plan_of_a_model_of_diffusers_cuts_what_diffusers_cuts(mesh: DeviceMesh) -> None:
    """Its keys have one wildcard, for the block, beside numbers that are meant: `attn.to_out.0`."""
    kind: Any = Flux2Transformer2DModel
    with torch.device("meta"):
        model = kind(
            in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=4,
            joint_attention_dim=8, timestep_guidance_channels=8, axes_dims_rope=(2, 2, 2, 2),
        )  # fmt: skip
    specs = tensor_parallel.resolve_tp_shard_specs(model, kind._tp_plan, 2)  # noqa: SLF001 - where diffusers keeps it
    ours = shardings_from_plan(model, None, mesh)
    assert ours.keys() == specs.keys()
    for name, spec in specs.items():
        shape = tuple(model.get_parameter(name).shape)
        held = whole(shape).dims
        for rank, region in enumerate(regions(ours[name], shape)):
            dims = list(held)
            start, found = 0, []
            for size in spec.block_sizes or ():
                found.append((start + rank * size // 2, start + (rank + 1) * size // 2))
                start += size
            if spec.dim is not None:
                dims[spec.dim] = tuple(found)
            assert region == Region(tuple(dims)), name


@pytest.mark.usefixtures("mesh")
def test_every_group_along_an_axis_of_a_larger_mesh_is_cut_alike() -> None:
    larger = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))
    first, second = (Region((held,)) for held in (((0, 2), (4, 6)), ((2, 4), (6, 8))))
    assert over_mesh((8,), [first, second], larger["tp"]).regions == (first, second)
    assert over_mesh((8,), [whole((8,))], larger["dp"]).regions == (whole((8,)), whole((8,)))
