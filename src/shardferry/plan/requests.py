"""Turn the copies of a plan into requests: neighbours in a file are read by one, with holes cheaper than a seek.

This is the data sieving of collective I/O. Pure, like everything that plans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardferry.plan.load import split_copy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardferry.plan.load import Copy, LoadPlan


class Piece(NamedTuple):
    """A copy, or a part of one, and the tensor it is for."""

    name: str
    copy: Copy


class Request(NamedTuple):
    """What is read from a file at a time.

    Attributes:
        file: File, relative to the checkpoint's root.
        pieces: Ascending in the file. Several only if each is one span and none overlaps the next.
    """

    file: str
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes wanted."""
        return sum(piece.copy.num_bytes for piece in self.pieces)


def plan_requests(plan: LoadPlan, *, max_bytes: int) -> Iterator[Request]:
    """Yield the requests that read everything a plan names, by file and offset.

    Args:
        plan: What to read, and below how many bytes a hole is read along.
        max_bytes: Copies are cut to this size, and no more is put into one request. Holes included a request spans
            no more either, or no more than another request costs.
    """
    pieces = [
        (piece.file, piece.first_byte, at, Piece(tensor.name, piece))
        for at, tensor in enumerate(plan.tensors)
        for copy in tensor.copies
        for piece in split_copy(copy, max_bytes)
    ]
    pieces.sort(key=lambda entry: entry[:3])
    most = max(max_bytes, plan.seek_bytes)
    here: list[Piece] = []
    begin = end = wanted = 0
    for file, start, _, piece in pieces:
        stop = start + piece.copy.num_bytes
        near = bool(here) and here[0].copy.file == file and 0 <= start - end < plan.seek_bytes
        fits = wanted + piece.copy.num_bytes <= max_bytes and stop - begin <= most
        if near and fits and here[-1].copy.is_one_span and piece.copy.is_one_span:
            here.append(piece)
            wanted += piece.copy.num_bytes
        else:
            if here:
                yield Request(here[0].copy.file, tuple(here))
            here, begin, wanted = [piece], start, piece.copy.num_bytes
        end = stop
    if here:
        yield Request(here[0].copy.file, tuple(here))
