"""Compare two checkpoints: names, dtypes and shapes from their headers, then the bytes of what is alike.

How tensors are spread over files, or cut into boxes, makes no difference. Both sides are read in rounds of the same
pieces of the same tensors, each piece one run of a tensor's row-major bytes, so memory is bounded and the first
difference of a tensor is the first one found; the rest of that tensor is not read.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, product, repeat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardferry.convert.tensor import stored_tensor
from shardferry.execute.gather import Part, gather
from shardferry.execute.report import Progress
from shardferry.format.dtypes import BITS
from shardferry.format.index import TensorInfo
from shardferry.geometry.region import Region, box, whole
from shardferry.geometry.spans import BITS_PER_BYTE
from shardferry.plan.match import natural_key
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from shardferry.format.index import CheckpointIndex
    from shardferry.storage.base import Bytes

# Of each side, in memory at a time: large enough that reading is as fast as it gets, a guess that was not tuned.
ROUND_BYTES = 8 * MIB
# A guess: planning a round takes about as long as reading this many small tensors.
ROUND_PIECES = 4096


class Element(NamedTuple):
    """Where an element lies in its tensor.

    Attributes:
        offset: Elements before it, row-major.
        position: Where it is in each dim.
    """

    offset: int
    position: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckpointDiff:
    """How checkpoints A and B differ; everything in natural order of the names.

    Attributes:
        only_in_a: Names that B lacks.
        only_in_b: Names that A lacks.
        dtypes: The dtypes in A and B of tensors that have two.
        shapes: The shapes in A and B of tensors that have two.
        contents: The first differing element of tensors of the same dtype and shape whose bytes differ.
        alike: Names of tensors of the same dtype and shape, whose bytes can be compared.
    """

    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    dtypes: dict[str, tuple[str, str]]
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    contents: dict[str, Element]
    alike: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether no difference was found."""
        return not (self.only_in_a or self.only_in_b or self.dtypes or self.shapes or self.contents)


class _Piece(NamedTuple):
    """One run of a tensor's bytes, compared at a time."""

    name: str
    region: Region
    start: int
    num_bytes: int

    @property
    def key(self) -> str:
        """What an error calls it."""
        return f"{self.name} from byte {self.start}"


def diff_headers(a: CheckpointIndex, b: CheckpointIndex) -> CheckpointDiff:
    """Return how the names, dtypes and shapes of two checkpoints differ; nothing is read."""
    names = sorted(sorted(a.tensors.keys() | b.tensors.keys()), key=natural_key)
    both = [(name, a.tensors[name], b.tensors[name]) for name in names if name in a.tensors and name in b.tensors]
    return CheckpointDiff(
        only_in_a=tuple(name for name in names if name not in b.tensors),
        only_in_b=tuple(name for name in names if name not in a.tensors),
        dtypes={name: (one.dtype, two.dtype) for name, one, two in both if one.dtype != two.dtype},
        shapes={name: (one.shape, two.shape) for name, one, two in both if one.shape != two.shape},
        contents={},
        alike=tuple(name for name, one, two in both if (one.dtype, one.shape) == (two.dtype, two.shape)),
    )


def diff_checkpoints(
    a: CheckpointIndex, b: CheckpointIndex, *, on_progress: Callable[[Progress], None] | None
) -> CheckpointDiff:
    """Return how two checkpoints differ, the bytes of their tensors included.

    Args:
        a: One checkpoint; it is read in file order.
        b: The other.
        on_progress: Called with the bytes compared so far.

    Raises:
        StorageError: If a read fails or ends early.
        CheckpointChangedError: If a file has another size than when its header was read.
    """
    headers = diff_headers(a, b)
    alike = set(headers.alike)
    names = [name for name in a.tensors if name in alike]
    sides = _flattened(a, b, names), _flattened(b, a, names)
    buffers = np.empty(ROUND_BYTES, np.uint8), np.empty(ROUND_BYTES, np.uint8)
    ends = dict(zip(names, accumulate(a.tensors[name].num_bytes for name in names), strict=True))
    found: dict[str, int] = {}
    with ThreadPoolExecutor(len(sides)) as pool:
        for pieces in _rounds(sides[0], names, found):
            # A list, so that what a thread raised is raised here.
            list(pool.map(_read, sides, buffers, repeat(pieces)))
            _compare(pieces, *buffers, found)
            if on_progress is not None:
                last = pieces[-1]
                left = a.tensors[last.name].num_bytes - last.start - last.num_bytes
                on_progress(Progress(0, ends[last.name] - left, max(ends.values())))
    contents = {name: _element(a.tensors[name], found[name]) for name in headers.alike if name in found}
    return replace(headers, contents=contents)


