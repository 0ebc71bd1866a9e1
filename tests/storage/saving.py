"""A whole save played by one process, on filesystems that lack abilities or that die between two changes."""

from __future__ import annotations

import errno
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.numpy import load
from tests.checkpoints import INDEX, sharded, tensor

from shardferry.errors import CheckpointError, CheckpointWarning
from shardferry.execute.open import open_checkpoint
from shardferry.format.oldfiles import Naming
from shardferry.format.savenames import PublishProtocol, is_save_name
from shardferry.plan.publish import OnExisting, check_existing, choose_protocol
from shardferry.storage.place import Place
from shardferry.storage.publish import Claim, Publication, claim_target
from shardferry.storage.renames import Filesystem, LocalFilesystem
from shardferry.storage.target import survey_target

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

NAMING = Naming()
SINGLE = "model.safetensors"

# What a filesystem lacks, and the protocol that is left for a target that holds something.
LACKS: dict[str, frozenset[str]] = {
    "exchange": frozenset(),
    "swap": frozenset({"exchange"}),
    "swap without links": frozenset({"exchange", "link"}),
    "files": frozenset({"exchange", "rename_directory"}),
    "in place": frozenset({"exchange", "link", "rename_directory", "rename_file"}),
}


class Killed(BaseException):
    """The process has ended: nothing it would still do happens."""


@dataclass
class Stepping:
    """A filesystem that calls `step` before every change, and in the middle of writing a file.

    Attributes:
        real: Does the changes.
        lacks: What it answers with an error: exchange, link, rename_directory, rename_file.
        step: Told what is about to happen; may raise.
    """

    real: Filesystem
    lacks: Collection[str] = ()
    step: Callable[[str], None] = lambda _: None

    def make_directory(self, path: str) -> None:
        self._do("make_directory", lambda: self.real.make_directory(path), path)

    def write_file(self, path: str, data: bytes) -> None:
        self.step(f"write_file {path}")
        if len(data) > 1:
            self.real.write_file(path, data[: len(data) // 2])
            self.step(f"in the middle of write_file {path}")
        self.real.write_file(path, data)

    def copy_mode(self, source: str, path: str) -> None:
        self._do("copy_mode", lambda: self.real.copy_mode(source, path), path)

    def link(self, source: str, path: str) -> None:
        self._refuse("link", path)
        self._do("link", lambda: self.real.link(source, path), path)

    def rename(self, source: str, path: str) -> None:
        self._refuse("rename_directory" if Path(source).is_dir() else "rename_file", path)
        self._do("rename", lambda: self.real.rename(source, path), f"{source} -> {path}")

    def rename_new(self, source: str, path: str) -> None:
        self._refuse("rename_directory" if Path(source).is_dir() else "rename_file", path)
        self._do("rename_new", lambda: self.real.rename_new(source, path), f"{source} -> {path}")

    def exchange(self, one: str, other: str) -> None:
        self._refuse("exchange", one)
        self._do("exchange", lambda: self.real.exchange(one, other), f"{one} <-> {other}")

    def unlink(self, path: str) -> None:
        self._do("unlink", lambda: self.real.unlink(path), path)

    def remove_directory(self, path: str) -> None:
        self._do("remove_directory", lambda: self.real.remove_directory(path), path)

    def sync_directory(self, path: str) -> None:
        self._do("sync_directory", lambda: self.real.sync_directory(path), path)

    def _refuse(self, what: str, path: str) -> None:
        if what in self.lacks:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), path)

    def _do(self, what: str, change: Callable[[], None], path: str) -> None:
        self.step(f"{what} {path}")
        change()


class DiesAt:
    """A step that ends the process at its `at`-th call and lets nothing happen afterwards."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0
        self.where = ""

    def __call__(self, what: str) -> None:
        if self.count >= self.at:
            self.where = self.where or what
            raise Killed(what)
        self.count += 1


def checkpoint(*files: str, seed: int) -> dict[str, bytes]:
    """Return the files of a checkpoint that has these weight files."""
    tensors = {name: [tensor(f"{number}.w", "F16", (3,), seed=seed)] for number, name in enumerate(files)}
    contents = sharded(tensors)
    if files == (SINGLE,):
        del contents[INDEX]
    return contents


def save(
    filesystem: Stepping,
    path: Path,
    contents: Mapping[str, bytes],
    *,
    number: int = 1,
    on_existing: OnExisting = "replace",
) -> tuple[str, ...]:
    """Save these files, as rank 0 and all others; on a failure, abort as they would; return the remarks."""
    token = f"{number:04}"
    claim = claim_target(filesystem, str(path), NAMING, token, forward=on_existing == "replace")
    publication = None
    try:
        check_existing(claim.state, on_existing)
        protocol = choose_protocol(claim.state, claim.capabilities)
        place = Place(claim.state.path, claim.state.home, token, in_place=protocol == "in place")
        publication = Publication(filesystem, place)
        remarks = _publish(filesystem, publication, place, contents, claim)
    except Killed:
        claim.lock.close()
        raise
    except BaseException:
        if publication is not None:
            assert publication.abort() == ()
        claim.lock.release()
        raise
    claim.lock.release()
    return remarks


def _publish(
    filesystem: Stepping, publication: Publication, place: Place, contents: Mapping[str, bytes], claim: Claim
) -> tuple[str, ...]:
    weights = {name: len(data) for name, data in contents.items() if name.endswith(".safetensors")}
    publication.create(list(contents))
    for name in weights:
        filesystem.write_file(place.path_of(name), contents[name])
    for name, data in contents.items():
        if name not in weights and name != INDEX:
            publication.add(name, data)
    publication.seal(weights, (INDEX, contents[INDEX]) if INDEX in contents else None)
    filesystem.step("publish")
    state = survey_target(place.target, NAMING)
    protocol: PublishProtocol = "in place" if place.in_place else choose_protocol(state, claim.capabilities)
    remarks = publication.publish(state, protocol)
    filesystem.step("release the lock")
    return remarks


def limited(lacks: Collection[str] = (), step: Callable[[str], None] = lambda _: None) -> Stepping:
    """Return the local filesystem without some abilities."""
    return Stepping(LocalFilesystem(), lacks, step)


def seen_by_us(path: Path) -> dict[str, bytes] | None:
    """Return the weight files that `open_checkpoint` takes at this instant, None if it finds no checkpoint."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # what has been left is remarked upon
            index = open_checkpoint(path)
    except CheckpointError:
        return None
    return {name: (path / name).read_bytes() for name in index.files}


def seen_by_others(path: Path) -> dict[str, bytes] | None:
    """Return what a reader takes that knows the standard names only: the single file, or else what the index names.

    Raises:
        FileNotFoundError: If the index names a file that is not there: it must not be seen before or after its files.
    """
    if (path / SINGLE).exists():
        names = {SINGLE}
    elif (path / INDEX).exists():
        try:
            names = set(json.loads((path / INDEX).read_bytes())["weight_map"].values())
        except ValueError:  # being written in place
            return None
    else:
        return None
    found = {name: (path / name).read_bytes() for name in names}
    try:
        for data in found.values():
            load(data)
    except SafetensorError:  # being written in place
        return None
    return found


def leftovers(path: Path) -> list[str]:
    """Return every name that a save has left in the target or beside it."""
    entries = [*path.parent.iterdir(), *(path.iterdir() if path.is_dir() else ())]
    return sorted(entry.name for entry in entries if is_save_name(entry.name))
