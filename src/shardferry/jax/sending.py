"""Arrays on accelerators: a part is gathered in host memory, and sent when its last element is there.

So host memory is needed for the parts that are being filled and those on their way, not for all arrays. What is on its
way is bounded: whoever fills the next part waits for the oldest to arrive. The host memory of a part is as large as the
part: an array larger than the budget on one device takes more than the budget.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import TYPE_CHECKING

import jax
from jax.sharding import SingleDeviceSharding

from shardferry.jax.dtypes import numpy_dtype
from shardferry.jax.memory import PartDestination, make_boxes
from shardferry.jax.parts import box_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardferry.execute.meter import Meter
    from shardferry.jax.leaves import Leaf
    from shardferry.jax.memory import BoxMemory
    from shardferry.jax.parts import Box, Part
    from shardferry.plan.load import Copy
    from shardferry.storage.base import Bytes


class Sender:
    """Sends boxes to the devices that hold them, and keeps what has arrived."""

    def __init__(self, meter: Meter) -> None:
        """Send; host memory of parts is counted by the meter, and half of its budget may be on its way."""
        self._meter = meter
        self._most_bytes = meter.budget_bytes // 2
        self._lock = threading.Lock()
        self._on_the_way: deque[tuple[int, list[jax.Array]]] = deque()
        self._sent: dict[int, dict[jax.Device, jax.Array]] = {}

    def hold(self, part: Part, dtype: str) -> dict[Box, BoxMemory]:
        """Return host memory for a part."""
        boxes = make_boxes(part, dtype, 0)
        self._meter.add(_num_bytes(boxes))
        return boxes

    def send(self, leaf: Leaf, boxes: Mapping[Box, BoxMemory]) -> None:
        """Send the boxes of a part, and wait until no more than the bound is on its way."""
        arrays: dict[jax.Device, jax.Array] = {}
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            memory = None if index is None else boxes.get(box_of(index, leaf.shape))
            if memory is not None:
                place = SingleDeviceSharding(device, memory_kind=leaf.sharding.memory_kind)
                arrays[device] = jax.device_put(memory.array.view(numpy_dtype(leaf.dtype)), place)
        with self._lock:
            self._sent.setdefault(leaf.position, {}).update(arrays)
            self._on_the_way.append((_num_bytes(boxes), list(arrays.values())))
            arriving = []
            while sum(num_bytes for num_bytes, _ in self._on_the_way) > self._most_bytes:
                arriving.append(self._on_the_way.popleft())
        for num_bytes, those in arriving:
            jax.block_until_ready(those)
            self._meter.add(-num_bytes)

    def array(self, leaf: Leaf) -> jax.Array:
        """Return an array all of whose parts have been sent."""
        sent = self._sent.get(leaf.position, {})
        arrays = [sent[device] for device in leaf.sharding.addressable_devices_indices_map(leaf.shape)]
        return jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding, arrays, dtype=numpy_dtype(leaf.dtype)
        )


class SentDestination:
    """A part that is sent when it is full."""

    def __init__(self, leaf: Leaf, part: Part, sender: Sender) -> None:
        """Fill a part; one without elements is sent at once."""
        self._leaf = leaf
        self._part = part
        self._sender = sender
        self._num_missing = part.region.num_elements
        self._lock = threading.Lock()
        self._filling: tuple[dict[Box, BoxMemory], PartDestination] | None = None
        self.was_cast = False
        self.num_overflowed = 0
        if not self._num_missing:
            sender.send(leaf, sender.hold(part, leaf.dtype))

    def direct(self, copy: Copy) -> Bytes | None:  # noqa: ARG002 - as any destination
        """Return None: what is read directly is not told when it is there."""
        return None

    def store(self, copy: Copy, staged: Bytes) -> None:
        """Take what `copy` read, and send the part if that was the last of it."""
        with self._lock:
            if self._filling is None:
                boxes = self._sender.hold(self._part, self._leaf.dtype)
                self._filling = boxes, PartDestination(tuple(boxes.values()), self._leaf.dtype, self._leaf.name)
        boxes, filling = self._filling
        filling.store(copy, staged)
        with self._lock:
            self._num_missing -= math.prod(stop - start for start, stop in copy.target)
            is_full = not self._num_missing
        if is_full:
            self.was_cast, self.num_overflowed = filling.was_cast, filling.num_overflowed
            self._filling = None
            self._sender.send(self._leaf, boxes)


def is_on_host(leaf: Leaf) -> bool:
    """Return whether an array's devices use host memory as it is."""
    # jaxlib's class is not typed.
    return all(device.platform == "cpu" for device in leaf.sharding.device_set)  # type: ignore[attr-defined]


def _num_bytes(boxes: Mapping[Box, BoxMemory]) -> int:
    return sum(memory.array.nbytes for memory in boxes.values())
