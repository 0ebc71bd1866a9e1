"""Describe a job that does not exist: from a mesh and rules in words to who would hold what of a checkpoint.

A mesh is `fsdp=8,tp=4`: axes in the order of torch's `DeviceMesh`, ranks row-major, so that the last axis varies
fastest. A rule is `REGEX=dim@axis`: tensors whose whole name matches are cut along `dim` over that axis. All rules
that match a tensor act, in the order given, each on what the one before left; an axis that has already cut it is
skipped, so that special rules come first and defaults last. What no rule cuts is replicated.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardferry.errors import InvalidInputError
from shardferry.format.problem import shown
from shardferry.geometry.sharding import MeshLayout, Split
from shardferry.plan.catalogue import Held

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardferry.format.index import CheckpointIndex

# More than any machine has; a typing error would otherwise take all memory.
MAX_RANKS = 1 << 17

_AXIS = re.compile(r"\s*(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<size>[0-9]{1,9})\s*", re.ASCII)
_CUT = re.compile(r"\s*(?P<dim>-?[0-9]{1,3})\s*@\s*(?P<axis>[A-Za-z_]\w*)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh of ranks with named axes.

    Attributes:
        axes: Names, outermost first.
        sizes: Ranks along each.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """Ranks in the mesh."""
        return math.prod(self.sizes)


class ShardRule(NamedTuple):
    """One cut of all tensors whose names match.

    Attributes:
        text: The rule as given.
        pattern: Has to match the whole name.
        dim: Tensor dim that is cut; negative counts from the last.
        axis: Index of the mesh axis it is cut over.
    """

    text: str
    pattern: re.Pattern[str]
    dim: int
    axis: int


def parse_mesh(text: str) -> Mesh:
    """Return the mesh that `text` describes.

    Raises:
        InvalidInputError: If it is not `name=size[,name=size...]`, names an axis twice, or has too many ranks.

    Examples:
        >>> parse_mesh("fsdp=8,tp=4")
        Mesh(axes=('fsdp', 'tp'), sizes=(8, 4))
    """
    found = [_AXIS.fullmatch(part) for part in text.split(",")]
    matches = [match for match in found if match is not None and int(match["size"])]
    if len(matches) != len(found):
        message = f"mesh {shown(text)!r}: write axes with their sizes, outermost first, like fsdp=8,tp=4"
        raise InvalidInputError(message)
    mesh = Mesh(tuple(match["name"] for match in matches), tuple(int(match["size"]) for match in matches))
    if len(set(mesh.axes)) != len(mesh.axes):
        message = f"mesh {shown(text)!r} names an axis twice"
        raise InvalidInputError(message)
    if mesh.world_size > MAX_RANKS:
        message = f"mesh {shown(text)!r} has {mesh.world_size} ranks, more than the {MAX_RANKS} that can be simulated"
        raise InvalidInputError(message)
    return mesh


def parse_rule(text: str, mesh: Mesh) -> ShardRule:
    """Return the rule that `text` describes.

    Raises:
        InvalidInputError: If it is not `REGEX=dim@axis`, the expression is wrong, or the mesh has no such axis.

    Examples:
        >>> rule = parse_rule(".*up_proj.weight=0@tp", parse_mesh("fsdp=8,tp=4"))
        >>> rule.pattern.pattern, rule.dim, rule.axis
        ('.*up_proj.weight', 0, 1)
    """
    expression, separator, cut = text.rpartition("=")
    match = _CUT.fullmatch(cut)
    if not separator or not expression or match is None:
        message = f"shard rule {shown(text)!r}: write REGEX=dim@axis, like '.*up_proj.weight=0@{mesh.axes[-1]}'"
        raise InvalidInputError(message)
    if match["axis"] not in mesh.axes:
        message = f"shard rule {shown(text)!r}: the mesh has axes {', '.join(mesh.axes)}, not {match['axis']}"
        raise InvalidInputError(message)
    try:
        pattern = re.compile(expression)
    except re.error as error:
        message = f"shard rule {shown(text)!r}: {shown(expression)!r} is no regular expression: {error}"
        raise InvalidInputError(message) from error
    return ShardRule(text, pattern, int(match["dim"]), mesh.axes.index(match["axis"]))


def simulate_job(index: CheckpointIndex, mesh: Mesh, rules: Sequence[ShardRule]) -> dict[str, Held]:
    """Return what every rank of the mesh would hold of every tensor of a checkpoint, by name in the index's order.

    A tensor that lacks the dim a rule names is not cut by it.

    Args:
        index: The checkpoint.
        mesh: The ranks, numbered row-major.
        rules: In the order in which they act.

    Raises:
        InvalidInputError: If a rule cuts no tensor at all.
    """
    ranks = tuple(range(mesh.world_size))
    layouts: dict[tuple[Split, ...], MeshLayout] = {}  # one object per layout: comparing long tuples of ranks is slow
    used: set[int] = set()
    job = {}
    for name, info in index.tensors.items():
        splits: dict[int, Split] = {}
        for at, rule in enumerate(rules):
            num_dims = len(info.shape)
            if rule.axis in splits or not -num_dims <= rule.dim < num_dims or rule.pattern.fullmatch(name) is None:
                continue
            splits[rule.axis] = Split(rule.axis, rule.dim % num_dims)
            used.add(at)
        key = tuple(splits.values())
        if key not in layouts:
            layouts[key] = MeshLayout(mesh.sizes, ranks, key)
        job[name] = Held(info.dtype, info.shape, layouts[key], ranks)
    for at, rule in enumerate(rules):
        if at not in used:
            raise InvalidInputError(_why_unused(rule, at, rules, index))
    return job


def consecutive_nodes(world_size: int, ranks_per_node: int) -> tuple[int, ...]:
    """Return the node of every rank when ranks fill one node after another.

    Raises:
        InvalidInputError: If no rank fits on a node.

    Examples:
        >>> consecutive_nodes(5, 2)
        (0, 0, 1, 1, 2)
    """
    if ranks_per_node < 1:
        message = f"a node has at least one rank, not {ranks_per_node}"
        raise InvalidInputError(message)
    return tuple(rank // ranks_per_node for rank in range(world_size))


def _why_unused(rule: ShardRule, at: int, rules: Sequence[ShardRule], index: CheckpointIndex) -> str:
    """Say why a rule cuts nothing; a typing error in an expression would else leave a model replicated silently."""
    shapes: Mapping[str, tuple[int, ...]] = {
        name: info.shape for name, info in index.tensors.items() if rule.pattern.fullmatch(name)
    }
    said = f"shard rule {shown(rule.text)!r} cuts no tensor: "
    if not shapes:
        example = next(iter(index.tensors), "")
        return f"{said}its expression has to match a whole name of the checkpoint, such as {shown(example)!r}"
    if all(not -len(shape) <= rule.dim < len(shape) for shape in shapes.values()):
        name, shape = max(shapes.items(), key=lambda item: len(item[1]))
        return f"{said}none that matches has a dim {rule.dim}; {shown(name)} has shape {list(shape)}"
    earlier = next((other.text for other in rules[:at] if other.axis == rule.axis), "")
    return f"{said}rules before it, such as {shown(earlier)!r}, have cut all that match over the same axis"
