"""Finishes or undoes what saves to a path have left when they were interrupted.

What a reader can see already is finished. What is prepared whole and agreed is finished too if the caller wants it,
else undone; everything before that is undone. Whoever calls holds the target's lock. Interrupted itself, it is called
again.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from shardferry.format.savenames import parse_journal, parse_sibling
from shardferry.storage.capabilities import remove_tree
from shardferry.storage.journal import Journal, read_journal
from shardferry.storage.place import Place
from shardferry.storage.switch import (
    bring_back,
    change_directories,
    clear_away,
    is_complete,
    put_files,
    take_files_back,
)

if TYPE_CHECKING:
    from shardferry.storage.renames import Filesystem
    from shardferry.storage.target import TargetState


def recover(filesystem: Filesystem, state: TargetState, *, forward: bool) -> tuple[str, ...]:
    """Finish or undo every interrupted save to a target; return what had to stay, as sentences.

    Args:
        filesystem: Does it.
        state: What was found at the target.
        forward: Whether a checkpoint that is complete but that no reader can see yet is published; else it is removed.

    Raises:
        OSError: If something cannot be moved or removed.
    """
    name = os.path.basename(state.path)  # noqa: PTH119 - paths are strings here: they travel between ranks
    places = {}
    for path in state.leftovers:
        folder, entry = os.path.split(path)
        found = parse_sibling(entry, name)
        if found is not None and found.token:
            places[found.token] = Place(state.path, folder, found.token)
    for path in state.leftovers:
        journal = parse_journal(os.path.basename(path))  # noqa: PTH119
        if journal is not None and journal.token not in places:
            places[journal.token] = Place(state.path, state.home, journal.token)
    kept: list[str] = []
    for _, place in sorted(places.items()):
        kept += settle(filesystem, place, forward=forward)
    return tuple(kept)


def settle(filesystem: Filesystem, place: Place, *, forward: bool) -> list[str]:
    """Finish or undo one save, as `recover` does.

    Raises:
        OSError: If something cannot be moved or removed.
    """
    place = replace(place, in_place=False)  # what is staged beside the target; the target itself is never removed
    if os.path.lexists(place.probe):
        remove_tree(filesystem, place.probe)
    publishing, published = (read_journal(place.journal(kind)) for kind in ("publishing", "published"))
    if os.path.lexists(place.journal("publishing")):
        return _settle_files(filesystem, place, publishing, published, forward=forward)
    if os.path.lexists(place.journal("published")):
        return _finish(filesystem, place, published)
    return _settle_directories(filesystem, place, forward=forward)


def _finish(filesystem: Filesystem, place: Place, journal: Journal | None) -> list[str]:
    """Clear away behind a checkpoint that readers see."""
    if journal is None:  # nobody of ours writes that: somebody has changed it
        if os.path.lexists(place.retired):
            return [_unknown(place.retired)]
        filesystem.unlink(place.journal("published"))
        return []
    return [_conflict(path) for path in clear_away(filesystem, place, journal)]


def _settle_files(
    filesystem: Filesystem, place: Place, publishing: Journal | None, published: Journal | None, *, forward: bool
) -> list[str]:
    """Settle a save that put files into the target one by one."""
    if publishing is None:  # not written to its end, so nothing else was begun
        filesystem.unlink(place.journal("publishing"))
        return _discard(filesystem, place)
    if publishing.protocol == "in place":
        if forward and published is not None and is_complete(place, published):
            filesystem.unlink(place.journal("publishing"))
            return _finish(filesystem, place, published)
        _remove_written(filesystem, place, publishing)
        return []
    if forward and is_complete(place, publishing):
        put_files(filesystem, place, publishing)
        return _finish(filesystem, place, publishing)
    take_files_back(filesystem, place, publishing)
    return _discard(filesystem, place)


def _remove_written(filesystem: Filesystem, place: Place, journal: Journal) -> None:
    """Remove what a save wrote in place; the index, which makes a reader open the rest, first."""
    for name in sorted(journal.files, key=lambda name: not name.endswith(".json")):
        if os.path.lexists(f"{place.target}/{name}"):
            filesystem.unlink(f"{place.target}/{name}")
    filesystem.sync_directory(place.target)
    for kind in ("published", "publishing"):
        if os.path.lexists(place.journal(kind)):
            filesystem.unlink(place.journal(kind))
    filesystem.sync_directory(place.target)


def _settle_directories(filesystem: Filesystem, place: Place, *, forward: bool) -> list[str]:
    """Settle a save whose staged directory has not taken the target's place."""
    journal = read_journal(place.mark)
    if forward and journal is not None and journal.protocol != "files" and is_complete(place, journal):
        try:
            change_directories(filesystem, place, journal)
        except OSError:
            if os.path.lexists(place.journal("published")):
                raise
            # Something is in its way that was not there before: undo it instead.
        else:
            return _finish(filesystem, place, journal)
    if os.path.lexists(place.retired):
        if journal is None and os.path.lexists(place.target):
            return [_unknown(place.retired)]
        bring_back(filesystem, place)
    return _discard(filesystem, place)


def _discard(filesystem: Filesystem, place: Place) -> list[str]:
    """Remove the staged directory, if it is one: only a new one has its mark, which goes last."""
    if not os.path.lexists(place.staging):
        return []
    if os.listdir(place.staging) and not os.path.lexists(place.mark):  # noqa: PTH208
        return [_unknown(place.staging)]
    remove_tree(filesystem, place.staging, last=os.path.basename(place.mark))  # noqa: PTH119
    filesystem.sync_directory(place.home)
    return []


def _unknown(path: str) -> str:
    return f"'{path}' is kept: it is not known to be a save's own. Look at it and remove it by hand"


def _conflict(path: str) -> str:
    return f"'{path}' is kept: the new checkpoint's directory has something else of that name. Keep one of the two"
