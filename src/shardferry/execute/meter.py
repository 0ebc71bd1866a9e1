"""Counts the memory a load uses beside the tensors it fills, against its budget."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from shardferry.units import MIB

if TYPE_CHECKING:
    from shardferry.storage.base import Bytes

# Below this, staging buffers would be so small that calls cost more than bytes.
MIN_BUDGET_BYTES = 8 * MIB


class Meter:
    """Bytes of buffers held now and at most; threads may share it."""

    def __init__(self, budget_bytes: int) -> None:
        """Start with nothing held of a budget of at least `MIN_BUDGET_BYTES`."""
        self.budget_bytes = budget_bytes
        self.peak_bytes = 0
        self._held = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count a buffer that was just made, or with a negative number one that is gone."""
        with self._lock:
            self._held += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._held)


class Buffers:
    """Named buffers that are used again and again, counted by a meter; for one thread."""

    def __init__(self, meter: Meter) -> None:
        """Start with none."""
        self._meter = meter
        self._memory: dict[str, Bytes] = {}

    def get(self, name: str, num_bytes: int) -> Bytes:
        """Return `num_bytes` of the buffer of this name, made larger if need be; its last content is gone."""
        memory = self._memory.get(name)
        if memory is None or len(memory) < num_bytes:
            self._meter.add(num_bytes - (0 if memory is None else len(memory)))
            memory = self._memory[name] = np.empty(num_bytes, np.uint8)
        return memory[:num_bytes]

    def release(self) -> None:
        """Give all buffers up."""
        self._meter.add(-sum(map(len, self._memory.values())))
        self._memory.clear()
