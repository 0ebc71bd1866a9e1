"""Read regions of a checkpoint's tensors into plain bytes of memory, in row-major order and as they are stored.

For what looks at tensors without a framework. It is a load like any other, so it does not matter where the tensors lie,
or in how many boxes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardferry.execute.fill import execute_plan
from shardferry.execute.load import Settings
from shardferry.execute.memory import HostMemory, Scratch
from shardferry.format.dtypes import BITS
from shardferry.plan.load import Wanted, plan_load
from shardferry.storage.location import locate
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardferry.convert.tensor import Tensor
    from shardferry.format.index import CheckpointIndex
    from shardferry.geometry.region import Region
    from shardferry.storage.base import Bytes

# What is read at a time of a box that does not lie in one run of the memory; also what that takes of extra memory.
PIECE_BYTES = 4 * MIB
# Requests to an object store at the same time, a guess: two pieces of a round in flight for each.
REMOTE_THREADS = 8


class Part(NamedTuple):
    """A region of a tensor, and the memory that takes it.

    Attributes:
        tensor: The tensor, as stored or made from stored ones.
        region: What to read of it.
        out: One-dimensional memory of exactly as many bytes.
    """

    tensor: Tensor
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
    wanted = (Wanted(key, part.tensor.source, part.region) for key, part in parts.items())
    destinations = {
        key: HostMemory(part.out, part.region.shape, BITS[part.tensor.dtype]) for key, part in parts.items()
    }
    where = locate(index.root)
    settings = Settings(
        num_threads=1 if where.is_local else REMOTE_THREADS,
        piece_bytes=PIECE_BYTES,
        staging=lambda: [Scratch()],
        on_bytes=lambda *_: None,
        check=lambda: None,
    )
    execute_plan(plan_load(index, wanted), destinations, where.open_store(index.files), index.files, settings)
