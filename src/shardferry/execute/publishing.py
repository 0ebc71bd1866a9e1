"""A save's staged files over all ranks: made together, written by all, published by rank 0, or removed.

The steps on the filesystem are storage's, which of them are taken is plan's decision; here they get their order
among ranks.
"""

from __future__ import annotations

import json
import logging
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from shardferry.execute.extras import Extras
from shardferry.format.savenames import TOKEN_BYTES
from shardferry.plan.publish import check_existing, choose_protocol
from shardferry.storage.place import Place
from shardferry.storage.publish import Claim, Publication, claim_target
from shardferry.storage.renames import LocalFilesystem
from shardferry.storage.target import survey_target
from shardferry.storage.writing import OpenFiles, create_file, write_header
from shardferry.transport.together import together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shardferry.execute.meter import Meter
    from shardferry.format.savenames import PublishProtocol
    from shardferry.plan.packing import CheckpointLayout
    from shardferry.plan.publish import OnExisting
    from shardferry.transport.base import Group

logger = logging.getLogger(__name__)

# A guess: a rank learns of a failure between two pieces of 4 MiB; only one that is inside a slow sync takes longer, and
# that one creates nothing any more.
STOPPED_WITHIN_S = 5.0


class _Begun(NamedTuple):
    """What rank 0 holds of a save that has begun."""

    claim: Claim
    publication: Publication
    on_existing: OnExisting
    extras: Extras


class Staging:
    """Files that are staged and not published yet.

    Attributes:
        folder: Where every rank writes its bytes.
        protocol: How they will be published.
        remarks: On rank 0, what of earlier saves or of the old checkpoint had to stay, as sentences.
    """

    def __init__(
        self, group: Group, layout: CheckpointLayout, place: Place, protocol: PublishProtocol, begun: _Begun | None
    ) -> None:
        """Take over what `stage` has made."""
        self.folder = place.staging
        self.protocol = protocol
        self.remarks: tuple[str, ...] = begun.claim.remarks if begun else ()
        self._group = group
        self._layout = layout
        self._begun = begun
        self._is_published = False

    def open_files(self, meter: Meter) -> OpenFiles:  # noqa: ARG002 - nothing is held but what the caller has
        """Return what this rank writes the staged files through."""
        return OpenFiles(self.folder)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Give a context at whose end the target is free for other saves, and nothing staged is left if it failed."""
        try:
            yield
        except BaseException:
            self._abort()
            raise
        finally:
            if self._begun is not None:
                self._begun.extras.remove()
                self._begun.claim.lock.release()

    def publish(self) -> None:
        """Make the staged files the checkpoint, when every rank has written and synced its bytes. Collective."""

        def work() -> bytes:
            if self._begun is not None:
                self._publish(self._begun)
            return b""

        together(self._group, "publish", work)

    def _publish(self, begun: _Begun) -> None:
        layout = self._layout
        begun.extras.stage(begun.publication)
        for file in layout.files if self.protocol == "in place" else ():
            write_header(f"{self.folder}/{file.name}", file.header)
        index = None if layout.index is None or layout.index_name is None else (layout.index_name, layout.index)
        begun.publication.seal({file.name: file.size for file in layout.files}, index)
        # Another program may have put something there meanwhile: a config where nothing was, or a checkpoint.
        state = survey_target(begun.claim.state.path, self._layout.naming)
        if self.protocol != "in place":
            check_existing(state, begun.on_existing)
            self.protocol = choose_protocol(state, begun.claim.capabilities)
        self.remarks += begun.publication.publish(state, self.protocol)
        self._is_published = True

    def _abort(self) -> None:
        if self._begun is not None and not self._is_published:
            self._group.wait_until_left(STOPPED_WITHIN_S)  # until then they may create files in what is removed
            for remark in self._begun.publication.abort():
                logger.warning("a failed save has left something: %s", remark)


def stage(
    group: Group,
    path: str,
    layout: CheckpointLayout,
    on_existing: OnExisting,
    write_extras: Callable[[Path], None],
) -> Staging:
    """Claim the target and create the files with their headers. Collective.

    Args:
        group: The ranks.
        path: Where the checkpoint is to be.
        layout: Its files.
        on_existing: What to do about a checkpoint that is there.
        write_extras: Writes what belongs beside the weights into the empty folder it is given; called on rank 0.

    Raises:
        CheckpointExistsError: If a checkpoint is there and must not be replaced.
        StorageError: If another save to it is running, or there is no space.
    """
    begun: list[_Begun] = []

    def work() -> bytes:
        if group.rank:
            return b""
        found = survey_target(path, layout.naming)
        if not found.leftovers:
            check_existing(found, on_existing)  # before a lock is taken, which a directory may not allow
        extras = Extras(write_extras, layout, layout.naming)
        try:
            place, protocol, one = _claim(path, layout, on_existing, extras)
        except BaseException:
            extras.remove()
            raise
        begun.append(one)
        return json.dumps([place.to_bytes().decode(), protocol]).encode()

    try:
        told = together(group, "stage files", work)
    except BaseException:
        for one in begun:
            one.publication.abort()
            one.extras.remove()
            one.claim.lock.release()
        raise
    place, protocol = json.loads(told[0])
    return Staging(group, layout, Place.from_bytes(place.encode()), protocol, begun[0] if begun else None)


def _claim(
    path: str, layout: CheckpointLayout, on_existing: OnExisting, extras: Extras
) -> tuple[Place, PublishProtocol, _Begun]:
    token = secrets.token_hex(TOKEN_BYTES)
    claim = claim_target(LocalFilesystem(), path, layout.naming, token, forward=on_existing == "replace")
    try:
        check_existing(claim.state, on_existing)
        protocol = choose_protocol(claim.state, claim.capabilities)
        place = Place(claim.state.path, claim.state.home, token, in_place=protocol == "in place")
        return place, protocol, _Begun(claim, _create(place, layout, extras), on_existing, extras)
    except BaseException:
        claim.lock.release()
        raise


def _create(place: Place, layout: CheckpointLayout, extras: Extras) -> Publication:
    publication = Publication(LocalFilesystem(), place)
    index = [layout.index_name] if layout.index_name else []
    try:
        publication.create([*(file.name for file in layout.files), *index, *extras.names])
        for file in layout.files:
            # Where readers see it already, a file has no header, and so is no checkpoint, until its bytes are there.
            create_file(place.path_of(file.name), b"" if place.in_place else file.header, file.size)
    except BaseException:
        publication.abort()
        raise
    return publication
