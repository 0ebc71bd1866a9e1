"""What a DTensor's placements truly mean, as neutral layouts.

Placements apply left to right over the mesh axes. FSDP2 over tensor parallelism writes the same notation but cuts the
tensor-parallel axis first; the two differ where a dim does not divide. The model's FSDP state knows which one it is;
a detached DTensor does not, and then both are offered and the local sizes of all ranks have to decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardferry.errors import InvalidInputError, ShardingError
from shardferry.geometry.sharding import MeshLayout, Sharding, Split, region_at

if TYPE_CHECKING:
    from torch import nn

# What a caller may give for a tensor whose own layout cannot be trusted: a mesh and placements that apply left to
# right, or the region of every rank.
GivenSharding = tuple[DeviceMesh, Sequence[Placement]] | Sharding


class _KnownMesh(NamedTuple):
    """What is kept of a mesh, because torch computes it anew at every look.

    Attributes:
        shape: Its size along every axis.
        ranks: Its ranks, row-major.
        layouts: What notations on it have been found to mean: a model has few of them.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    layouts: dict[tuple[object, ...], tuple[MeshLayout, ...]]


_known_meshes: WeakKeyDictionary[DeviceMesh, _KnownMesh] = WeakKeyDictionary()


class FsdpCut(NamedTuple):
    """How FSDP2 cut one parameter: the state it keeps, and the mesh axis it cut last.

    Attributes:
        param: FSDP2's own record of the parameter.
        axis: Axis of the sharded DTensor's mesh that FSDP2 cuts, or None if it only replicates.
        dim: Tensor dim it cuts.
    """

    param: Any
    axis: int | None
    dim: int


def fsdp_cuts(model: nn.Module) -> dict[int, FsdpCut]:
    """Return FSDP2's record of every parameter it manages, by the `id` of the sharded parameter."""
    return {id(param.sharded_param): _cut_of(param) for module in model.modules() for param in _fsdp_params(module)}


def layouts_of(tensor: DTensor, cut: FsdpCut | None, name: str) -> tuple[MeshLayout, ...]:
    """Return the layouts a DTensor's placements can mean: one, or two if nothing tells them apart.

    Args:
        tensor: The tensor; its local part is not looked at.
        cut: FSDP2's record of it, if the model has one.
        name: For errors.

    Raises:
        ShardingError: If a placement is `Partial`, or unknown.
    """
    known = _known(tensor.device_mesh)
    key = (tensor.placements, tuple(tensor.shape), _shard_order(tensor), cut and (cut.axis,))
    if key not in known.layouts:
        known.layouts[key] = _layouts_of(tensor, known, cut, name)
    return known.layouts[key]


def given_layout(given: GivenSharding, num_dims: int, name: str) -> MeshLayout | Sharding:
    """Return the layout a caller gave for a tensor of `num_dims` dims.

    Raises:
        InvalidInputError: If it is no layout.
        ShardingError: If a placement is `Partial`, or unknown.
    """
    if isinstance(given, Sharding):
        return given
    if not _is_pair(given):
        raise InvalidInputError(f"shardings= gives {given!r} for {name}; it must be (mesh, placements) or a Sharding")
    mesh, placements = given
    splits = tuple(_splits(_normalised(placements, num_dims, name)))
    known = _known(mesh)
    return MeshLayout(known.shape, known.ranks, splits)


def _layouts_of(tensor: DTensor, mesh: _KnownMesh, cut: FsdpCut | None, name: str) -> tuple[MeshLayout, ...]:
    placements = _normalised(tensor.placements, tensor.ndim, name)
    shape, ranks = mesh.shape, mesh.ranks
    if cut is not None:
        return (MeshLayout(shape, ranks, _cut_last(placements, cut.axis)),)
    in_order = MeshLayout(shape, ranks, _in_order(placements, _shard_order(tensor)))
    strided = [axis for axis, placement in enumerate(placements) if isinstance(placement, _StridedShard)]
    if not strided:
        return (in_order,)
    other = MeshLayout(shape, ranks, _cut_last(placements, strided[0]))
    size = tuple(tensor.shape)
    same = all(region_at(size, in_order, at) == region_at(size, other, at) for at in range(len(ranks)))
    return (in_order,) if same or not _cut_again(placements, strided[0]) else (in_order, other)


def _is_pair(given: object) -> bool:
    if not isinstance(given, Sequence) or len(given) != 2:  # noqa: PLR2004 - a pair
        return False
    return isinstance(given[0], DeviceMesh) and isinstance(given[1], Sequence)


