"""Tensor- and expert-parallel plans of models, as the true layout of every parameter they cut.

A plan names modules or parameters, with `*` for a layer number, and a style for each. It says more than the DTensors
made from it: under a packed style a rank holds a part of every block, while the DTensor claims one run of rows.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch.distributed.tensor import Replicate, Shard

from shardferry.errors import CheckpointWarning, InvalidInputError, ShardingError
from shardferry.geometry.layouts import block_regions, head_regions
from shardferry.geometry.sharding import Sharding
from shardferry.torch.entries import plain_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardferry.geometry.region import Region
    from shardferry.torch.shardings import GivenSharding

# Styles of transformers 5.24 by what they cut (its registry, distributed/tensor_parallel.py and expert_parallel.py).
_COLWISE = {"colwise", "colwise_rep", "colwise_gather_output"}
_ROWWISE = {"rowwise", "rowwise_rep", "rowwise_split_input"}
_PLAIN = {
    "replicate",
    "replicated_with_grad_allreduce",
    "moe_tp_experts",
    "ep_dispatch_experts",
    "all_reduce",
    "mla_kv_a_proj",
    "moe_identity_expert",
    "local_params",
}
# Blocks of a packed gate|up weight.
_PACKED_BLOCKS = (1, 1)
# Styles of diffusers 0.42 that are objects, by the name of their class: the dim they cut counted from the first and
# the attribute in which a Linear says its blocks.
_PACKED_CLASSES = {
    "PackedColwiseParallel": ("packed_colwise", "_tp_packed_col_blocks"),
    "PackedRowwiseParallel": ("packed_rowwise", "_tp_packed_row_blocks"),
}
_KEY_VALUE = re.compile(r"(^|\.)[kv]_proj\.(weight|bias)$")


class Cut(NamedTuple):
    """What a style does to one parameter.

    Attributes:
        dim: Dim it cuts; None if every rank holds the whole.
        blocks: Proportional sizes of the blocks of that dim, each cut by itself; empty for one block.
        is_even: Whether the dim must divide, because the computation relies on equal parts.
    """

    dim: int | None
    blocks: tuple[int, ...] = ()
    is_even: bool = False


def shardings_from_plan(
    model: nn.Module,
    plan: Mapping[str, object] | None,
    mesh: DeviceMesh,
    *,
    key_value_heads: Literal["refuse", "replicate"] = "refuse",
) -> dict[str, GivenSharding]:
    """Return the layout of every parameter that a plan of transformers or diffusers cuts or replicates, by name.

    The result is what `shardings=` takes. Nothing is read from the parameters but their shapes: the model may be on
    the meta device. Parameters the plan leaves alone are not in it.

    Args:
        model: The model before it is sharded: its parameters tell the global shapes.
        plan: Styles by module or parameter name, `*` standing for a layer number; None for the model's own
            `tp_plan` or `_tp_plan`.
        mesh: The mesh of one axis that the plan is for, e.g. `mesh["tp"]`.
        key_value_heads: What to do with fewer key-value heads than ranks: refuse, or give several ranks the same head.

    Raises:
        ShardingError: If a dim or a block does not divide over the axis where it has to, or heads cannot be dealt.
            Names the parameter, the block and the axis.
        InvalidInputError: If a style is unknown, a packed style has no blocks, or the mesh has several axes.
    """
    if mesh.ndim != 1:
        message = f"a plan is for one axis, but the mesh has {mesh.ndim}: pass mesh['tp'], or the axis it is for"
        raise InvalidInputError(message)
    rules = _own_plan(model) if plan is None else dict(plan)
    unused = set(rules)
    shardings: dict[str, GivenSharding] = {}
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = _rule_of(plain_name(name), rules)
        if key is None:
            continue
        unused.discard(key)
        cut = _cut_of(plain_name(name), parameter, rules[key], modules[name.rpartition(".")[0]])
        if cut is not None:
            shape = tuple(parameter.shape)
            shared = None
            if cut.dim == 0 and _KEY_VALUE.search(name):
                shared = _shared_heads(_num_key_value_heads(model), plain_name(name), shape, mesh, key_value_heads)
            shardings[plain_name(name)] = shared or _sharding(plain_name(name), shape, cut, mesh)
    unused -= {key for name in modules for key in _wildcards(plain_name(name))}
    if unused:
        message = f"rules of the plan match nothing in the model: {', '.join(sorted(unused))}"
        warnings.warn(message, CheckpointWarning, stacklevel=2)
    return shardings


def over_mesh(shape: tuple[int, ...], regions: Sequence[Region], mesh: DeviceMesh) -> Sharding:
    """Return the layout of a tensor that the ranks of a mesh of one axis cut into `regions`, in their order.

    If the mesh is one of several along an axis of a larger one, such as `mesh["tp"]`, the others hold the same.
    """
    root = mesh._get_root_mesh()  # noqa: SLF001 - torch has no public way to the other groups
    names, axis = root.mesh_dim_names or (), (mesh.mesh_dim_names or ("",))[0]
    groups = root.mesh.movedim(names.index(axis), -1) if axis in names else mesh.mesh
    rows: list[list[int]] = groups.reshape(-1, mesh.size()).tolist()
    by_rank: list[Region | None] = [None] * (1 + max(rank for row in rows for rank in row))
    for row in rows:
        for rank, region in zip(row, regions, strict=True):
            by_rank[rank] = region
    return Sharding(shape, tuple(by_rank))


def _own_plan(model: nn.Module) -> dict[str, object]:
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        message = f"{type(model).__name__} has no plan of its own: pass plan="
        raise InvalidInputError(message)
    return dict(plan)


def _wildcards(name: str) -> Iterator[str]:
    """Yield a name with `*` for its numbers: all of them, as transformers' plans write it, then only the first."""
    parts = name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    for replaced in (numbers, numbers[:1]):
        yield ".".join("*" if at in replaced else part for at, part in enumerate(parts))


