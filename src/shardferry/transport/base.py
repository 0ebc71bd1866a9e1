"""What a group of ranks is, to everything that works in one.

A group is the control plane of one call: small byte strings that all ranks must have, errors, and the fact that a rank
is gone. Bulk tensor bytes do not travel through it. It knows nothing of what the bytes mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from types import TracebackType


class Rendezvous(Protocol):
    """A place where ranks that cannot reach each other yet leave small values for each other.

    One rendezvous serves one group: keys of another call never show in it.
    """

    def set(self, key: str, value: bytes) -> None:
        """Leave `value` under `key`."""
        ...

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value under `key`, waiting for it; signals are handled while waiting.

        Raises:
            TimeoutError: If nobody left a value within `timeout_s`.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove the value under `key`."""
        ...


class Group(Protocol):
    """The ranks that take part in one call, from this rank's point of view.

    Every method but `check` and `close` is collective in the sense that the ranks must go through the same steps in the
    same order. Once any rank has failed, every method that reports raises the same `RankFailedError` on all of them.
    """

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def timeout_s(self) -> float:
        """Seconds that a rank may show no sign of life, and within which a server that does not answer is an error."""
        ...

    @property
    def hosts(self) -> tuple[str, ...]:
        """Per rank, the machine it runs on: equal strings mean one kernel, so one page cache."""
        ...

    def enter(self, step: str) -> None:
        """Tell the others that this rank starts `step`, without waiting for them.

        Raises:
            RankFailedError: If a rank has failed.
        """
        ...

    def exchange(self, step: str, payload: bytes) -> tuple[bytes, ...]:
        """Return the payloads of all ranks, in rank order. Collective.

        Raises:
            RankFailedError: If a rank failed, ended, was lost, or is in another step.
        """
        ...

    def fail(self, step: str, cause: str) -> None:
        """Tell the others that this rank failed in `step`; return when they have been told, never raise for it."""
        ...

    def check(self) -> None:
        """Raise if another rank is known to have failed. Never waits: call it between chunks of long work.

        Raises:
            RankFailedError: If a rank has failed.
        """
        ...

    def wait_until_left(self, limit_s: float) -> bool:
        """Return whether all other ranks have left the group, waiting at most `limit_s` for it.

        For rank 0 after a failure, before it clears away what others may still be writing to.
        """
        ...

    def close(self) -> None:
        """Leave the group. Waits for no step of the others."""
        ...

    def __enter__(self) -> Self:
        """Return the group; it is closed at the end of the block, and an error that leaves the block is a failure."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        """Tell the others of `error`, if there is one, and leave the group."""
        ...