def _flattened(index: CheckpointIndex, other: CheckpointIndex, names: Iterable[str]) -> CheckpointIndex:
    """Return an index that takes a tensor for a row of bytes wherever neither side has it in boxes.

    Then it can be cut anywhere, and a packed dtype needs no care.
    """
    tensors = {}
    for name in names:
        info = index.tensors[name]
        boxed = info.parts or other.tensors[name].parts
        tensors[name] = info if boxed else TensorInfo("U8", (info.num_bytes,), info.file, info.span)
    return replace(index, tensors=tensors)


def _rounds(index: CheckpointIndex, names: Iterable[str], found: Mapping[str, int]) -> Iterator[list[_Piece]]:
    """Yield what to compare at a time, within `ROUND_BYTES`; tensors in `found` by then are left out."""
    pieces: list[_Piece] = []
    held = 0
    for name in names:
        for piece in _pieces(name, index.tensors[name]):
            if pieces and (held + piece.num_bytes > ROUND_BYTES or len(pieces) == ROUND_PIECES):
                yield pieces
                pieces, held = [], 0
            if name in found:
                break
            pieces.append(piece)
            held += piece.num_bytes
    if pieces:
        yield pieces


def _pieces(name: str, info: TensorInfo) -> Iterator[_Piece]:
    """Yield a tensor as boxes of at most `ROUND_BYTES`, each one run of its row-major bytes, in order."""
    if not info.num_bytes:
        return
    shape, bits = info.shape, BITS[info.dtype]
    if info.num_bytes <= ROUND_BYTES:
        yield _Piece(name, whole(shape), 0, info.num_bytes)
        return
    row_bits = [math.prod(shape[dim + 1 :]) * bits for dim in range(len(shape))]
    # The outermost dim of which 8 rows fit: 8 rows of a packed dtype always end on a byte.
    dim = next(dim for dim, row in enumerate(row_bits) if row <= ROUND_BYTES)
    step = ROUND_BYTES // row_bits[dim] * BITS_PER_BYTE
    start = 0
    for outer in product(*map(range, shape[:dim])):
        for first in range(0, shape[dim], step):
            rows = min(step, shape[dim] - first)
            region = box(
                (*outer, first, *(0 for _ in shape[dim + 1 :])), (*(1 for _ in outer), rows, *shape[dim + 1 :])
            )
            num_bytes = rows * row_bits[dim] // BITS_PER_BYTE
            yield _Piece(name, region, start, num_bytes)
            start += num_bytes


def _read(index: CheckpointIndex, buffer: Bytes, pieces: Iterable[_Piece]) -> None:
    """Read the pieces one behind the other."""
    placed = _placed(pieces, buffer)
    gather(
        index,
        {
            piece.key: Part(stored_tensor(piece.name, index.tensors[piece.name]), piece.region, out)
            for piece, out in placed
        },
    )


def _placed(pieces: Iterable[_Piece], buffer: Bytes) -> Iterator[tuple[_Piece, Bytes]]:
    at = 0
    for piece in pieces:
        yield piece, buffer[at : at + piece.num_bytes]
        at += piece.num_bytes


def _compare(pieces: Iterable[_Piece], a: Bytes, b: Bytes, found: dict[str, int]) -> None:
    """Record the first differing bit of every tensor that has none yet."""
    for (piece, one), (_, two) in zip(_placed(pieces, a), _placed(pieces, b), strict=True):
        if piece.name in found or np.array_equal(one, two):
            continue
        at = int(np.argmax(one != two))
        differing = int(one[at]) ^ int(two[at])
        lowest = (differing & -differing).bit_length() - 1  # the first element packed into a byte is in its low bits
        found[piece.name] = (piece.start + at) * BITS_PER_BYTE + lowest


def _element(info: TensorInfo, bit: int) -> Element:
    offset = bit // BITS[info.dtype]
    position = []
    rest = offset
    for size in reversed(info.shape):
        rest, at = divmod(rest, size)
        position.append(at)
    return Element(offset, tuple(reversed(position)))
