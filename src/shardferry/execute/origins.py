"""Where the ranks read a checkpoint, and whether it is the one that rank 0 has opened.

Ranks of one node that read the same folder need no look at it, whatever links or mounts lead there: its device and
inode tell. Of all others the first rank of a node and folder compares the sizes and headers of its files with the
index. That does not tell two steps of a training apart, nor two fine-tunings. So where a rank may have been given
another path than rank 0, samples of the data are compared too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardferry.errors import CheckpointChangedError, CheckpointError, StorageError
from shardferry.execute.open import check_there
from shardferry.format.checkpoint import check_file, sample_files
from shardferry.storage.location import locate, locate_again
from shardferry.storage.url import redact

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from shardferry.format.index import CheckpointIndex


class Origin(NamedTuple):
    """Where a rank reads.

    Attributes:
        path: The folder without links, or the URL without secrets.
        entry: The file of it that was given; None for the folder.
        identity: The same on ranks of one node exactly if they read the same folder.
    """

    path: str
    entry: str | None
    identity: str

    @property
    def place(self) -> str:
        """What was given, folder and file."""
        return self.path if self.entry is None or "://" in self.path else f"{self.path}/{self.entry}"


@dataclass(frozen=True, slots=True)
class Origins:
    """Where all ranks read.

    Attributes:
        nodes: The node of every rank.
        by_rank: The origin of every rank.
        samples: By file, a hash of some of its data where rank 0 reads; empty if no rank may read something else.
    """

    nodes: tuple[int, ...]
    by_rank: tuple[Origin, ...]
    samples: Mapping[str, str]

    def peers(self, rank: int) -> list[int]:
        """Return the ranks that read the same files as `rank` on the same node, itself among them."""
        here = self._key(rank)
        return [other for other in range(len(self.nodes)) if self._key(other) == here]

    def has_checker(self) -> bool:
        """Return whether any rank is a checker."""
        return any(self._key(rank) != self._key(0) for rank in range(len(self.nodes)))

    def is_checker(self, rank: int) -> bool:
        """Return whether a rank has to compare its files with the index, for itself and its peers."""
        return self._key(rank) != self._key(0) and self.peers(rank)[0] == rank

    def _key(self, rank: int) -> tuple[int, str]:
        return self.nodes[rank], self.by_rank[rank].identity


def origin_of(path: str) -> Origin:
    """Return where this rank reads a checkpoint.

    Raises:
        CheckpointNotFoundError: If there is nothing at a local path.
        StorageError: If it cannot be looked at.
    """
    where = locate(path)
    if not where.is_local:
        url = redact(path).rstrip("/")
        return Origin(url, where.entry, url)
    check_there(where)
    try:
        folder = Path(where.root).resolve(strict=True)
        found = folder.stat()
    except OSError as error:
        raise StorageError(f"{where.root} cannot be looked at: {error.strerror}") from error
    return Origin(str(folder), where.entry, f"{found.st_dev}:{found.st_ino}")


def is_in_doubt(nodes: Sequence[int], origins: Sequence[Origin]) -> bool:
    """Return whether any rank may have been given another checkpoint than rank 0; the same on all ranks.

    Devices and inodes can be compared on one node only; on another one the same path is taken for the same.
    """
    first = origins[0]
    return any(
        origin.identity != first.identity if node == nodes[0] else origin.path != first.path
        for node, origin in zip(nodes, origins, strict=True)
    )


def check_files(
    origins: Origins, rank: int, path: str, index: CheckpointIndex, files: Collection[str], *, timeout_s: float
) -> None:
    """Check that the files a rank reads are those that rank 0 has opened; called by checkers.

    Args:
        origins: Where all ranks read.
        rank: This rank.
        path: The checkpoint on this rank.
        index: What rank 0 has opened.
        files: Those files of it that this rank and its peers read.
        timeout_s: Within this a server that does not answer is an error.

    Raises:
        CheckpointError: If one is not; names the rank, both places and the file.
        StorageError: If one cannot be read.
    """
    mine, first = origins.by_rank[rank], origins.by_rank[0]
    where = locate_again(path, index.root, timeout_s=timeout_s)
    try:
        for file in files:
            # Of an object whose version rank 0 has told, every request asks for that version.
            if where.is_local or mine.path != first.path or not index.files[file].version:
                check_file(where.files, file, index.files[file])
        if origins.samples:
            _compare_samples(origins.samples, sample_files(where.files, index, files), where.root)
    except CheckpointError as error:
        raise type(error)(f"rank {rank} reads {mine.path}, rank 0 {first.path}: {error}") from error


def _compare_samples(expected: Mapping[str, str], found: Mapping[str, str], root: str) -> None:
    other = next((file for file in found if found[file] != expected[file]), None)
    if other is not None:
        raise CheckpointChangedError(
            f"{root}/{other} has the same layout in both places, but other values. Give every rank the same path; if "
            "all have it, one has left out an earlier call, and is one behind"
        )
