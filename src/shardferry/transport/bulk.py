"""Bulk bytes between ranks: what carries tensors, where the group carries only what ranks must agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


class Mover(Protocol):
    """Moves bytes between ranks of a group.

    Ranks that send each other nothing need not take part. Two ranks that take part in several transfers do so in the
    same order, and always agree beforehand on how many bytes go each way.
    """

    def all_to_all(
        self,
        send: NDArray[np.uint8],
        send_sizes: Sequence[int],
        receive: NDArray[np.uint8],
        receive_sizes: Sequence[int],
    ) -> None:
        """Send a part of `send` to every rank, and fill `receive` with what every rank sends here.

        Args:
            send: What goes to rank 0, then to rank 1, and so on; contiguous.
            send_sizes: Bytes for every rank of the group.
            receive: Filled with what comes from rank 0, then from rank 1, and so on; contiguous.
            receive_sizes: Bytes from every rank, the same number that rank has in its `send_sizes` for this one.
        """
        ...

    def all_gather(
        self,
        ranks: Sequence[int],
        send: NDArray[np.uint8],
        receive: NDArray[np.uint8],
        receive_sizes: Sequence[int],
    ) -> None:
        """Send all of `send` to some ranks, and fill `receive` with what each of them sends so.

        Args:
            ranks: Who takes part, this rank among them.
            send: What goes to each of the others; contiguous.
            receive: Filled with what comes from the others, in the order of `ranks`; contiguous.
            receive_sizes: Bytes from each of `ranks`; of this one, 0.
        """
        ...
