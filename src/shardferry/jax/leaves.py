"""The leaves of a pytree, and what a checkpoint calls them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from shardferry.errors import InvalidInputError, ShardingError
from shardferry.jax.dtypes import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterable

# Any tree that JAX knows: dicts, lists, registered dataclasses, flax nnx states, equinox modules.
PyTree = Any


class Stacked(NamedTuple):
    """Checkpoint tensors that are one array of the tree, stacked along a new dim, as scanned layers are.

    Attributes:
        names: Their names, in order.
        dim: The array's dim that counts them.
    """

    names: tuple[str, ...]
    dim: int = 0


# What the checkpoint calls a leaf: a name, names stacked along dim 0, names stacked along another; None leaves it out.
StoredAs = str | list[str] | Stacked | None
Names = Mapping[str, StoredAs] | Callable[[str], StoredAs]


@dataclass(frozen=True, slots=True)
class Leaf:
    """An array of a tree.

    Attributes:
        key_path: Its key path, dot-joined.
        stored_as: What the checkpoint calls it.
        shape: Global shape.
        dtype: safetensors name of its dtype.
        sharding: How its devices hold it.
        position: Which of the tree's leaves it is.
    """

    key_path: str
    stored_as: str | Stacked
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding
    position: int

    @property
    def is_stored_whole(self) -> bool:
        """Whether the checkpoint has it as one tensor."""
        return isinstance(self.stored_as, str)

    @property
    def name(self) -> str:
        """What errors and reports call it: its name in the checkpoint, its key path if it is made of several."""
        return self.stored_as if isinstance(self.stored_as, str) else self.key_path


class Tree(NamedTuple):
    """A pytree taken apart.

    Attributes:
        values: Its leaves as they were, one per position.
        leaves: Those of them that are arrays the checkpoint has a name for.
        others: Key paths of those that are no arrays.
        treedef: What puts values together again.
    """

    values: list[Any]
    leaves: tuple[Leaf, ...]
    others: tuple[str, ...]
    treedef: Any


def take_apart(tree: PyTree, names: Names | None) -> Tree:
    """Return the leaves of a tree of arrays, or of what stands for arrays, with their names.

    Leaves that are no arrays (an equinox module has functions) are kept as they are.

    Raises:
        InvalidInputError: If a dtype cannot be stored, or `names` is wrong: a key that is no key path, or a name
            used twice.
        ShardingError: If a sharding cannot be planned.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    keys = _key_paths(tree, [path for path, _ in paths])
    if isinstance(names, Mapping):
        unknown = sorted(set(names) - set(keys))
        if unknown:
            raise InvalidInputError(f"names= has {', '.join(unknown[:5])}, but the tree has no such key path")
    values = [value for _, value in paths]
    leaves = tuple(_leaves(keys, values, names))
    _check_unique(leaves)
    others = tuple(
        key
        for key, value in zip(keys, values, strict=True)
        if not _is_array(value) and _stored_as(key, names) is not None
    )
    return Tree(values, leaves, others, treedef)


def put_together(tree: Tree, arrays: Mapping[int, jax.Array]) -> PyTree:
    """Return the tree with the leaves at some positions replaced."""
    return tree.treedef.unflatten([arrays.get(at, value) for at, value in enumerate(tree.values)])


def _key_paths(tree: PyTree, paths: Iterable[tuple[Any, ...]]) -> list[str]:
    """Return the key paths of all leaves, without the `value` in which a flax nnx variable keeps its array."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        variables = set()
    else:
        found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, nnx.Variable))
        variables = {path for path, node in found if isinstance(node, nnx.Variable)}
    return [
        jax.tree_util.keystr(path[:-1] if path[:-1] in variables else path, simple=True, separator=".")
        for path in paths
    ]


def _leaves(keys: list[str], values: list[Any], names: Names | None) -> Iterable[Leaf]:
    for position, (key, value) in enumerate(zip(keys, values, strict=True)):
        if not _is_array(value):
            continue
        stored_as = _stored_as(key, names)
        if stored_as is None:
            continue
        called = stored_as if isinstance(stored_as, str) else key
        if isinstance(stored_as, Stacked):
            _check_stack(stored_as, tuple(value.shape), key)
        dtype = dtype_name(value.dtype, called)
        sharding = _sharding(getattr(value, "sharding", None), called)
        yield Leaf(key, stored_as, tuple(value.shape), dtype, sharding, position)


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _stored_as(key: str, names: Names | None) -> str | Stacked | None:
    said: StoredAs = key
    if isinstance(names, Mapping):
        said = names.get(key, key)
    elif names is not None:
        said = names(key)
    return Stacked(tuple(said)) if isinstance(said, list) else said


def _sharding(sharding: Sharding | None, name: str) -> Sharding:
    """Return a leaf's own sharding, or the one that has every device hold the whole."""
    if sharding is None:
        if jax.device_count() == 1:
            return SingleDeviceSharding(jax.devices()[0])
        return NamedSharding(Mesh(np.array(jax.devices()), ("all",)), PartitionSpec())
    if isinstance(sharding, NamedSharding) and PartitionSpec.UNCONSTRAINED in sharding.spec:
        raise ShardingError(f"{name}: {sharding.spec} leaves a dim to the compiler: say how the array is to be cut")
    return sharding


def _check_stack(stack: Stacked, shape: tuple[int, ...], key: str) -> None:
    if not -len(shape) <= stack.dim < len(shape) or shape[stack.dim] != len(stack.names):
        raise InvalidInputError(
            f"{key}: {len(stack.names)} names are stacked along dim {stack.dim}, but its shape is {list(shape)}"
        )


def _check_unique(leaves: Iterable[Leaf]) -> None:
    seen: dict[str, str] = {}
    for leaf in leaves:
        first = seen.setdefault(leaf.name, leaf.key_path)
        if first != leaf.key_path:
            raise InvalidInputError(f"{first} and {leaf.key_path} are both called {leaf.name}: each needs its own name")
