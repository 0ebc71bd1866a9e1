"""A save's uploads over all ranks: begun together, completed together, published by rank 0, or aborted.

Until every rank has sent everything no object of the save exists. Then rank 0 puts its marker in the place of the
index, every rank completes its uploads, and rank 0 puts the new index in the place of the marker.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from shardferry.errors import ShardferryError
from shardferry.execute.extras import Extras
from shardferry.execute.publishing import STOPPED_WITHIN_S, TOKEN_BYTES
from shardferry.format.savenames import marker_bytes
from shardferry.plan.publish import check_existing
from shardferry.storage.objecttarget import ObjectState, ObjectTarget, check_marker
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

    def __init__(self, group: Group, url: str, layout: CheckpointLayout, owners: Mapping[str, int]) -> None:
        """Prepare to upload; `begin` must follow."""
        self.remarks: tuple[str, ...] = ()
        self._group = group
        self._target = ObjectTarget(url, group.timeout_s)
        self._layout = layout
        self._mine = {file.name: file for file in layout.files if owners[file.name] == group.rank}
        self._uploads: Uploads | None = None
        self._begun: _Begun | None = None
        self._etags: dict[str, str] = {}
        self._completed: list[str] = []
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
            state = self._target.look(self._layout.naming)
            remark = check_marker(state, replace=on_existing == "replace")
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
        together(self._group, "claim the target", self._claim)
        together(self._group, "complete uploads", self._complete)
        together(self._group, "publish", self._finish)

    def _claim(self) -> bytes:
        if self._begun is not None:
            marker = marker_bytes(secrets.token_hex(TOKEN_BYTES), socket.gethostname(), _now())
            remark = self._target.claim(self._begun.state, self._layout.naming, marker)
            self.remarks += (remark,) if remark else ()
        return b""

    def _complete(self) -> bytes:
        assert self._uploads is not None
        for name, upload in self._uploads.begun.items():
            try:
                upload.complete()
            except ShardferryError:  # the answer may be what was lost, not the object
                if not self._target.holds(name, upload.size, self._etags.get(name, "")):
                    raise
            self._completed.append(name)
            self._group.check()
        return b""

    def _finish(self) -> bytes:
        if self._begun is not None:
            self._begun.extras.stage(self)
            self._target.finish(self._layout.index, self._layout.naming)
            self._is_published = True
            new = {*(file.name for file in self._layout.files), self._layout.index_name, self._layout.naming.index}
            self._target.delete([name for name in self._begun.state.old_files if name not in new])
        return b""

    def add(self, name: str, data: bytes) -> None:
        """Write a small file that belongs beside the weights."""
        self._target.put(name, data)

    def _abort(self) -> None:
        if self._is_published:
            return
        begun = self._uploads.begun if self._uploads else {}
        left = [upload for name, upload in begun.items() if name not in self._completed]
        for upload in left:  # all at once: each may take as long as the store is given to answer
            upload.abandon()
        for upload in left:
            upload.abort()
        try:
            self._target.delete(self._completed)
            if self._begun is not None and self._target.is_claimed:
                self._group.wait_until_left(STOPPED_WITHIN_S)  # until then they may complete uploads
                self._give_back(self._begun.state)
        except ShardferryError as error:
            logger.warning("a failed save has left something: %s", error)

    def _give_back(self, state: ObjectState) -> None:
        """Put back the index that was there; files that were overwritten are gone, which readers of it are told."""
        self._target.finish(state.index if state.marker is None else None, self._layout.naming)


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
