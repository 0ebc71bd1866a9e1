"""Compute, for a save, the tensors that no rank holds: each on one rank, from whole operands that travel there.

The operands go through the exchange that every save has, as if each were a file with one writer; only that the files
are memory. What is computed then is one more tensor of the rank that has computed it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardferry.execute.exchange import Exchange, execute_exchange
from shardferry.execute.memory import as_words
from shardferry.format.dtypes import tensor_bytes
from shardferry.format.writer import FileLayout
from shardferry.geometry.region import whole
from shardferry.plan.streams import plan_streams
from shardferry.transport.together import together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from shardferry.execute.save import Source, WriteSettings
    from shardferry.plan.catalogue import Held
    from shardferry.plan.unconvert import Made
    from shardferry.storage.base import Bytes
    from shardferry.transport.base import Group
    from shardferry.transport.bulk import Mover


class Tools(NamedTuple):
    """What it takes beside the plan.

    Attributes:
        sources: Returns the memory of this rank's part of the model, by name.
        made_source: Makes a tensor, given as its bytes, dtype and shape, something that can be written from.
        mover: Makes what moves bytes between the ranks. Collective.
        settings: Buffers, and what is called with the bytes that have arrived.
        round_bytes: Most bytes that a rank takes in a round of an exchange.
    """

    sources: Callable[[], Mapping[str, Source]]
    made_source: Callable[[Bytes, str, tuple[int, ...]], Source]
    mover: Callable[[], AbstractContextManager[Mover]]
    settings: WriteSettings
    round_bytes: int


def compute_tensors(group: Group, made: Mapping[str, Made], tools: Tools) -> dict[str, Source]:
    """Return what this rank has computed, by name. Collective.

    Args:
        group: The ranks of the save.
        made: What is to be computed, in an order in which that can be done; the same on every rank.
        tools: What it takes beside that.

    Raises:
        ShardferryError: On every rank, if a function fails on one.
    """
    computed: dict[str, Source] = {}
    for batch in _batches(made):
        mine = {name: one for name, one in batch.items() if one.owner == group.rank}
        operands = {
            _operand(name, at): np.empty(tensor_bytes(held.dtype, held.shape), np.uint8)
            for name, one in mine.items()
            for at, held in enumerate(one.operands)
        }
        together(group, "exchange operands", partial(_exchange, group, batch, computed, operands, tools))
        together(group, "compute tensors", partial(_compute, mine, computed, operands, tools))
    return computed


def _batches(made: Mapping[str, Made]) -> Iterator[dict[str, Made]]:
    """Yield what can be computed at the same time, because none of it is made of another."""
    batch: dict[str, Made] = {}
    for name, one in made.items():
        if any(_memories(operand) & batch.keys() for operand in one.operands):
            yield batch
            batch = {}
        batch[name] = one
    if batch:
        yield batch


def _memories(held: Held) -> set[str]:
    """Return the names of what a tensor is made of."""
    return {held.memory, *(part.memory for part in held.parts)}


def _operand(name: str, at: int) -> str:
    return f"operand {at} of {name}"


def _exchange(
    group: Group, batch: Mapping[str, Made], computed: Mapping[str, Source], out: Mapping[str, Bytes], tools: Tools
) -> bytes:
    """Fill the whole operands of what this rank is to compute; every rank sends what it has of them."""
    each = [
        (_operand(name, at), held, one.owner) for name, one in batch.items() for at, held in enumerate(one.operands)
    ]
    catalogue = {name: held for name, held, _ in each}
    dtypes = {name: held.dtype for name, held, _ in each}
    sizes = {name: tensor_bytes(held.dtype, held.shape) for name, held, _ in each}
    files = [FileLayout(name, b"", {name: (0, size)}, size) for name, size in sizes.items()]
    owners = {name: owner for name, _, owner in each}
    rounds = plan_streams(catalogue, files, dtypes, owners=owners, round_bytes=tools.round_bytes)
    exchange = Exchange(rounds, catalogue, dtypes, group.rank, group.world_size)
    with tools.mover() as mover:
        execute_exchange(exchange, {**tools.sources(), **computed}, _Memory(out), tools.settings, mover)
    return b""


def _compute(mine: Mapping[str, Made], computed: dict[str, Source], operands: dict[str, Bytes], tools: Tools) -> bytes:
    """Add what this rank is to compute; operands are given up when they have been used."""
    for name, one in mine.items():
        source, shapes = one.source, [held.shape for held in one.operands]
        arrays = [
            as_words(operands.pop(_operand(name, at)), held.shape, held.dtype) for at, held in enumerate(one.operands)
        ]
        values = source.function.compute(arrays, shapes, whole(source.shape))
        array = values.rows(0, values.shape[0])
        computed[name] = tools.made_source(array.reshape(-1).view(np.uint8), source.dtype, source.shape)
    return b""


class _Memory:
    """Tensors in memory as the files of a save."""

    def __init__(self, tensors: Mapping[str, Bytes]) -> None:
        self._tensors = tensors

    def get(self, name: str) -> _File:
        return _File(self._tensors[name])

    def sync(self) -> None:
        """Do nothing: memory is where it is."""


class _File:
    """A tensor in memory as a file of a save."""

    def __init__(self, out: Bytes) -> None:
        self._out = out

    def write(self, data: Bytes, start: int, on_write: Callable[[int, int], None]) -> None:
        self._out[start : start + len(data)] = data
        on_write(len(data), 1)
