"""How a finished set of files becomes the checkpoint at a path, step by step, on one rank.

Rank 0: `claim_target`, `Publication.create`, then every rank writes into `Place.staging` and syncs what it wrote, then
rank 0: `add`, `seal`, `publish`, `close`; or `abort`. Ranks agree between the steps; that is not done here, nor is it
decided here which protocol is taken.

The order that makes it safe: files on the disk, then their names, then the journal, then the change, then its name on
the disk, and only then is anything old removed.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardferry.errors import InvalidInputError, ShardferryError, StorageError
from shardferry.format.problem import shown
from shardferry.format.savenames import sibling_name
from shardferry.storage.absorb import link_foreign
from shardferry.storage.capabilities import Capabilities, probe_capabilities
from shardferry.storage.journal import Journal
from shardferry.storage.place import Place
from shardferry.storage.recover import recover, settle
from shardferry.storage.savelock import SaveLock, take_lock
from shardferry.storage.switch import change_directories, clear_away, put_files
from shardferry.storage.target import survey_target

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardferry.format.oldfiles import Naming
    from shardferry.format.savenames import PublishProtocol
    from shardferry.storage.renames import Filesystem
    from shardferry.storage.target import TargetState


# What the caller can do about what a filesystem refuses; of anything else its log knows more.
_REMEDIES = {
    errno.ENOSPC: "Make room and save again",
    errno.EDQUOT: "Make room within the quota and save again",
    errno.EACCES: "Let this user write there, or save elsewhere",
    errno.EPERM: "Let this user write there, or save elsewhere",
    errno.EROFS: "Mount it for writing, or save elsewhere",
    errno.ENAMETOOLONG: "Save to a shorter path",
}
_OTHER_REMEDY = "See what the system's log says of this filesystem, and save again or elsewhere"


@contextmanager
def naming_failures(target: str, doing: str) -> Iterator[None]:
    """Turn what the filesystem refuses into an error that says where, in doing what, and what can be done about it."""
    try:
        yield
    except OSError as error:
        if isinstance(error, ShardferryError):
            raise
        remedy = _REMEDIES.get(error.errno or 0, _OTHER_REMEDY)
        raise StorageError(f"cannot save to {shown(target)}: {doing} failed: {error}. {remedy}") from error


@dataclass(frozen=True, slots=True)
class Claim:
    """A target that one save has to itself.

    Attributes:
        state: What is there, after earlier saves were finished or undone.
        capabilities: What the filesystem can do.
        lock: Keeps other saves out until it is released.
        remarks: What of earlier saves had to stay, as sentences.
    """

    state: TargetState
    capabilities: Capabilities
    lock: SaveLock
    remarks: tuple[str, ...]


def claim_target(filesystem: Filesystem, path: str, naming: Naming, token: str, *, forward: bool) -> Claim:
    """Keep other saves out, deal with what earlier ones left, and find out what is there. On one rank.

    Args:
        filesystem: What makes changes.
        path: Where the checkpoint is to be; missing parents are made.
        naming: How its files are called.
        token: Name of this save.
        forward: Whether a complete checkpoint of an interrupted save that no reader can see yet is published (a save
            that replaces) or removed (a save that refuses, which it would block).

    Raises:
        InvalidInputError: If no checkpoint can be at `path`.
        StorageError: If another save to it is running, or the filesystem refuses something.
    """
    with naming_failures(path, "preparing it"):
        return _claim_target(filesystem, path, naming, token, forward=forward)


def _claim_target(filesystem: Filesystem, path: str, naming: Naming, token: str, *, forward: bool) -> Claim:
    state = survey_target(path, naming)
    _make_parents(filesystem, state.home)
    name = os.path.basename(state.path)  # noqa: PTH119 - paths are strings here: they travel between ranks
    lock = take_lock(f"{state.home}/{sibling_name(name, '', 'lock')}", state.leftovers)
    place = Place(state.path, state.home, token)
    try:
        remarks = recover(filesystem, survey_target(path, naming), forward=forward)
        capabilities = probe_capabilities(filesystem, place.probe)
        state = survey_target(path, naming)
    except BaseException:
        try:
            with suppress(OSError):  # the first error is the one to tell
                settle(filesystem, place, forward=False)
        finally:
            lock.release()
        raise
    return Claim(state, capabilities, lock, remarks)


class Publication:
    """The steps of one save on rank 0, in order: `create`, `seal`, `publish` or `abort`."""

    def __init__(self, filesystem: Filesystem, place: Place) -> None:
        """Publish to `place` with the methods of `filesystem`; changes nothing yet."""
        self._filesystem = filesystem
        self._place = place
        self._files: dict[str, int] = {}
        self._last = ""
        self._added: dict[str, int] = {}

    def create(self, names: Sequence[str]) -> None:
        """Make the directory in which the files are written; nothing a reader sees is changed.

        Args:
            names: The files this save will write, relative to the checkpoint; the index and what is added among them.

        Raises:
            InvalidInputError: If the target has a directory of one of these names, or a link for one of their folders.
            StorageError: If it cannot be made.
        """
        place, filesystem = self._place, self._filesystem
        with naming_failures(place.target, "making the staged files"):
            _check_names(place.target, names)
            if place.in_place:
                self._create_in_place(names)
            else:
                filesystem.make_directory(place.staging)
                filesystem.write_file(place.mark, b"")
            for folder in _folders(names):
                if not os.path.lexists(place.path_of(folder)):
                    filesystem.make_directory(place.path_of(folder))
            filesystem.sync_directory(place.home)

    def add(self, name: str, data: bytes) -> None:
        """Write a small file that belongs beside the weights; its name was given to `create`.

        Raises:
            StorageError: If it cannot be written or synced.
        """
        with naming_failures(self._place.target, "writing what belongs beside the weights"):
            self._filesystem.write_file(self._place.path_of(name), data)
            self._added[name] = len(data)

    def seal(self, files: Mapping[str, int], index: tuple[str, bytes] | None) -> None:
        """Write the index, last of all files, and wait until every name is on the disk.

        Args:
            files: Size in bytes of each weight file; the ranks that wrote them have synced them.
            index: Name and content of the index; None if there is one file only.

        Raises:
            StorageError: If something cannot be written or synced.
        """
        place, filesystem = self._place, self._filesystem
        with naming_failures(place.target, "finishing the staged files"):
            self._files = {**files, **self._added}
            self._last = index[0] if index else next(iter(files), "")
            if index:
                self._files[index[0]] = len(index[1])
            if place.in_place:
                filesystem.write_file(place.journal("published"), self._journal("in place", ()).to_bytes())
            if index:
                filesystem.write_file(place.path_of(index[0]), index[1])
            for folder in (*reversed(_folders(self._files)), "."):
                filesystem.sync_directory(place.path_of(folder))

    def publish(self, state: TargetState, protocol: PublishProtocol) -> tuple[str, ...]:
        """Make the sealed files the checkpoint; all ranks have agreed on it.

        Args:
            state: What is at the target now: other programs may have added files since it was claimed.
            protocol: How; `"in place"` if and only if the place is.

        Returns:
            What could not be cleared away behind the new checkpoint, as sentences. It is published all the same.

        Raises:
            StorageError: If the change cannot be made; call `abort` to undo what was begun.
        """
        place, filesystem = self._place, self._filesystem
        with naming_failures(place.target, "publishing the staged files"):
            journal = self._journal(protocol, state.old_files)
            if protocol == "in place":
                filesystem.unlink(place.journal("publishing"))
            elif protocol == "files":
                if state.content == "absent":
                    filesystem.make_directory(place.target)
                replaced = {name for name in journal.files if os.path.lexists(f"{place.target}/{name}")}
                both = (*journal.replaced, *sorted(replaced.difference(journal.replaced)))
                journal = self._journal(protocol, both)
                filesystem.write_file(place.journal("publishing"), journal.to_bytes())
                filesystem.sync_directory(place.target)
                put_files(filesystem, place, journal)
            else:
                journal = self._prepare_directory(state, journal)
                change_directories(filesystem, place, journal)
            return self._clear_away(journal)

    def abort(self) -> tuple[str, ...]:
        """Remove what this save has made, and undo a change that was begun; never raises for what it meets.

        Returns:
            What had to stay, as sentences.
        """
        place = self._place
        try:
            return tuple(settle(self._filesystem, place, forward=False))
        except OSError as error:
            where = place.target if place.in_place else place.staging
            return (f"'{where}' could not be cleared away ({error}): the next save to '{place.target}' does it",)

    def _create_in_place(self, names: Sequence[str]) -> None:
        place, filesystem = self._place, self._filesystem
        if not os.path.lexists(place.target):
            filesystem.make_directory(place.target)
        fresh = {name: 0 for name in names if not os.path.lexists(f"{place.target}/{name}")}
        filesystem.write_file(place.journal("publishing"), Journal("in place", fresh, "", ()).to_bytes())
        filesystem.sync_directory(place.target)
        for name in names:  # writing to it would write to what it points to, a shared cache for example
            if os.path.islink(f"{place.target}/{name}"):  # noqa: PTH114
                filesystem.unlink(f"{place.target}/{name}")

    def _journal(self, protocol: PublishProtocol, replaced: tuple[str, ...], linked: tuple[str, ...] = ()) -> Journal:
        return Journal(protocol, self._files, self._last, replaced, linked)

    def _prepare_directory(self, state: TargetState, journal: Journal) -> Journal:
        """Make the staged directory one that can take the target's place, and write the journal into it."""
        place, filesystem = self._place, self._filesystem
        if state.content != "absent":
            filesystem.copy_mode(place.target, place.staging)
            drop = {*journal.replaced, *journal.files}
            linked = link_foreign(filesystem, place.target, place.staging, drop)
            journal = self._journal(journal.protocol, journal.replaced, linked)
        filesystem.write_file(place.mark, journal.to_bytes())
        filesystem.sync_directory(place.staging)
        return journal

    def _clear_away(self, journal: Journal) -> tuple[str, ...]:
        try:
            kept = clear_away(self._filesystem, self._place, journal)
        except OSError as error:
            return (f"not everything old could be removed ({error}): the next save to the same path does it",)
        return tuple(
            f"'{path}' is kept: the new checkpoint's directory has something else of that name" for path in kept
        )


