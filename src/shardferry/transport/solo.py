"""The group of one rank: no sockets, no threads, and no one to fail with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

from shardferry.transport.host import host_identities, this_host

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray


class SoloMover:
    """Moves bytes where there is one rank: from itself to itself."""

    def all_to_all(
        self,
        send: NDArray[np.uint8],
        send_sizes: Sequence[int],  # noqa: ARG002 - all of it
        receive: NDArray[np.uint8],
        receive_sizes: Sequence[int],  # noqa: ARG002
    ) -> None:
        """Copy what is sent."""
        receive[:] = send

    def all_gather(
        self,
        ranks: Sequence[int],
        send: NDArray[np.uint8],
        receive: NDArray[np.uint8],
        receive_sizes: Sequence[int],
    ) -> None:
        """Do nothing: there are no others."""


class SoloGroup:
    """A group whose only rank is this process; errors simply stay this rank's own."""

    rank = 0
    world_size = 1

    def __init__(self, timeout_s: float = math.inf) -> None:
        self.timeout_s = timeout_s
        self.hosts = host_identities([this_host()])

    def enter(self, step: str) -> None:
        """Do nothing: there is no one to tell."""

    def exchange(self, step: str, payload: bytes) -> tuple[bytes, ...]:  # noqa: ARG002 - the step is for other ranks
        """Return this rank's payload."""
        return (payload,)

    def fail(self, step: str, cause: str) -> None:
        """Do nothing: there is no one to tell."""

    def check(self) -> None:
        """Do nothing: no other rank can fail."""

    def wait_until_left(self, limit_s: float) -> bool:  # noqa: ARG002 - there is nothing to wait for
        """Return True: there are no others."""
        return True

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def __enter__(self) -> Self:
        """Return the group."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Do nothing: nothing is held."""
