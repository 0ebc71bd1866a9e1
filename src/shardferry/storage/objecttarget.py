"""The place in an object store that a save publishes to: what is there, and the few small requests that change it.

Nothing can be renamed there, but an object appears at once when its upload is completed, and a write may ask that the
object is still the one that was seen. So the index is the lock: a save replaces it by a marker if it has not changed,
completes its uploads, and replaces its own marker by the new index. Of two saves only one gets its marker in; a reader
in between sees the marker and no tensor, never a mix.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardferry.errors import CheckpointExistsError, InvalidInputError, StorageError
from shardferry.format.hubindex import parse_hub_index
from shardferry.format.oldfiles import is_checkpoint_file, old_files
from shardferry.format.savenames import PUBLISHING, describe_marker
from shardferry.storage.client import Patience, failures, make_client, translate
from shardferry.storage.url import HTTP_SCHEMES, redact, scheme_of

if TYPE_CHECKING:
    from obstore import PutMode
    from obstore.store import ObjectStore as Client

    from shardferry.format.oldfiles import Content, Naming

# Completing a large upload may take a store a minute or two, in which it sends nothing.
WRITE_PATIENCE = Patience(stall_s=120.0, request_s=240.0, retry_s=240.0)
# A marker older than this belongs to no running save: completing uploads takes seconds (a guess, with much room).
STALE_S = 600.0


@dataclass(frozen=True, slots=True)
class ObjectState:
    """What a save finds.

    Attributes:
        path: URL of the folder, without secrets.
        content: What is there.
        checkpoint_files: Names that mean there is a checkpoint.
        old_files: What a new checkpoint replaces; the index or single file first.
        etags: Of every object directly in the folder.
        index: The index that is there, None if there is none.
        marker: Who is publishing, or has begun to; None if nobody.
        marker_age_s: For how long.
        movable: Never.
    """

    path: str
    content: Content
    checkpoint_files: tuple[str, ...]
    old_files: tuple[str, ...]
    etags: dict[str, str]
    index: bytes | None
    marker: str | None
    marker_age_s: float
    movable: bool = False


class ObjectTarget:
    """A folder of an object store, as the target of a save."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Write below `url`; nothing is asked yet.

        Args:
            url: Of the folder.
            timeout_s: Within this a store that does not answer is an error.

        Raises:
            InvalidInputError: If nothing can be written there.
        """
        scheme = scheme_of(url)
        if scheme in (*HTTP_SCHEMES, "hf"):
            raise InvalidInputError(
                f"{redact(url)}: nothing can be saved to {scheme}://. Save to a folder or an object store (s3://, "
                "gs://, az://); to publish on the Hub, save to a folder and upload that"
            )
        self.root = redact(url).rstrip("/")
        self._url = url.rstrip("/")
        self.patience = WRITE_PATIENCE.within(timeout_s)
        self._tag: str | None = None
        self.is_claimed = False  # whether the marker stands in the place of the index

    @cached_property
    def client(self) -> Client:
        """Writes below the folder."""
        return make_client(self._url, self.patience, retries=True)

    def look(self, naming: Naming) -> ObjectState:
        """Return what is there.

        Raises:
            StorageError: If the store does not answer or denies access.
        """
        from obstore import get, list_with_delimiter  # noqa: PLC0415 - an extra

        try:
            found = list_with_delimiter(self.client)
            etags = {each["path"]: each["e_tag"] or "" for each in found["objects"]}
            index, age = None, 0.0
            if naming.index in etags:
                answer = get(self.client, naming.index)
                etags[naming.index] = answer.meta["e_tag"] or ""
                age = time.time() - answer.meta["last_modified"].timestamp()
                index = bytes(answer.bytes())
        except failures() as error:
            raise translate(error, self.root) from None
        marker = _marker_in(index)
        standing = tuple(sorted(name for name in etags if is_checkpoint_file(name, naming)))
        promised, _ = parse_hub_index(index, naming.index) if index is not None and marker is None else (None, [])
        old = old_files(etags, naming, promised.weight_map.values() if promised else ())
        content: Content = "checkpoint" if standing else "foreign" if etags or found["common_prefixes"] else "absent"
        return ObjectState(self.root, content, standing, old, etags, index, marker, age)

    def claim(self, state: ObjectState, naming: Naming, marker: bytes) -> str | None:
        """Put the marker in the place of the index that was seen there.

        Returns:
            A remark if the store takes no conditions, so that two saves at the same time are not kept apart.

        Raises:
            CheckpointExistsError: If another save has been there since.
            StorageError: If the store does not answer.
        """
        tag = state.etags.get(naming.index)
        mode: PutMode = {"e_tag": tag} if tag else "create"
        try:
            self._tag = self._put_or_find(naming.index, marker, mode)
        except failures() as error:
            if type(error).__name__ in ("AlreadyExistsError", "PreconditionError"):
                raise CheckpointExistsError(
                    f"{self.root}: another save has published here, or is about to. Nothing was changed by this one"
                ) from None
            if type(error).__name__ != "NotSupportedError" and "501" not in str(error):
                raise translate(error, self.root) from None
            self._tag = self.put(naming.index, marker)
            self.is_claimed = True
            return self._unguarded()
        self.is_claimed = True
        try:
            self._tag = self._put(naming.index, marker, "create")  # must fail: it is there
        except failures() as error:
            if type(error).__name__ in ("AlreadyExistsError", "PreconditionError"):
                return None
            raise translate(error, self.root) from None
        return self._unguarded()

    def finish(self, index: bytes | None, naming: Naming) -> None:
        """Put the new index in the place of the marker, or remove the marker where one file needs no index.

        Raises:
            CheckpointExistsError: If another save has taken over.
            StorageError: If the store does not answer.
        """
        if index is None:
            self.delete([naming.index])
            return
        try:
            self._put_or_find(naming.index, index, {"e_tag": self._tag} if self._tag else "overwrite")
        except failures() as error:
            if type(error).__name__ == "PreconditionError":
                raise CheckpointExistsError(
                    f"{self.root}: another save has taken over while this one published"
                ) from None
            raise translate(error, self.root) from None

    def put(self, name: str, data: bytes) -> str | None:
        """Write a small object; return its ETag.

        Raises:
            StorageError: If the store does not take it.
        """
        try:
            return self._put(name, data, "overwrite")
        except failures() as error:
            raise translate(error, f"{self.root}/{name}") from None

    def delete(self, names: list[str]) -> None:
        """Remove objects; those that are gone already are no error.

        Raises:
            StorageError: If the store does not answer or denies it.
        """
        from obstore import delete  # noqa: PLC0415 - an extra

        for name in names:
            try:
                delete(self.client, name)
            except FileNotFoundError:
                continue
            except failures() as error:
                raise translate(error, f"{self.root}/{name}") from None

    def holds(self, name: str, size: int, before: str) -> bool:
        """Return whether an object of this size is there that was not before: a completed upload whose answer was lost.

        Args:
            name: Of the object.
            size: In bytes.
            before: ETag of the object that was there when the save began; empty if there was none.
        """
        from obstore import head  # noqa: PLC0415 - an extra

        try:
            found = head(self.client, name)
        except failures():
            return False
        return found["size"] == size and bool(found["e_tag"]) and found["e_tag"] != before

    def _put_or_find(self, name: str, data: bytes, mode: PutMode) -> str | None:
        """Write a small object; return its ETag, also if only the answer was lost: repeated, the request is refused."""
        from obstore import get  # noqa: PLC0415 - an extra

        try:
            return self._put(name, data, mode)
        except failures():
            try:
                found = get(self.client, name)
                if bytes(found.bytes()) == data:
                    return found.meta["e_tag"]
            except failures():  # what the write met with is what matters
                pass
            raise

    def _put(self, name: str, data: bytes, mode: PutMode) -> str | None:
        from obstore import put  # noqa: PLC0415 - an extra

        return put(self.client, name, data, mode=mode, use_multipart=False)["e_tag"]

    def _unguarded(self) -> str:
        return (
            f"{self.root}: this store does not honour conditional writes: two saves to this path at the same time "
            "would not be kept apart"
        )


def check_marker(state: ObjectState, *, replace: bool) -> str | None:
    """Return a remark about an interrupted save that is going to be taken over.

    Raises:
        StorageError: If it may still be running.
    """
    if state.marker is None:
        return None
    if state.marker_age_s < STALE_S and not replace:
        raise StorageError(
            f"{state.path}: a save is publishing here, or was interrupted {state.marker_age_s:.0f} s ago "
            f"({state.marker}). "
            'If none is running, take over with on_existing="replace"'
        )
    return f"{state.path}: took over from a save that was interrupted ({state.marker})"


def _marker_in(index: bytes | None) -> str | None:
    if index is None or PUBLISHING.encode() not in index:
        return None
    try:
        content = json.loads(index)
    except ValueError:
        return None
    is_marker = isinstance(content, dict) and PUBLISHING in content and "weight_map" not in content
    return describe_marker(content[PUBLISHING]) if is_marker else None
