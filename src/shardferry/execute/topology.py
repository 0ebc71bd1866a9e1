"""Which ranks share a node, and so a page cache and a network link.

The kernel of each rank tells, and not the variables of a launcher, which say how processes were started.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardferry.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

# More threads than this per rank gained nothing (measured on local disks).
MAX_READ_THREADS = 4
# Requests of a node to an object store under way at once, and of a rank at least; guesses between the 16 at which one
# process had the most from a local server (measured) and the 64 that remote stores want.
REMOTE_REQUESTS, MIN_REMOTE_THREADS = 32, 4


def nodes_of(hosts: Sequence[str], node_of_rank: Sequence[int] | None) -> tuple[int, ...]:
    """Return the node of every rank, counted from 0 in rank order.

    Args:
        hosts: Identity of the machine each rank runs on.
        node_of_rank: What the caller says instead, one number per rank.

    Raises:
        InvalidInputError: If `node_of_rank` does not have one entry per rank.
    """
    if node_of_rank is not None and len(node_of_rank) != len(hosts):
        message = f"node_of_rank has {len(node_of_rank)} entries for {len(hosts)} ranks"
        raise InvalidInputError(message)
    return _numbered(hosts if node_of_rank is None else node_of_rank)


def nodes_by_folder(nodes: Sequence[int], folders: Sequence[str]) -> tuple[int, ...]:
    """Return the nodes again, those split on which ranks read different folders, counted from 0 in rank order.

    Containers of one machine may each have a mount or a copy of their own, of whose pages they share none.

    Args:
        nodes: The node of every rank.
        folders: What each rank reads, the same on ranks of one node exactly if they read the same folder.

    Examples:
        >>> nodes_by_folder([0, 0, 0, 1], ["mount a", "mount b", "mount b", "mount a"])
        (0, 1, 1, 2)
    """
    return _numbered(list(zip(nodes, folders, strict=True)))


def read_threads(nodes: Sequence[int], rank: int, *, is_local: bool) -> int:
    """Return how many threads a rank should read with, given who shares its node.

    A local disk gives no more than the processors take; a store across a network keeps many requests waiting.
    """
    ranks = list(nodes).count(nodes[rank])
    if not is_local:
        return max(MIN_REMOTE_THREADS, REMOTE_REQUESTS // ranks)
    usable = len(os.sched_getaffinity(0))
    return max(1, min(MAX_READ_THREADS, usable // ranks))


def _numbered(identities: Sequence[Hashable]) -> tuple[int, ...]:
    numbers = {identity: number for number, identity in enumerate(dict.fromkeys(identities))}
    return tuple(numbers[identity] for identity in identities)
