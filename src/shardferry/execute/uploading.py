"""A save's uploads over all ranks: begun together, completed together, published by rank 0, or aborted.

Until every rank has sent everything no object of the save exists. Then rank 0 puts its marker in the place of the
index, every rank completes its uploads, and rank 0 puts the new index in the place of the marker.

The marker is a lease (`storage/objecttarget.py`). Every rank reads its own clock before rank 0 puts it, so clocks need
not agree; what a rank has not begun to complete when its lease is over waits until rank 0 has put a new one.
"""

from __future__ import annotations

import json
import logging
import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from shardferry.errors import ShardferryError, StorageError
from shardferry.execute.extras import Extras
from shardferry.plan.publish import check_existing
from shardferry.storage.objecttarget import LEASE_S, ObjectState, ObjectTarget, check_marker
from shardferry.storage.upload import Room, Upload
from shardferry.transport.together import together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from shardferry.execute.meter import Meter
    from shardferry.format.writer import FileLayout
    from shardferry.plan.packing import CheckpointLayout
    from shardferry.plan.publish import OnExisting
    from shardferry.storage.base import Bytes
    from shardferry.transport.base import Group

logger = logging.getLogger(__name__)

# Of the budget, what the parts of uploads may take; the rest is for the exchange.
PARTS_SHARE = 2
# What another rank is doing when one has failed ends within this: it completes a large object, for a minute or two.
LEFT_WITHIN_S = 240.0


class _Begun(NamedTuple):
    """What rank 0 holds of a save that has begun."""

    state: ObjectState
    extras: Extras
    on_existing: OnExisting