def _rule_of(name: str, rules: Mapping[str, object]) -> str | None:
    """Return the rule for a parameter: its own, or its module's, by name or with `*` for numbers."""
    module = name.rpartition(".")[0]
    keys = (name, *_wildcards(name), module, *_wildcards(module))
    return next((key for key in keys if key in rules), None)


def _cut_of(name: str, parameter: torch.Tensor, style: object, module: nn.Module) -> Cut | None:
    """Return what a style does to a parameter; None if it leaves it alone."""
    is_bias, ndim = name.rpartition(".")[2] == "bias", parameter.ndim
    # A bias beside a packed weight is cut in one run by transformers, and block by block by diffusers.
    blocks: tuple[int, ...] = () if ndim == 1 else _PACKED_BLOCKS
    if not isinstance(style, str):
        style, blocks = _packed_style(name, style, module)
    if style in _PLAIN:
        return None
    if style in _COLWISE:
        return Cut(max(ndim - 2, 0))
    if style in _ROWWISE:
        return Cut(None if is_bias else ndim - 1)
    if style == "packed_colwise":
        return Cut(max(ndim - 2, 0), blocks, is_even=bool(blocks))
    if style == "packed_rowwise":
        return Cut(None) if ndim == 1 else Cut(ndim - 1, blocks, is_even=True)
    fixed = {
        "embedding_rowwise": Cut(0),
        "embedding_colwise": Cut(1),
        "grouped_gemm": Cut(0, is_even=True),
        "sequence_parallel": Cut(None),
    }
    if style not in fixed:
        message = f"{name}: the plan gives it the style {style!r}, which is not known"
        raise InvalidInputError(message)
    return fixed[style]


def _packed_style(name: str, style: object, module: nn.Module) -> tuple[str, tuple[int, ...]]:
    kind = type(style).__name__
    if kind not in _PACKED_CLASSES:
        message = f"{name}: the plan gives it the style {kind}, which is not known"
        raise InvalidInputError(message)
    word, attribute = _PACKED_CLASSES[kind]
    blocks: Sequence[int] | None = getattr(style, "blocks", None) or getattr(module, attribute, None)
    if not blocks:
        message = f"{name}: {kind} has no blocks, and its module has no {attribute}"
        raise InvalidInputError(message)
    return word, tuple(blocks)


def _sharding(name: str, shape: tuple[int, ...], cut: Cut, mesh: DeviceMesh) -> GivenSharding:
    if cut.dim is None:
        return mesh, (Replicate(),)
    size, group = shape[cut.dim], mesh.size()
    sizes = _block_sizes(name, size, cut)
    for block in sizes if cut.is_even else ():
        if block % group:
            what = f"a block of {block} along dim {cut.dim}" if cut.blocks else f"dim {cut.dim} of {size}"
            message = f"{name}: {what} does not divide over the {group} ranks of {_axis(mesh)}"
            raise ShardingError(message)
    if not cut.blocks:
        return mesh, (Shard(cut.dim),)
    return over_mesh(shape, block_regions(shape, dim=cut.dim, block_sizes=sizes, group_size=group), mesh)


def _block_sizes(name: str, size: int, cut: Cut) -> tuple[int, ...]:
    blocks = cut.blocks or (1,)
    unit, rest = divmod(size, sum(blocks))
    if rest:
        message = f"{name}: blocks {blocks} add up to {sum(blocks)}, which does not divide dim {cut.dim} of {size}"
        raise ShardingError(message)
    return tuple(block * unit for block in blocks)


def _num_key_value_heads(model: nn.Module) -> int | None:
    config: Any = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None)
    return heads if isinstance(heads, int) else None


def _shared_heads(
    heads: int | None, name: str, shape: tuple[int, ...], mesh: DeviceMesh, key_value_heads: str
) -> Sharding | None:
    """Return the layout of a key or value projection with fewer heads than ranks; None where heads need no care."""
    if heads is None or heads % mesh.size() == 0:
        return None
    if heads > mesh.size() or key_value_heads == "refuse":
        message = f"{name}: {heads} key-value heads do not divide over the {mesh.size()} ranks of {_axis(mesh)}"
        if heads < mesh.size():
            message += "; key_value_heads='replicate' gives several ranks the same head"
        raise ShardingError(message)
    regions = head_regions(shape, num_heads=heads, head_dim=shape[0] // heads, group_size=mesh.size())
    return over_mesh(shape, regions, mesh)


def _axis(mesh: DeviceMesh) -> str:
    return f"mesh axis {mesh.mesh_dim_names[0]!r}" if mesh.mesh_dim_names else "the mesh"
