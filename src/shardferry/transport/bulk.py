"""Bulk bytes between ranks: what carries tensors, where the group carries only what ranks must agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


class Mover(Protocol):
    """Moves bytes between all ranks of a group."""

    def all_to_all(
        self,
        send: NDArray[np.uint8],
        send_sizes: Sequence[int],
        receive: NDArray[np.uint8],
        receive_sizes: Sequence[int],
    ) -> None:
        """Send a part of `send` to every rank, and fill `receive` with what every rank sends here. Collective.

        Args:
            send: What goes to rank 0, then to rank 1, and so on; contiguous.
            send_sizes: Bytes for every rank.
            receive: Filled with what comes from rank 0, then from rank 1, and so on; contiguous.
            receive_sizes: Bytes from every rank, the same number that rank has in its `send_sizes` for this one.
        """
        ...
