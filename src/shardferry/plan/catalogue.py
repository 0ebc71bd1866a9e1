"""Which tensors a job holds, and who holds them: what all ranks have to know before a file can be laid out.

Ranks tell their patterns (shape, dtype, layouts) and a hash of the names under each. Ranks that tell the same have
the same names, so only one of them sends names; together that is about the number of names in the model, not that
times the number of ranks.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from shardferry.collector import paused_collector
from shardferry.errors import ShardingError
from shardferry.geometry.region import Region
from shardferry.geometry.sharding import MeshLayout, Sharding, Split
from shardferry.plan.agreement import describe_layout, hash_names, pattern_of
from shardferry.plan.match import natural_key
from shardferry.plan.target import Layout, Target, fitting_layouts, holders_of, region_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor of the job.

    Attributes:
        dtype: safetensors name of its dtype in memory.
        shape: Global shape, in elements as files count them.
        layout: How it is cut; None for a tensor nobody declared to be cut, which each of its ranks holds whole.
        ranks: The ranks that have it, ascending.
        memory: What the model calls it, if that is not the name it is written under.
        parts: Where its elements are, if it is made from tensors of the model by conversion rules.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: Layout | None
    ranks: tuple[int, ...]
    memory: str = ""
    parts: tuple[MadePart, ...] = ()


class MadePart(NamedTuple):
    """Elements of a tensor to write that some ranks hold of one tensor of the model.

    Attributes:
        memory: What the model calls that tensor.
        held: That tensor.
        region: Where the elements are in the tensor to write.
        origin: Where they are in the model's tensor.
        axes: Per dim of `region` the dim of `origin` with the same indices in the same order; -1 for one index that
            has none.
        ranks: The ranks that may write them.
    """

    memory: str
    held: Held
    region: Region
    origin: Region
    axes: tuple[int, ...]
    ranks: tuple[int, ...]


def inventory_to_bytes(targets: Sequence[Target], rank: int) -> bytes:
    """Return what a rank tells first: per pattern its hash, the layouts that fit, and a hash of the names."""
    rows = []
    for pattern, names in sorted(_by_pattern(targets).items()):
        members = [target for target in targets if pattern_of(target) == pattern]
        rows.append([pattern, _fits(members, rank), len(names), hash_names(names)])
    return json.dumps(rows, separators=(",", ":")).encode()


def spokesmen(told: Sequence[bytes]) -> dict[bytes, tuple[int, ...]]:
    """Return the ranks that told the same, by what they told; the first of each sends names for all of them."""
    groups: dict[bytes, list[int]] = defaultdict(list)
    for rank, data in enumerate(told):
        groups[_names_told(data)].append(rank)
    return {data: tuple(ranks) for data, ranks in groups.items()}


def names_to_bytes(targets: Sequence[Target]) -> bytes:
    """Return the patterns and names of a rank, for those that told the same and for all others."""
    definitions = {pattern_of(target): target for target in targets}
    parts = [
        [pattern, definitions[pattern].dtype, definitions[pattern].shape, _encode(definitions[pattern]), names]
        for pattern, names in sorted(_by_pattern(targets).items())
    ]
    return zlib.compress(json.dumps(parts, separators=(",", ":")).encode(), 1)


@paused_collector()
def make_catalogue(inventories: Sequence[bytes], names: Sequence[bytes]) -> dict[str, Held]:
    """Return every tensor of the job in natural order of the names; the same on every rank.

    Args:
        inventories: What `inventory_to_bytes` returned on every rank.
        names: What `names_to_bytes` returned on the first of every group of `spokesmen`; empty on the others.

    Raises:
        ShardingError: If ranks put a name under different patterns, or nothing tells which of two layouts is meant.
    """
    chosen = _chosen_layouts(inventories)
    found: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    targets: dict[int, Target] = {}
    for ranks in spokesmen(inventories).values():
        for pattern, dtype, shape, layouts, group in json.loads(zlib.decompress(names[ranks[0]])):
            if pattern not in targets:
                targets[pattern] = Target(("",), dtype, tuple(shape), (), tuple(map(_decode, layouts)))
            for name in group:
                found[name][pattern].extend(ranks)
    return {
        name: _merged(
            name,
            {pattern: _held(name, targets[pattern], chosen[pattern], found[name][pattern]) for pattern in found[name]},
        )
        for name in sorted(found, key=natural_key)
    }


def _merged(name: str, views: Mapping[int, Held]) -> Held:
    """Return one tensor from what groups of ranks say of it.

    Groups may hold whole copies of it on meshes of their own, as FSDP2 does with what tensor parallelism leaves alone.
    """
    first, *others = views.values()
    if not others:
        return first
    taken: set[int] = set()
    for held in views.values():
        mesh = set(held.ranks if held.layout is None else holders_of(held.layout))
        if (held.dtype, held.shape, held.layout is None) != (first.dtype, first.shape, False) or taken & mesh:
            raise ShardingError(_contradiction(name, views))
        taken |= mesh
    ranks = tuple(sorted(rank for held in views.values() for rank in held.ranks))
    return Held(first.dtype, first.shape, _joined(first.shape, tuple(views.values())), ranks)


@lru_cache(maxsize=1024)
def _joined(shape: tuple[int, ...], views: tuple[Held, ...]) -> Sharding:
    regions: list[Region | None] = [None] * (1 + max(rank for held in views for rank in held.ranks))
    for held in views:
        for rank in held.ranks:
            regions[rank] = region_of(held.layout, shape, rank)
    return Sharding(shape, tuple(regions))


def _held(name: str, target: Target, fits: int, ranks: Iterable[int]) -> Held:
    assert target.shape is not None
    if not target.layouts:
        return Held(target.dtype, target.shape, None, tuple(sorted(ranks)))
    fitting = [layout for at, layout in enumerate(target.layouts) if fits >> at & 1]
    if len(fitting) == 1:
        return Held(target.dtype, target.shape, fitting[0], tuple(sorted(ranks)))
    if fitting:
        message = (
            f"{name}: its placements can mean two layouts that differ, and the local sizes fit both. Pass model= (the "
            "sharded model the state dict comes from) or shardings= to say which"
        )
        raise ShardingError(message)
    message = (
        f"{name}: a rank holds a local tensor that its layout {describe_layout(target)} does not give. Check the "
        "placements, or give the true layout with shardings="
    )
    raise ShardingError(message)


def _contradiction(name: str, views: Mapping[int, Held]) -> str:
    said = "; ".join(f"rank {held.ranks[0]} has {_described(held)}" for held in views.values())
    return f"ranks disagree about {name}: {said}. Build the same model with the same mesh on every rank"


def _described(held: Held) -> str:
    layouts = () if held.layout is None else (held.layout,)
    return describe_layout(Target(("",), held.dtype, held.shape, held.shape, layouts))


def _by_pattern(targets: Sequence[Target]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = defaultdict(list)
    for target in targets:
        names[pattern_of(target)].append(target.name)
    return names


def _fits(targets: Sequence[Target], rank: int) -> int:
    mask = (1 << max(1, len(targets[0].layouts))) - 1
    for target in targets:
        if target.layouts and target.shape is not None:
            mask &= sum(1 << at for at in fitting_layouts(target, target.shape, rank))
    return mask


def _chosen_layouts(inventories: Sequence[bytes]) -> dict[int, int]:
    chosen: dict[int, int] = {}
    for data in inventories:
        for pattern, fits, _, _ in json.loads(data):
            chosen[pattern] = chosen.get(pattern, fits) & fits
    return chosen


def _names_told(inventory: bytes) -> bytes:
    """Return a digest of patterns and names only: ranks may fit different layouts and have the same names."""
    rows = [[pattern, count, names] for pattern, _, count, names in json.loads(inventory)]
    return blake2b(json.dumps(rows).encode(), digest_size=16).digest()


def _encode(target: Target) -> list[Any]:
    return [
        ["mesh", layout.mesh_shape, layout.ranks, layout.splits]
        if isinstance(layout, MeshLayout)
        else ["regions", layout.shape, [region and region.dims for region in layout.regions]]
        for layout in target.layouts
    ]


def _decode(data: list[Any]) -> Layout:
    if data[0] == "mesh":
        _, shape, ranks, splits = data
        return MeshLayout(tuple(shape), tuple(ranks), tuple(Split(*split) for split in splits))
    _, shape, regions = data
    return Sharding(tuple(shape), tuple(None if dims is None else _region(dims) for dims in regions))


def _region(dims: list[list[list[int]]]) -> Region:
    return Region(tuple(tuple((start, stop) for start, stop in intervals) for intervals in dims))


def holders(held: Held) -> tuple[int, ...]:
    """Return the ranks that have the tensor and that its layout names."""
    return held.ranks if held.layout is None else _common(held.ranks, held.layout)


@lru_cache(maxsize=4096)
def _common(ranks: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    return tuple(sorted(set(ranks) & set(holders_of(layout))))


def replica_names(catalogue: Mapping[str, Held], rank: int, *, check_declared: bool) -> list[str]:
    """Return the names of which a rank has to hash its copy, in the catalogue's order.

    Plain tensors that several ranks have are always compared; tensors declared replicated only when asked.
    """
    return [
        name
        for name, held in catalogue.items()
        if rank in held.ranks and len(held.ranks) > 1 and (held.layout is None or check_declared)
    ]