def discard_files(place: Place, names: Sequence[str]) -> tuple[str, ...]:
    """Remove files that this rank has staged, when the save has failed before it was sealed. On any rank but 0.

    Returns:
        Paths of what could not be removed.
    """
    kept = []
    for name in names:
        try:
            os.unlink(place.path_of(name))  # noqa: PTH108
        except FileNotFoundError:
            pass
        except OSError:
            kept.append(place.path_of(name))
    return tuple(kept)


def _make_parents(filesystem: Filesystem, path: str) -> None:
    """Make a directory and those above it, so that they are still there after a power failure."""
    if os.path.isdir(path):  # noqa: PTH112
        return
    parent = os.path.dirname(path)  # noqa: PTH120
    _make_parents(filesystem, parent)
    try:
        filesystem.make_directory(path)
    except FileExistsError:  # another save made it just now
        if not os.path.isdir(path):  # noqa: PTH112
            raise
    filesystem.sync_directory(parent)


def _check_names(target: str, names: Sequence[str]) -> None:
    for name in names:
        path = f"{target}/{name}"
        if os.path.isdir(path) and not os.path.islink(path):  # noqa: PTH112, PTH114
            raise InvalidInputError(
                f"{shown(path)} is a directory, but the checkpoint has a file of that name: move it"
            )
    for folder in _folders(names):
        path = f"{target}/{folder}"
        if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):  # noqa: PTH112, PTH114
            raise InvalidInputError(f"{shown(path)} is no directory, but the checkpoint has files in it: move it")


def _folders(names: Sequence[str] | Mapping[str, int]) -> list[str]:
    """Return the folders that these names lie in, outer ones first, the root not among them."""
    parts = [name.split("/")[:-1] for name in names]
    return sorted({"/".join(part[: count + 1]) for part in parts for count in range(len(part))})
