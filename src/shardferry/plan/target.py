"""What one rank's model offers to be filled, in neutral words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardferry.errors import ShardingError
from shardferry.geometry.region import Region, whole
from shardferry.geometry.sharding import MeshLayout, Sharding, region_at

if TYPE_CHECKING:
    from collections.abc import Mapping

Layout = MeshLayout | Sharding


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the model, and how it is cut over the ranks.

    Attributes:
        names: The model's names for this memory; more than one if the model ties them.
        dtype: safetensors name of its dtype.
        shape: Global shape in elements as the file counts them; None if only the checkpoint can tell.
        local_shape: Shape of what this rank holds, counted likewise.
        layouts: The layouts its notation can mean, nearly always one; empty for a tensor nobody declared to be cut,
            of which this rank holds the whole.
        part: Which of the parts of the tensor, from 0, if a rank holds several that make no single region, or in
            memories of their own, as a process with several devices does. Every part is a target.
    """

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...] | None
    local_shape: tuple[int, ...]
    layouts: tuple[Layout, ...] = ()
    part: int = 0

    @property
    def name(self) -> str:
        """What this memory is called, on all ranks alike; no two targets have the same."""
        return f"{self.names[0]} (part {self.part + 1})" if self.part else self.names[0]


def region_of(layout: Layout | None, shape: tuple[int, ...], rank: int) -> Region | None:
    """Return the region a rank holds of a tensor of global `shape`; None if the rank does not have the tensor.

    Raises:
        ShardingError: If the layout is for another shape.
    """
    if layout is None:
        return whole(shape)
    if isinstance(layout, MeshLayout):
        return region_at(shape, layout, layout.ranks.index(rank)) if rank in layout.ranks else None
    if layout.shape != shape:
        message = f"the sharding given is for shape {layout.shape}, but the tensor has shape {shape}"
        raise ShardingError(message)
    return layout.regions[rank] if rank < len(layout.regions) else None


def fitting_layouts(target: Target, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the indices of the target's layouts under which this rank's local shape is right."""
    fitting = []
    for index, layout in enumerate(target.layouts):
        region = region_of(layout, shape, rank)
        if region is not None and _fits(region.shape, target.local_shape):
            fitting.append(index)
    return tuple(fitting)


def _fits(shape: tuple[int, ...], local_shape: tuple[int, ...]) -> bool:
    """Return whether the shapes are one; those without elements always are.

    FSDP2 gives every empty shard 0 in the dim it cuts, also one that is empty because of another dim.
    """
    return shape == local_shape or (0 in shape and 0 in local_shape)


def holders_of(layout: Layout) -> tuple[int, ...]:
    """Return the ranks that have the tensor, ascending."""
    if isinstance(layout, MeshLayout):
        return tuple(sorted(layout.ranks))
    return tuple(rank for rank, region in enumerate(layout.regions) if region is not None)


def resolve(targets: tuple[Target, ...], chosen: Mapping[str, int]) -> dict[str, Layout | None]:
    """Return the layout of every target, by name, given the index agreed for those with several."""
    return {target.name: target.layouts[chosen.get(target.name, 0)] if target.layouts else None for target in targets}