def _fsdp_params(module: nn.Module) -> Iterator[Any]:
    # FSDP2 keeps this to itself, but nothing else says in which order it cut: see the module docstring.
    state = getattr(module, "_get_fsdp_state", None)
    if state is None:
        return
    groups = getattr(state(), "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.13 keeps one group
        group = state()._fsdp_param_group  # noqa: SLF001 - see above
        groups = [] if group is None else [group]
    for group in groups:
        yield from group.fsdp_params


def _cut_of(param: Any) -> FsdpCut:  # noqa: ANN401 - FSDP2's own class is private
    info, dim = param.mesh_info, param.fsdp_placement.dim
    if not getattr(info, "is_spmd_mesh", False):
        return FsdpCut(param, info.shard_mesh_dim, dim)
    placements, unsharded = param._sharding_spec.placements, param._unsharded_dtensor_spec.placements  # noqa: SLF001
    flattened = len(placements) != len(unsharded)
    for axis, placement in enumerate(placements):
        cuts = isinstance(placement, Shard | _StridedShard) and placement.dim == dim
        if cuts and (flattened or isinstance(unsharded[axis], Replicate)):
            return FsdpCut(param, axis, dim)
    return FsdpCut(param, None, dim)


def _known(mesh: DeviceMesh) -> _KnownMesh:
    if mesh not in _known_meshes:
        ranks = mesh.mesh
        _known_meshes[mesh] = _KnownMesh(tuple(ranks.shape), tuple(ranks.flatten().tolist()), {})
    return _known_meshes[mesh]


def _normalised(placements: Iterable[Placement], num_dims: int, name: str) -> tuple[Placement, ...]:
    return tuple(_checked(placement, num_dims, axis, name) for axis, placement in enumerate(placements))


def _checked(placement: Placement, num_dims: int, axis: int, name: str) -> Placement:
    if isinstance(placement, Replicate):
        return placement
    # _StridedShard is a subclass of Shard in torch 2.8 and none in 2.13: ask for it first.
    if isinstance(placement, _StridedShard):
        return _StridedShard(_dim(placement.dim, num_dims, name), split_factor=placement.split_factor)
    if isinstance(placement, Shard):
        return Shard(_dim(placement.dim, num_dims, name))
    kind = "partial (unreduced)" if isinstance(placement, Partial) else f"placed as {placement}"
    message = f"{name}: the values on mesh axis {axis} are {kind}, which is no layout of a stored tensor"
    raise ShardingError(message)


def _dim(dim: int, num_dims: int, name: str) -> int:
    if not -num_dims <= dim < num_dims:
        message = f"{name}: dim {dim} is cut, but the tensor has {num_dims} dims"
        raise ShardingError(message)
    return dim % num_dims


def _shard_order(tensor: DTensor) -> tuple[Any, ...] | None:
    """Return in which order the spec says its axes cut, per tensor dim; None before torch 2.13, which says nothing."""
    order: tuple[Any, ...] | None = getattr(tensor._spec, "shard_order", None)  # noqa: SLF001 - it has no public name
    return order


def _in_order(placements: Sequence[Placement], order: Iterable[Any] | None) -> tuple[Split, ...]:
    """Return the cuts in the order the spec says, left to right unless it says otherwise."""
    splits = {split.axis: split for split in _splits(placements)}
    named = [axis for entry in order or () for axis in entry.mesh_dims]
    if sorted(named) != sorted(splits):
        return tuple(splits.values())
    return tuple(splits[axis] for axis in named)


def _cut_last(placements: Sequence[Placement], last: int | None) -> tuple[Split, ...]:
    """Return the cuts left to right, but the one over axis `last` at the end and in one run."""
    splits = list(_splits(placements))
    final = [Split(split.axis, split.dim) for split in splits if split.axis == last]
    return tuple([split for split in splits if split.axis != last] + final)


def _cut_again(placements: Sequence[Placement], axis: int) -> bool:
    """Return whether an axis to the right cuts the same dim, so that FSDP2 could have written it."""
    strided = placements[axis]
    return any(
        isinstance(placement, Shard | _StridedShard) and placement.dim == strided.dim  # type: ignore[attr-defined]
        for placement in placements[axis + 1 :]
    )


def _splits(placements: Iterable[Placement]) -> Iterator[Split]:
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            yield Split(axis, placement.dim, int(placement.split_factor))
        elif isinstance(placement, Shard):
            yield Split(axis, placement.dim)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory this rank holds: a DTensor's local tensor, or the tensor itself, detached."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    local = tensor._local_tensor  # noqa: SLF001 - to_local makes a view with its gradient's function: 50 times slower
    if type(local) is torch.Tensor:
        return local.detach()
    with torch.no_grad():  # else to_local, which waits for what a collective is still writing, would record a graph
        return tensor.to_local().detach()
