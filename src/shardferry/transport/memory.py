"""A rendezvous for ranks that are threads of one process."""

from __future__ import annotations

import threading


class MemoryRendezvous:
    """Values in a dictionary; one object is shared by all ranks."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """Leave `value` under `key`."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value under `key`, waiting up to `timeout_s` for it.

        Raises:
            TimeoutError: If nobody left a value in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout=timeout_s):
                raise TimeoutError(f"no value for {key!r} after {timeout_s:g} s")
            return self._values[key]

    def delete(self, key: str) -> None:
        """Remove the value under `key`."""
        with self._changed:
            self._values.pop(key, None)