class Uploads:
    """The files this rank owns, each sent as it is written, from its first byte to its last."""

    def __init__(
        self,
        target: ObjectTarget,
        files: Mapping[str, FileLayout],
        meter: Meter,
        check: Callable[[], None],
        *,
        are_confirmed: bool,
    ) -> None:
        """Send the files of this rank; `check` is called while waiting."""
        self._target = target
        self._files = files
        self._check_others = check
        self._are_confirmed = are_confirmed
        self._room = Room(meter.budget_bytes // PARTS_SHARE, meter.add)
        self.begun: dict[str, Upload] = {}

    def get(self, name: str) -> _StreamedFile:
        """Return a file; its header is sent when it is first asked for."""
        if name not in self.begun:
            file = self._files[name]
            self.begun[name] = Upload(
                self._target.client,
                name,
                f"{self._target.root}/{name}",
                size=file.size,
                room=self._room,
                is_confirmed=self._are_confirmed,
                retry_s=self._target.patience.retry_s,
            )
            self.begun[name].write(np.frombuffer(file.header, np.uint8), self._check)
        return _StreamedFile(self.begun[name], self._check)

    def sync(self) -> None:
        """Wait until everything has been sent, files without tensors too.

        Raises:
            StorageError: If the store has refused something.
        """
        for name in self._files:
            self.get(name)
        for upload in self.begun.values():
            upload.settle(self._check)

    def _check(self) -> None:
        self._check_others()
        for upload in self.begun.values():
            upload.raise_if_failed()

    def __enter__(self) -> Self:
        """Return the files."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the uploads are completed or aborted when all ranks know how it went."""


class _StreamedFile:
    """A file that takes its bytes in order."""

    def __init__(self, upload: Upload, check: Callable[[], None]) -> None:
        self._upload = upload
        self._check = check

    def write(self, data: Bytes, start: int, on_write: Callable[[int, int], None]) -> None:
        """Append `data`, which belongs at offset `start`: where the last write ended."""
        assert start == self._upload.position, f"byte {start} of {self._upload.where} after {self._upload.position}"
        self._upload.write(data, self._check)
        on_write(len(data), 1)


class Uploading:
    """A save to an object store between its beginning and its end; what `publishing.Staging` is to directories.

    Attributes:
        protocol: Always `"upload"`.
        remarks: On rank 0, what the caller should know, as sentences.
    """

    protocol = "upload"

    def __init__(
        self,
        group: Group,
        url: str,
        layout: CheckpointLayout,
        owners: Mapping[str, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to upload; `begin` must follow."""
        self.remarks: tuple[str, ...] = ()
        self._group = group
        self._target = ObjectTarget(url, layout.naming, group.timeout_s)
        self._layout = layout
        self._mine = {file.name: file for file in layout.files if owners[file.name] == group.rank}
        self._uploads: Uploads | None = None
        self._begun: _Begun | None = None
        self._clock = clock
        self._leased_at = -math.inf  # by this rank's clock, not later than the marker was put
        self._etags: dict[str, str] = {}  # of what was there
        self._completed: dict[str, str] = {}  # ETags of what this rank has to remove if the save fails
        self._is_published = False

    def begin(self, on_existing: OnExisting, write_extras: Callable[[Path], None]) -> None:
        """Look at the target and refuse what must not be replaced. Collective.

        Raises:
            CheckpointExistsError: If a checkpoint is there and must not be replaced.
            StorageError: If another save is publishing to it, or the store denies access.
        """

        def work() -> bytes:
            if self._group.rank:
                return b""
            state = self._target.look()
            remark = check_marker(state, self._layout.naming)
            if remark is None:
                check_existing(state, on_existing)
            else:
                self.remarks += (remark,)
            self._begun = _Begun(state, Extras(write_extras, self._layout, self._layout.naming), on_existing)
            return json.dumps(state.etags).encode()

        self._etags = json.loads(together(self._group, "look at the target", work)[0])

    def open_files(self, meter: Meter) -> Uploads:
        """Return what this rank writes its files through."""
        # A refusal that came to light only when other files are completed would have cost the old files of their names.
        replaces_some = len(self._layout.files) > 1 and any(file.name in self._etags for file in self._layout.files)
        self._uploads = Uploads(self._target, self._mine, meter, self._group.check, are_confirmed=replaces_some)
        return self._uploads

    @contextmanager
    def released(self) -> Iterator[None]:
        """Give a context at whose end no upload and no object of a failed save is left."""
        try:
            yield
        except BaseException:
            self._abort()
            raise
        finally:
            if self._begun is not None:
                self._begun.extras.remove()

    def publish(self) -> None:
        """Make the uploads the checkpoint, when every rank has sent its bytes. Collective."""
        is_left = True
        while is_left:
            since = self._clock()
            together(self._group, "agree to publish", bytes)  # rank 0 puts no marker before all have read their clocks
            together(self._group, "claim the target", self._claim)
            self._leased_at = since
            is_left = any(json.loads(told) for told in together(self._group, "complete uploads", self._complete))
        for told in together(self._group, "hand over", self._hand_over):
            self._completed |= {} if self._group.rank else json.loads(told)
        together(self._group, "publish", self._finish)

    def _claim(self) -> bytes:
        if self._begun is not None:
            since = self._clock()
            if self._target.is_claimed:
                self._target.renew()
            else:
                remark = self._target.claim(self._begun.state)
                self.remarks += (remark,) if remark else ()
            if (took := self._clock() - since) >= LEASE_S:
                raise StorageError(
                    f"{self._target.root}: it took the store {took:.0f} s to take a few bytes, more than the "
                    f"{LEASE_S:.0f} s in which another save can be kept out. Save again when it is faster"
                )
        return b""

    def _complete(self) -> bytes:
        """Complete uploads while the lease lasts, and return whether any are left."""
        assert self._uploads is not None
        left = [name for name in self._uploads.begun if name not in self._completed]
        while left and not self._is_lease_over():
            name = left.pop(0)
            upload = self._uploads.begun[name]
            try:
                upload.complete()
                tag = upload.e_tag
            except ShardferryError:  # the answer may be what was lost, not the object
                tag = self._target.tag_if_completed(name, upload.size, self._etags.get(name, ""))
                if not tag:
                    raise
            self._completed[name] = tag
            self._group.check()
        return json.dumps(bool(left)).encode()

    def _hand_over(self) -> bytes:
        """Leave it to rank 0 to remove objects: only that knows whether the index which names them stands."""
        completed = json.dumps(self._completed).encode()
        self._completed.clear()
        return completed

    def _is_lease_over(self) -> bool:
        return self._clock() - self._leased_at >= LEASE_S

    def _finish(self) -> bytes:
        if self._begun is not None:
            self._begun.extras.stage(self)
            self._target.finish(self._layout.index)
            self._is_published = True
            self._remove_old(self._begun.state)
        return b""

    def add(self, name: str, data: bytes) -> None:
        """Write a small file that belongs beside the weights."""
        if self._is_lease_over():
            since = self._clock()
            self._target.renew()
            self._leased_at = since
        self._target.put(name, data)

    def _remove_old(self, state: ObjectState) -> None:
        """Remove what no new file has replaced. Another save may have begun: what it has put there stays."""
        new = {*(file.name for file in self._layout.files), self._layout.naming.index}
        for name in state.old_files:
            try:
                if name in state.etags and name not in new:
                    self._target.delete(name, state.etags[name])
            except ShardferryError as error:
                self.remarks += (f"an old file is left: {error}",)
                return

    def _abort(self) -> None:
        if self._is_published:
            return
        begun = self._uploads.begun if self._uploads else {}
        left = [upload for upload in begun.values() if not upload.e_tag]
        for upload in left:  # all at once: each may take as long as the store is given to answer
            upload.abandon()
        for upload in left:
            upload.abort()
        try:
            self._remove_completed()
            if self._begun is not None and self._target.is_claimed:
                self._give_back(self._begun.state)
        except ShardferryError as error:
            logger.warning("a failed save has left something: %s", error)

    def _remove_completed(self) -> None:
        """Remove what this rank has completed, while nobody else can have completed the same."""
        if self._completed and self._target.is_claimed and not self._is_lease_over():
            self._target.renew()  # refused if the index stands, because only the answer to that was lost
        for name, tag in self._completed.items():
            if self._is_lease_over():
                raise StorageError(
                    f"{self._target.root}: objects that were completed stay, as another save may have begun, and so "
                    "does the marker. The next save replaces them"
                )
            self._target.delete(name, tag)

    def _give_back(self, state: ObjectState) -> None:
        """Put back the index that was there; files that were overwritten are gone, which readers of it are told."""
        if self._group.wait_until_left(LEFT_WITHIN_S):  # until then they may complete uploads
            self._target.finish(state.index if state.marker is None else None)
        else:
            logger.warning("%s: the marker of a failed save stays, as a rank has not ended", self._target.root)
