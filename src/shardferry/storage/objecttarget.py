"""The place in an object store that a save publishes to: what is there, and the few small requests that change it.

Nothing can be renamed there, but an object appears at once when its upload is completed, and a small write may ask that
the object is still the one that was seen. So the index is the lock: a save replaces it by a marker if nothing has
changed, completes its uploads, and replaces its own marker by the new index. Of two saves only one gets its marker in;
a reader in between sees the marker and no tensor, never a mix.

Completions and deletions cannot ask for anything, so a marker is a lease too. For `STALE_S`, by the store's clock, it
keeps all others out; its owner begins none of them later than `LEASE_S` after it was put, so that the last one has
ended when another save may take over. As long as none has, the owner may put a new marker and go on.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardferry.errors import CheckpointExistsError, InvalidInputError, StorageError
from shardferry.format.hubindex import parse_hub_index
from shardferry.format.oldfiles import is_checkpoint_file, old_files
from shardferry.format.savenames import (
    PUBLISHING,
    STALE_S,
    TOKEN_BYTES,
    describe_marker,
    marker_bytes,
    sibling_name,
)
from shardferry.storage.client import Patience, e_tag_of, failures, make_client, status_of, translate
from shardferry.storage.url import HTTP_SCHEMES, redact, scheme_of

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode, PutResult, UpdateVersion
    from obstore.store import ObjectStore as Client

    from shardferry.format.oldfiles import Content, Naming

# Completing a large upload may take a store a minute or two, in which it sends nothing.
WRITE_PATIENCE = Patience(stall_s=120.0, request_s=240.0, retry_s=240.0)
# obstore looks at `retry_s` before it pauses, and by default pauses for at most 15 s. So this is the longest a request
# takes: 240 s, a pause, and a last attempt of 240 s.
LONGEST_PAUSE_S = 15.0
REQUEST_S = WRITE_PATIENCE.retry_s + LONGEST_PAUSE_S + WRITE_PATIENCE.request_s
# A completion is two requests: the last parts, all at once, then the completion itself. One that begins within this has
# ended before the marker is stale: 210 s and 2 times 495 s are 1200 s. A marker is put, and a completion takes, in
# seconds; who needs longer puts a new one.
LEASE_S = STALE_S - 2 * REQUEST_S


@dataclass(frozen=True, slots=True)
class ObjectState:
    """What a save finds.

    Attributes:
        path: URL of the folder, without secrets.
        content: What is there.
        checkpoint_files: Names that mean there is a checkpoint.
        old_files: What a new checkpoint replaces; the index or single file first.
        etags: Of every object directly in the folder, and of those that the index names elsewhere.
        index: The index that is there, None if there is none.
        condition: Of a write that may only replace that index.
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
    condition: PutMode
    marker: str | None
    marker_age_s: float
    movable: bool = False


