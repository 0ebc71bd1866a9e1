"""The JAX side of a load: offers what there is to fill, hands out its memory, and makes arrays of it.

On the CPU an array takes over the memory that was read into; devices of one process that hold the same box share it,
which is safe because arrays are never changed, and a donated one is copied if it does not own its memory. For
accelerators, see `shardferry.jax.sending`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from shardferry.errors import InvalidInputError, ShardingError
from shardferry.format.dtypes import BITS
from shardferry.jax.dtypes import numpy_dtype, refuse_truncated
from shardferry.jax.memory import BoxMemory, PartDestination, make_boxes, memories
from shardferry.jax.parts import box_of, is_local, parts_to_load, parts_to_save
from shardferry.jax.sending import Sender, SentDestination, is_on_host
from shardferry.plan.target import Target
from shardferry.storage.placement import advise_huge_pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from shardferry.execute.load import Destination, Staging
    from shardferry.execute.meter import Meter
    from shardferry.jax.leaves import Leaf
    from shardferry.jax.parts import Box, Part, Parts
    from shardferry.plan.load import LoadPlan
    from shardferry.storage.base import Bytes


class _Wanted(NamedTuple):
    """A part of a leaf that this process holds."""

    leaf: Leaf
    part: Part


class Filler:
    """What one process offers to a load, and what comes of it.

    Attributes:
        targets: What there is to fill, in neutral words.
        unfilled: Nothing: what no checkpoint fills is no leaf.
    """

    def __init__(self, leaves: Iterable[Leaf]) -> None:
        """Prepare to fill arrays for the leaves this process has devices of."""
        self.unfilled: Sequence[str] = ()
        self._leaves = tuple(leaves)
        self._wanted: dict[str, _Wanted] = {}
        self._boxes: dict[int, dict[Box, BoxMemory]] = {leaf.position: {} for leaf in self._leaves}
        self._destinations: dict[str, PartDestination | SentDestination] = {}
        self._sender: Sender | None = None
        self.targets = list(self._offer())

    def allocate(self, plan: LoadPlan, meter: Meter) -> Mapping[str, Destination]:
        """Return new memory for every part of the plan; an accelerator's is made when it begins to be filled."""
        self._sender = Sender(meter)
        for tensor in plan.tensors:
            leaf, part = self._wanted[tensor.name]
            if not is_on_host(leaf):
                self._destinations[tensor.name] = SentDestination(leaf, part, self._sender)
                continue
            boxes = make_boxes(part, leaf.dtype, tensor.copies[0].first_byte if tensor.copies else 0)
            self._boxes[leaf.position].update(boxes)
            self._destinations[tensor.name] = PartDestination(tuple(boxes.values()), leaf.dtype, leaf.name)
        everything = (memory.array for boxes in self._boxes.values() for memory in boxes.values())
        advise_huge_pages(memories(everything))
        return self._destinations

    def staging(self, num_bytes: int, meter: Meter) -> Sequence[Staging]:
        """Return the staging ring of one reading thread: what is read into it is copied out at once."""
        return [_Scratch(num_bytes, meter)]

    def cast_counts(self) -> tuple[int, int]:
        """Return how many parts were cast, and how many finite values became infinite by it."""
        destinations = self._destinations.values()
        return sum(d.was_cast for d in destinations), sum(d.num_overflowed for d in destinations)

    def commit(self) -> None:
        """Do nothing: `arrays` makes what was read into arrays."""

    def arrays(self, missing: Iterable[str]) -> dict[int, jax.Array]:
        """Return what was loaded, by position in the tree; each array has exactly the sharding asked for.

        Args:
            missing: Names the checkpoint lacks.
        """
        lacking = set(missing)
        assert self._sender is not None
        return {
            leaf.position: self._array(leaf) if is_on_host(leaf) else self._sender.array(leaf)
            for leaf in self._leaves
            if leaf.name not in lacking
        }

    def _offer(self) -> Iterator[Target]:
        for leaf in self._leaves:
            refuse_truncated(leaf.dtype, leaf.name)
            parts = self._parts(leaf)
            for at, part in enumerate(parts.by_process[jax.process_index()]):
                layouts = () if is_local(leaf.sharding) else (parts.layouts[at],)
                target = Target((leaf.name,), leaf.dtype, leaf.shape, part.region.shape, layouts, at)
                if target.name in self._wanted:
                    raise InvalidInputError(f"two arrays of the tree are called {target.name}")
                self._wanted[target.name] = _Wanted(leaf, part)
                yield target

    def _parts(self, leaf: Leaf) -> Parts:
        try:
            # Boxes on devices of this process alone make the whole array, which others may have of their own.
            if is_local(leaf.sharding):
                parts = parts_to_save(leaf.sharding, leaf.shape)
                assert parts is not None
                return parts
            return parts_to_load(leaf.sharding, leaf.shape, BITS[leaf.dtype])
        except ShardingError as error:
            raise ShardingError(f"{leaf.name}: {error}") from error

    def _array(self, leaf: Leaf) -> jax.Array:
        boxes = self._boxes[leaf.position]
        dtype = numpy_dtype(leaf.dtype)

        def content(index: tuple[slice, ...] | None) -> NDArray[np.generic]:
            assert index is not None
            return boxes[box_of(index, leaf.shape)].array.view(dtype)

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, content, dtype=dtype)


class _Scratch:
    """One reused buffer, emptied at once."""

    def __init__(self, num_bytes: int, meter: Meter) -> None:
        """Hold one buffer of `num_bytes`."""
        self._buffer = np.empty(num_bytes, np.uint8)
        meter.add(num_bytes)

    def memory(self, num_bytes: int) -> Bytes:
        """Return `num_bytes` of the buffer."""
        return self._buffer[:num_bytes]

    def hold(self, data: Bytes) -> Bytes:
        """Return `data`: it is copied out of at once."""
        return data

    def transfer(self) -> AbstractContextManager[None]:
        """Give a context that adds nothing."""
        return nullcontext()

    def wait(self) -> None:
        """Return at once."""
