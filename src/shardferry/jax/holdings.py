"""What this process holds of an array, as a save and a warm-up tell the other processes.

They know one region of a tensor per process. The boxes of a process make one unless the mesh strews its devices, as
six processes of eight devices on a mesh of 16 x 3 do. Then every box is told as a tensor of its own, which several
processes may hold, and rules say how the array is cut into them: a save undoes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax

from shardferry.convert.rules import Convert
from shardferry.convert.steps import Split
from shardferry.errors import ShardingError
from shardferry.geometry.region import box, whole
from shardferry.geometry.sharding import Sharding as Layout
from shardferry.jax.parts import Part, boxes_of, parts_to_save
from shardferry.plan.target import Target

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardferry.jax.leaves import Leaf
    from shardferry.jax.parts import Box


class Holding(NamedTuple):
    """Something this process holds.

    Attributes:
        target: What it is to the others.
        part: Where it is in its array.
    """

    target: Target
    part: Part


def holdings(leaf: Leaf, *, is_plain: bool) -> Iterator[Holding]:
    """Yield what this process holds of an array.

    Args:
        leaf: The array.
        is_plain: Whether it is this process's own, of which the others may have copies.

    Raises:
        ShardingError: If the sharding does not fit the shape; names the array.
    """
    try:
        parts = parts_to_save(leaf.sharding, leaf.shape)
    except ShardingError as error:
        raise ShardingError(f"{leaf.name}: {error}") from error
    if parts is None:
        yield from _boxes(leaf)
        return
    for part in parts.by_process[jax.process_index()]:
        layouts = () if is_plain else parts.layouts
        yield Holding(Target((leaf.name,), leaf.dtype, leaf.shape, part.region.shape, layouts), part)


def cutting_rules(leaves: Iterable[Leaf]) -> tuple[Convert, ...]:
    """Return the rules that cut into boxes what a process holds no region of; all of them fit their shardings."""
    strewn = (leaf for leaf in leaves if parts_to_save(leaf.sharding, leaf.shape) is None)
    return tuple(rule for leaf in strewn for rule in _cuts(leaf))


def _boxes(leaf: Leaf) -> Iterator[Holding]:
    by_process = boxes_of(leaf.sharding, leaf.shape)
    for held in by_process[jax.process_index()]:
        shape = tuple(stop - start for start, stop in held)
        layout = Layout(shape, tuple(whole(shape) if held in boxes else None for boxes in by_process))
        region = box([start for start, _ in held], shape)
        yield Holding(Target((_called(leaf, held),), leaf.dtype, shape, shape, (layout,)), Part(region, (held,)))


def _cuts(leaf: Leaf) -> Iterator[Convert]:
    """Yield rules that cut an array along one dim after another."""
    boxes = {held for boxes in boxes_of(leaf.sharding, leaf.shape) for held in boxes}
    for dim in range(len(leaf.shape)):
        for before in sorted({held[:dim] for held in boxes}):
            after = sorted({held[: dim + 1] for held in boxes if held[:dim] == before})
            sizes = tuple(stop - start for *_, (start, stop) in after)
            yield Convert((_called(leaf, before),), tuple(_called(leaf, one) for one in after), (Split(dim, sizes),))


def _called(leaf: Leaf, ranges: Box) -> str:
    """Return what a piece of an array is called, given its ranges in the first dims."""
    return f"{leaf.name}[{', '.join(f'{start}:{stop}' for start, stop in ranges)}]" if ranges else leaf.name
