"""Carry out an exchange: rounds in which thin pieces travel to the rank that writes them as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardferry.execute.load import outer_offsets
from shardferry.format.dtypes import BITS
from shardferry.geometry.spans import Collapsed, collapse
from shardferry.plan.exchange import Box, Part, part_write, turn_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardferry.execute.save import Source, WriteSettings
    from shardferry.plan.catalogue import Held
    from shardferry.storage.base import Bytes
    from shardferry.storage.writing import WritableFiles
    from shardferry.transport.bulk import Mover


class Exchange(NamedTuple):
    """What an exchange is about.

    Attributes:
        rounds: Boxes of every round.
        catalogue: Every tensor of the job.
        dtypes: The dtype each is written in.
        rank: This rank.
        world_size: Ranks that take part.
    """

    rounds: Sequence[tuple[Box, ...]]
    catalogue: Mapping[str, Held]
    dtypes: Mapping[str, str]
    rank: int
    world_size: int

    @property
    def bytes_owned(self) -> int:
        """Bytes this rank writes."""
        mine = (box for boxes in self.rounds for box in boxes if box.owner == self.rank)
        return sum(_collapsed(self, box.name, box).num_bytes for box in mine)


def execute_exchange(
    exchange: Exchange, sources: Mapping[str, Source], files: WritableFiles, settings: WriteSettings, mover: Mover
) -> None:
    """Move every part to the owner of its box, and write the boxes this rank owns. Collective.

    Raises:
        StorageError: If a write fails; names the file and the offset.
    """
    for boxes in exchange.rounds:
        made = _move(exchange, boxes, sources, settings, mover)
        for box in boxes:  # in this order: some places take a file only from its beginning to its end
            if box.owner == exchange.rank:
                start = box.start + _first_byte(_collapsed(exchange, box.name, box))
                files.get(box.file).write(made[box], start, settings.on_bytes)


def _move(
    exchange: Exchange,
    boxes: Sequence[Box],
    sources: Mapping[str, Source],
    settings: WriteSettings,
    mover: Mover,
) -> dict[Box, Bytes]:
    """Run one round; return the bytes of the boxes this rank owns."""
    outgoing, incoming = turn_of(boxes, exchange.catalogue, exchange.dtypes, exchange.rank)
    incoming = tuple(sorted(incoming, key=lambda pair: pair[1].sender))
    send_sizes, receive_sizes = [0] * exchange.world_size, [0] * exchange.world_size
    for box, part in outgoing:
        send_sizes[box.owner] += _num_bytes(exchange, box, part)
    for box, part in incoming:
        receive_sizes[part.sender] += _num_bytes(exchange, box, part)
    send = settings.buffers.get("send", sum(send_sizes))
    receive = settings.buffers.get("receive", sum(receive_sizes))
    _gather(exchange, outgoing, sources, send)
    mover.all_to_all(send, send_sizes, receive, receive_sizes)
    owned = [box for box in boxes if box.owner == exchange.rank]
    return _assemble(exchange, owned, incoming, receive, settings)


def _gather(
    exchange: Exchange, outgoing: Sequence[tuple[Box, Part]], sources: Mapping[str, Source], send: Bytes
) -> None:
    done = 0
    for box, part in outgoing:
        write = part_write(box, part, exchange.catalogue[box.name], exchange.dtypes[box.name])
        out = send[done : done + write.num_bytes]
        data = sources[write.memory].direct(write)
        if data is None:
            sources[write.memory].fetch(write, out)
        else:
            np.copyto(out, data)
        done += write.num_bytes


def _assemble(
    exchange: Exchange,
    owned: Sequence[Box],
    incoming: Sequence[tuple[Box, Part]],
    receive: Bytes,
    settings: WriteSettings,
) -> dict[Box, Bytes]:
    sizes = {box: _collapsed(exchange, box.name, box).num_bytes for box in owned}
    memory = settings.buffers.get("box", sum(sizes.values()))
    made: dict[Box, Bytes] = {}
    for box, size in sizes.items():
        made[box], memory = memory[:size], memory[size:]
    if sum(sizes.values()) > len(receive):
        settings.buffers.get("box", sum(sizes.values()))[...] = 0  # padding, which nobody sends
    done = 0
    for box, part in incoming:
        collapsed = _collapsed(exchange, box.name, part)
        count = collapsed.num_bytes
        base = _first_byte(_collapsed(exchange, box.name, box))
        _scatter(receive[done : done + count], collapsed, made[box], base)
        done += count
    return made


def _scatter(data: Bytes, collapsed: Collapsed, out: Bytes, base: int) -> None:
    """Put a part's bytes where they lie in its box, whose first byte is `base` in the tensor."""
    keep = min(2, len(collapsed.sizes))
    row_bytes, columns = collapsed.sizes[-1], collapsed.dims[-1]
    runs = collapsed.dims[-2] if keep > 1 else ((0, 1),)
    table = data.reshape(-1, sum(stop - start for start, stop in columns))
    row = 0
    for offset in outer_offsets(collapsed, keep=keep):
        for first, last in runs:
            at = 0
            for start, stop in columns:
                begin = offset + first * row_bytes + start - base
                place = np.lib.stride_tricks.as_strided(out[begin:], (last - first, stop - start), (row_bytes, 1))
                place[...] = table[row : row + last - first, at : at + stop - start]
                at += stop - start
            row += last - first


def _collapsed(exchange: Exchange, name: str, part: Box | Part) -> Collapsed:
    return collapse(part.region, exchange.catalogue[name].shape, BITS[exchange.dtypes[name]])


def _num_bytes(exchange: Exchange, box: Box, part: Part) -> int:
    return _collapsed(exchange, box.name, part).num_bytes


def _first_byte(collapsed: Collapsed) -> int:
    offset = 0
    for size, intervals in zip(collapsed.sizes, collapsed.dims, strict=True):
        offset = offset * size + intervals[0][0]
    return offset
