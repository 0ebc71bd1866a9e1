"""Write a checkpoint anew from another one, without holding it: a save whose tensors are still in files.

Every rank takes an equal run of the rows of every tensor, so several processes share the work. Pieces are read when
they are about to be written; nothing is ever held but the buffers of the budget.
"""

from __future__ import annotations

import math
import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import numpy as np

from shardferry.convert.table import Converted, apply_rules
from shardferry.errors import CheckpointError, InvalidInputError
from shardferry.execute.gather import Part, gather
from shardferry.format.dtypes import BITS
from shardferry.format.problem import listed
from shardferry.geometry.region import whole
from shardferry.geometry.sharding import MeshLayout, Split, region_at
from shardferry.geometry.spans import BITS_PER_BYTE
from shardferry.plan.target import Target
from shardferry.storage.location import locate
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardferry.convert.rules import Rule
    from shardferry.convert.tensor import Tensor
    from shardferry.format.index import CheckpointIndex
    from shardferry.plan.save import Write
    from shardferry.storage.base import Bytes
    from shardferry.transport.bulk import Mover


LISTED = 5
# What a model has beside its weights; everything else in the folder of a checkpoint is left where it is.
EXTRA_SUFFIXES = frozenset({".json", ".txt", ".model", ".tiktoken", ".jinja", ".py"})
# They are copied in pieces: nothing bounds how large they are.
EXTRA_PIECE_BYTES = 4 * MIB


class RepackAdapter:
    """What a save needs, taken from a checkpoint instead of a model."""

    def __init__(
        self,
        index: CheckpointIndex,
        tensors: Mapping[str, Tensor],
        *,
        rank: int,
        world_size: int,
        cast: Callable[[Bytes, str, Bytes, str], None] | None,
        open_mover: Callable[[Callable[[], None]], AbstractContextManager[Mover]],
    ) -> None:
        """Offer the checkpoint's tensors under new names, or what rules make of them.

        Args:
            index: The checkpoint.
            tensors: What is written, by name.
            rank: This rank.
            world_size: Ranks that share the work.
            cast: Casts floats; None if nothing is to be cast.
            open_mover: Makes what moves bytes between several ranks, for a target whose files have one writer each.
        """
        self._index = index
        self._tensors = tensors
        self._cast = cast
        self._open_mover = open_mover
        self.targets = [
            target for name, tensor in tensors.items() for target in _targets(name, tensor, rank, world_size)
        ]

    def source(self, name: str) -> CheckpointSource:
        """Return a tensor as something that can be read in pieces."""
        return CheckpointSource(self._index, self._tensors[name], self._cast)

    def made_source(self, data: Bytes, dtype: str, shape: tuple[int, ...]) -> CheckpointSource:
        """Never called: what rules compute is computed where it is read."""
        raise AssertionError(dtype, shape, len(data))

    def content(self, name: str) -> Bytes:
        """Return a tensor's bytes, read whole."""
        tensor = self._tensors[name]
        out = np.empty(math.prod(tensor.shape) * BITS[tensor.dtype] // BITS_PER_BYTE, np.uint8)
        gather(self._index, {name: Part(tensor, whole(tensor.shape), out)})
        return out

    def mover(self, check: Callable[[], None]) -> AbstractContextManager[Mover]:
        """Return what moves bytes between the ranks. Collective."""
        return self._open_mover(check)

    def write_extras(self, folder: Path) -> None:
        """Copy the small files that belong to a model beside its weights: configuration, tokenizer, code."""
        files = locate(self._index.root).files
        for name in files.names():
            if PurePosixPath(name).suffix not in EXTRA_SUFFIXES or name.endswith(".index.json"):
                continue
            try:
                size = files.size(name)
            except CheckpointError:  # a folder of such a name, or a link to nowhere
                continue
            with (folder / name).open("wb") as out:
                for start in range(0, size, EXTRA_PIECE_BYTES):
                    out.write(files.read(name, start, min(size, start + EXTRA_PIECE_BYTES)))


class CheckpointSource:
    """One tensor of a checkpoint, read when it is about to be written."""

    def __init__(
        self, index: CheckpointIndex, tensor: Tensor, cast: Callable[[Bytes, str, Bytes, str], None] | None
    ) -> None:
        """Read a tensor, or make it of those it is made of."""
        self._index = index
        self._tensor = tensor
        self._cast = cast

    def direct(self, write: Write) -> Bytes | None:  # noqa: ARG002 - nothing of it is in memory
        """Return None: the bytes have to be read first."""
        return None

    def fetch(self, write: Write, out: Bytes) -> None:
        """Read what is to be written, and cast it if it is written in another dtype."""
        stored = self._tensor.dtype
        if stored == write.dtype:
            self._read(write, out)
            return
        assert self._cast is not None
        raw = np.empty(write.region.num_elements * BITS[stored] // BITS_PER_BYTE, np.uint8)
        self._read(write, raw)
        self._cast(raw, stored, out, write.dtype)

    def _read(self, write: Write, out: Bytes) -> None:
        gather(self._index, {write.name: Part(self._tensor, write.region, out)})


def rename(names: Sequence[str], rules: Sequence[tuple[str, str]]) -> dict[str, str]:
    r"""Return the old name of every new one, after applying regular expressions in order.

    Args:
        names: Names of the checkpoint.
        rules: Pattern and replacement, as `re.sub` takes them.

    Raises:
        InvalidInputError: If a pattern is no regular expression, matches nothing, or two tensors get one name.

    Examples:
        >>> rename(["a.w", "b.w"], [(r"^(.)\.", r"x.\1.")])
        {'x.a.w': 'a.w', 'x.b.w': 'b.w'}
    """
    new = {name: name for name in names}
    for pattern, replacement in rules:
        try:
            changed = {old: re.sub(pattern, replacement, name) for old, name in new.items()}
        except (re.error, IndexError) as error:
            raise InvalidInputError(f"--rename {pattern}={replacement}: {error}") from error
        if changed == new:
            raise InvalidInputError(f"--rename {pattern}={replacement} changes no name of the checkpoint")
        new = changed
    renamed: dict[str, str] = {}
    for old, name in new.items():
        if name in renamed:
            raise InvalidInputError(f"--rename gives {renamed[name]} and {old} the same name {name}")
        renamed[name] = old
    return renamed


def convert(tensors: Mapping[str, Tensor], rules: Sequence[Rule]) -> Converted:
    """Return what rules make of tensors.

    Raises:
        InvalidInputError: If a rule does not fit, or leaves a tensor behind that belongs to one it takes.
    """
    converted = apply_rules(tensors, rules)
    if converted.left:
        raise InvalidInputError(
            f"{listed(converted.left, LISTED)}: no rule says what becomes of it, but it belongs to a tensor that "
            "the rules make something else of. Add a rule for it"
        )
    return converted


def _targets(name: str, tensor: Tensor, rank: int, world_size: int) -> list[Target]:
    """Return this rank's run of a tensor's rows; what has no rows to cut at whole bytes is rank 0's alone."""
    shape = tensor.shape
    if not shape or BITS[tensor.dtype] % BITS_PER_BYTE:
        alone = MeshLayout((1,), (0,), ())
        return [] if rank else [Target((name,), tensor.dtype, shape, shape, (alone,))]
    layout = MeshLayout((world_size,), tuple(range(world_size)), (Split(0, 0),))
    return [Target((name,), tensor.dtype, shape, region_at(shape, layout, rank).shape, (layout,))]