class ObjectTarget:
    """A folder of an object store, as the target of a save."""

    def __init__(self, url: str, naming: Naming, timeout_s: float) -> None:
        """Write below `url`; nothing is asked yet.

        Args:
            url: Of the folder.
            naming: How the checkpoint's files are called.
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
        self.is_claimed = False  # whether the marker stands in the place of the index
        self._naming = naming
        self._begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._condition: PutMode = "overwrite"  # of a write that may only replace the own marker

    @cached_property
    def client(self) -> Client:
        """Writes below the folder."""
        return make_client(self._url, self.patience, retries=True)

    def look(self) -> ObjectState:
        """Return what is there.

        Raises:
            StorageError: If the store does not answer or denies access.
        """
        from obstore import get, list_with_delimiter  # noqa: PLC0415 - an extra

        name, naming = self._naming.index, self._naming
        try:
            found = list_with_delimiter(self.client)
            etags = {each["path"]: e_tag_of(each) for each in found["objects"]}
            index, marker, age = None, None, 0.0
            condition: PutMode = "create"
            if name in etags:
                answer = get(self.client, name)
                condition = _unchanged(answer.meta)
                index = bytes(answer.bytes())
                marker = _marker_in(index)
                if marker is not None:
                    age = self._store_time() - answer.meta["last_modified"].timestamp()
            promised, _ = parse_hub_index(index, name) if index is not None and marker is None else (None, [])
            elsewhere = {file for file in promised.weight_map.values() if "/" in file} if promised else set()
            etags |= {file: tag for file in sorted(elsewhere) if (tag := self._tag_of(file)) is not None}
        except failures() as error:
            raise translate(error, self.root) from None
        standing = tuple(sorted(name for name in etags if is_checkpoint_file(name, naming)))
        old = old_files(etags, naming, promised.weight_map.values() if promised else ())
        content: Content = "checkpoint" if standing else "foreign" if etags or found["common_prefixes"] else "absent"
        return ObjectState(self.root, content, standing, old, etags, index, condition, marker, age)

    def claim(self, state: ObjectState) -> str | None:
        """Put a marker in the place of the index that was seen there.

        Returns:
            A remark if the store takes no conditions, so that two saves at the same time are not kept apart.

        Raises:
            CheckpointExistsError: If another save has been there since.
            StorageError: If the store does not answer.
        """
        marker = self._new_marker()
        try:
            self._condition = self._put_or_find(self._naming.index, marker, state.condition)
        except failures() as error:
            if _is_refusal(error):
                raise self._refusal() from None
            if not _is_unknown(error):
                raise translate(error, self.root) from None
            self.put(self._naming.index, marker)
            self.is_claimed = True
            return self._unguarded()
        self.is_claimed = True
        self._check_unchanged(state)
        try:
            self._condition = _unchanged(self._put(self._naming.index, marker, "create"))  # must fail: it is there
        except failures() as error:
            if _is_refusal(error):
                return None
            raise translate(error, self.root) from None
        return self._unguarded()

    def renew(self) -> None:
        """Put a new marker in the place of the own one.

        Raises:
            CheckpointExistsError: If another save has taken over.
            StorageError: If the store does not answer.
        """
        self._condition = self._replace_marker(self._new_marker())

    def finish(self, index: bytes | None) -> None:
        """Put an index in the place of the marker, or remove the marker where one file needs no index.

        Raises:
            CheckpointExistsError: If another save has taken over.
            StorageError: If the store does not answer.
        """
        if index is None:
            self.renew()  # nobody else takes over in the time that one request takes
            self._delete(self._naming.index)
        else:
            self._replace_marker(index)

    def put(self, name: str, data: bytes) -> None:
        """Write a small object.

        Raises:
            StorageError: If the store does not take it.
        """
        try:
            self._put(name, data, "overwrite")
        except failures() as error:
            raise translate(error, f"{self.root}/{name}") from None

    def delete(self, name: str, tag: str) -> None:
        """Remove an object if it still is what it was; one that is gone already is no error.

        Args:
            name: Of the object.
            tag: The ETag that it had. Of two equal objects it is the same.

        Raises:
            StorageError: If the store does not answer or denies it.
        """
        if self._tag_of(name) == tag:
            self._delete(name)

    def tag_if_completed(self, name: str, size: int, before: str) -> str:
        """Return the ETag of an upload that was completed, though the answer was lost; empty if it was not.

        Args:
            name: Of the object.
            size: In bytes.
            before: ETag of the object that was there when the save began; empty if there was none.
        """
        from obstore import head  # noqa: PLC0415 - an extra

        try:
            found = head(self.client, name)
        except failures():
            return ""
        tag = e_tag_of(found)
        return tag if found["size"] == size and tag != before else ""

    def _check_unchanged(self, state: ObjectState) -> None:
        """Check under the marker that no other save has come and gone: it may have left the index as it was, or none.

        Raises:
            CheckpointExistsError: If there are other files of a checkpoint than were seen.
            StorageError: If the store does not answer.
        """
        from obstore import list_with_delimiter  # noqa: PLC0415 - an extra

        try:
            there = {each["path"]: e_tag_of(each) for each in list_with_delimiter(self.client)["objects"]}
        except failures() as error:
            raise translate(error, self.root) from None
        before, now = (
            {name: tag for name, tag in tags.items() if is_checkpoint_file(name, self._naming)}
            for tags in (state.etags, there)
        )
        if before | {self._naming.index: ""} != now | {self._naming.index: ""}:
            raise self._refusal()

    def _refusal(self) -> CheckpointExistsError:
        return CheckpointExistsError(
            f"{self.root}: another save has published here, or is about to, since this one began. Nothing was changed "
            "by this one"
        )

    def _new_marker(self) -> bytes:
        """Return what no marker before it was, so that a save that has seen an older one cannot replace it."""
        return marker_bytes(secrets.token_hex(TOKEN_BYTES), socket.gethostname(), self._begun)

    def _replace_marker(self, data: bytes) -> PutMode:
        try:
            return self._put_or_find(self._naming.index, data, self._condition)
        except failures() as error:
            if _is_refusal(error):
                raise CheckpointExistsError(
                    f"{self.root}: another save has taken over while this one published, or the marker was removed. "
                    "What is there is the other's, if it has ended well; else save again"
                ) from None
            raise translate(error, self.root) from None

    def _store_time(self) -> float:
        """Return what time it is for the store, which times of objects are compared with: ours may be minutes off."""
        from obstore import head  # noqa: PLC0415 - an extra

        name = sibling_name(self._naming.index, secrets.token_hex(TOKEN_BYTES), "probe")
        self.put(name, b"")
        try:
            return head(self.client, name)["last_modified"].timestamp()
        finally:
            self._delete(name)

    def _tag_of(self, name: str) -> str | None:
        """Return the ETag of an object, None if it is gone."""
        from obstore import head  # noqa: PLC0415 - an extra

        try:
            return e_tag_of(head(self.client, name))
        except FileNotFoundError:
            return None
        except failures() as error:
            raise translate(error, f"{self.root}/{name}") from None

    def _delete(self, name: str) -> None:
        from obstore import delete  # noqa: PLC0415 - an extra

        try:
            delete(self.client, name)
        except FileNotFoundError:
            return
        except failures() as error:
            raise translate(error, f"{self.root}/{name}") from None

    def _put_or_find(self, name: str, data: bytes, mode: PutMode) -> PutMode:
        """Write a small object; return the condition that it is still this one.

        Also if only the answer was lost: repeated, the request is refused.
        """
        from obstore import get  # noqa: PLC0415 - an extra

        try:
            return _unchanged(self._put(name, data, mode))
        except failures():
            try:
                found = get(self.client, name)
                if bytes(found.bytes()) == data:
                    return _unchanged(found.meta)
            except failures():  # what the write met with is what matters
                pass
            raise

    def _put(self, name: str, data: bytes, mode: PutMode) -> PutResult:
        from obstore import put  # noqa: PLC0415 - an extra

        return put(self.client, name, data, mode=mode, use_multipart=False)

    def _unguarded(self) -> str:
        return (
            f"{self.root}: this store does not honour conditional writes: two saves to this path at the same time "
            "would not be kept apart"
        )


def check_marker(state: ObjectState, naming: Naming) -> str | None:
    """Return a remark about an interrupted save that is going to be taken over.

    Raises:
        StorageError: If it may still be running.
    """
    if state.marker is None:
        return None
    if state.marker_age_s < STALE_S:
        raise StorageError(
            f"{state.path}: a save is publishing here, or was interrupted {state.marker_age_s:.0f} s ago "
            f"({state.marker}). If none is running, save again in {STALE_S - state.marker_age_s:.0f} s, or remove "
            f"{state.path}/{naming.index} to go on at once"
        )
    return f"{state.path}: took over from a save that was interrupted ({state.marker})"


def _unchanged(found: ObjectMeta | PutResult) -> PutMode:
    """Return the condition that an object is still this one: of Google's its version says so, of others the ETag."""
    condition: UpdateVersion = {}
    if found["e_tag"] is not None:
        condition["e_tag"] = found["e_tag"]
    if found["version"] is not None:
        condition["version"] = found["version"]
    return condition or "overwrite"


def _is_refusal(error: Exception) -> bool:
    """Return whether a write was refused because the object is not what the write asked for; it may be gone."""
    return isinstance(error, FileNotFoundError) or type(error).__name__ in ("AlreadyExistsError", "PreconditionError")


def _is_unknown(error: Exception) -> bool:
    """Return whether the store, or obstore as it was told of the store, does not know conditions."""
    is_told = isinstance(error, NotImplementedError) or type(error).__name__ == "NotSupportedError"
    return is_told or status_of(error) == 501  # noqa: PLR2004 - HTTP


def _marker_in(index: bytes | None) -> str | None:
    if index is None or PUBLISHING.encode() not in index:
        return None
    try:
        content = json.loads(index)
    except ValueError:
        return None
    is_marker = isinstance(content, dict) and PUBLISHING in content and "weight_map" not in content
    return describe_marker(content[PUBLISHING]) if is_marker else None
