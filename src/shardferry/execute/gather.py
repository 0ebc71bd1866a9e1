"""Read regions of a checkpoint's tensors into plain bytes of memory, in row-major order and as they are stored.

For what looks at tensors without a framework. It is a load like any other, so it does not matter where the tensors lie,
or in how many boxes.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardferry.convert.ops import Stored
from shardferry.execute.load import Settings, execute_load
from shardferry.format.dtypes import BITS
from shardferry.geometry.region import box
from shardferry.geometry.spans import BITS_PER_BYTE, Collapsed, collapse
from shardferry.plan.load import Wanted, plan_load
from shardferry.storage.location import locate
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardferry.format.index import CheckpointIndex
    from shardferry.geometry.region import Region
    from shardferry.plan.load import Copy
    from shardferry.storage.base import Bytes

# What is read at a time of a box that does not lie in one run of the memory; also what that takes of extra memory.
PIECE_BYTES = 4 * MIB
# Requests to an object store at the same time, a guess: two pieces of a round in flight for each.
REMOTE_THREADS = 8


class Part(NamedTuple):
    """A region of a tensor, and the memory that takes it.

    Attributes:
        name: The tensor.
        region: What to read of it.
        out: One-dimensional memory of exactly as many bytes.
    """

    name: str
    region: Region
    out: Bytes


def gather(index: CheckpointIndex, parts: Mapping[str, Part]) -> None:
    """Fill the memory of every part.

    Args:
        index: The checkpoint.
        parts: By what errors call them.

    Raises:
        StorageError: If a read fails or ends early.
        CheckpointChangedError: If a file has another size than when its header was read.
        ShardingError: If a region cuts a byte in two.
    """
    infos = {key: index.tensors[part.name] for key, part in parts.items()}
    wanted = (Wanted(key, Stored(part.name, infos[key].shape), part.region) for key, part in parts.items())
    destinations = {key: _Memory(part.out, part.region.shape, BITS[infos[key].dtype]) for key, part in parts.items()}
    where = locate(index.root)
    settings = Settings(
        num_threads=1 if where.is_local else REMOTE_THREADS,
        piece_bytes=PIECE_BYTES,
        staging=lambda: [_Scratch()],
        on_bytes=lambda *_: None,
        check=lambda: None,
    )
    execute_load(plan_load(index, wanted), destinations, where.open_store(index.files), index.files, settings)


class _Memory:
    """The bytes of a row-major array as the destination of a load."""

    def __init__(self, out: Bytes, shape: tuple[int, ...], bits: int) -> None:
        self._out = out
        self._shape = shape
        self._bits = bits

    def direct(self, copy: Copy) -> Bytes | None:
        """Return where the copy goes, None if that is not one run of bytes."""
        if not copy.in_order:
            return None
        place = self._place(copy)
        return self._out[slice(*place.dims[0][0])] if len(place.sizes) == 1 else None

    def store(self, copy: Copy, staged: Bytes) -> None:
        """Copy what was read to where it belongs."""
        if copy.in_order:
            place = self._place(copy)
            target = self._out.reshape(place.sizes)[tuple(slice(*dim[0]) for dim in place.dims)]
            target[...] = staged.reshape(target.shape)
            return
        item = BITS[copy.dtype] // BITS_PER_BYTE
        source = staged.reshape(*copy.region.shape, item).transpose(*copy.axes, len(copy.axes))
        place_of(self._out.reshape(*self._shape, item), copy)[...] = source

    def _place(self, copy: Copy) -> Collapsed:
        offsets, sizes = [a for a, _ in copy.target], [b - a for a, b in copy.target]
        return collapse(box(offsets, sizes), self._shape, self._bits)


def place_of(local: NDArray[np.uint8], copy: Copy) -> NDArray[np.uint8]:
    """Return the view of a local tensor that a copy fills, its dims in the order that `axes` gives.

    Args:
        local: The tensor with one more dim, the bytes of an element.
        copy: What fills it.
    """
    if not copy.fine:
        return local[tuple(slice(start, stop) for start, stop in copy.target)]
    sizes = [stop - start for start, stop in copy.target]
    strides = [step * local.strides[dim] if step else 0 for dim, step in copy.fine]
    offset = sum(start * stride for (start, _), stride in zip(copy.target, strides, strict=True))
    return np.ndarray((*sizes, local.shape[-1]), np.uint8, local, offset, (*strides, 1))


class _Scratch:
    """One reused buffer, emptied at once."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def memory(self, num_bytes: int) -> Bytes:
        """Return `num_bytes` to read into."""
        if len(self._buffer) < num_bytes:
            self._buffer = np.empty(num_bytes, np.uint8)
        return self._buffer[:num_bytes]

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Do nothing: bytes are copied out by the time they are stored."""
        yield

    def wait(self) -> None:
        """Do nothing, as above."""
