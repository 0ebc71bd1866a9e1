"""Repositories of the Hugging Face Hub, read by ranges over HTTP.

The Hub answers for a file with where its bytes are: itself, or a content delivery network with a signed URL that
expires. That is asked once per file, then ranges are read from there; a URL that has expired is asked for again. A
revision is turned into its commit at once, so that a push to the branch changes nothing. Tokens and endpoint are those
of `huggingface_hub`.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from shardferry.errors import CheckpointChangedError, CheckpointNotFoundError, InvalidInputError
from shardferry.storage.client import TRANSIENT, AccessDeniedError, failures, make_client, status_of
from shardferry.storage.source import Answer, Pin, ask_client
from shardferry.storage.url import redact_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from obstore.store import ObjectStore as Client

    from shardferry.storage.client import Patience
    from shardferry.storage.hubpath import HubPath

_COMMIT = re.compile(r"[0-9a-f]{40}")


class _Place(NamedTuple):
    """Where the bytes of a file are.

    Attributes:
        client: Reads there.
        name: What the client calls it.
        pin: Size and ETag as the Hub tells them, the same on every rank.
    """

    client: Client
    name: str
    pin: Pin


class HubSource:
    """The files of a repository at one commit."""

    def __init__(self, hub: HubPath, patience: Patience) -> None:
        """Read `hub`; nothing is asked yet.

        Raises:
            InvalidInputError: If `huggingface_hub` is not installed.
        """
        try:
            import huggingface_hub  # noqa: F401, PLC0415 - an extra, and slow to import
        except ImportError as error:
            raise InvalidInputError(
                f"hf://{hub.repo}: reading from the Hub needs huggingface_hub: pip install 'shardferry[cloud]'"
            ) from error
        self._hub = hub
        self._patience = patience
        self._lock = threading.Lock()
        self._commit: str | None = None
        self._files: tuple[str, ...] = ()
        self._places: dict[str, _Place] = {}
        self._resolving: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    @property
    def root(self) -> str:
        """The repository, with its commit once that is known."""
        revision = self._commit or self._hub.revision
        return f"hf://{self._hub.repo}" + (f"@{revision}" if revision else "")

    def names(self) -> tuple[str, ...]:
        """Return the files at the top of the repository."""
        self._describe()
        return tuple(sorted({name.partition("/")[0] for name in self._files}))

    def ask(self, name: str, start: int, stop: int, version: str) -> Answer:
        """Ask for a range of a file, where the Hub says that it is."""
        known = name in self._places
        place = self._place(name)
        try:
            return self._ask(place, name, (start, stop), version)
        except failures() as error:
            if not known or status_of(error) not in (400, 401, 403, 410):
                raise
        with self._resolving[name]:
            if self._places.get(name) is place:
                del self._places[name]  # its URL has expired
        return self._ask(self._place(name), name, (start, stop), version)

    def _ask(self, place: _Place, name: str, span: tuple[int, int], version: str) -> Answer:
        if version and place.pin.version and version != place.pin.version:
            raise CheckpointChangedError(
                f"{self.root}/{name} has ETag {place.pin.version} here, {version} where the checkpoint was opened: the "
                "branch was pushed to meanwhile. Name a commit: hf://org/name@commit"
            )
        if name.endswith(".json"):  # small, and not every server sends parts of what is no large file
            return self._ask_whole(place, span)
        answer = ask_client(place.client, place.name, span, "")
        return answer._replace(pin=Pin(answer.pin.size, place.pin.version))

    def _ask_whole(self, place: _Place, span: tuple[int, int]) -> Answer:
        from obstore import get  # noqa: PLC0415 - an extra

        data = np.frombuffer(memoryview(get(place.client, place.name).bytes()), np.uint8)
        return Answer(Pin(len(data), place.pin.version), span[0], iter([data[slice(*span)]]))

    def _pin_commit(self) -> str:
        if self._hub.revision and _COMMIT.fullmatch(self._hub.revision):
            self._commit = self._hub.revision  # nothing to ask: with many ranks the Hub would refuse to answer
            return self._commit
        self._describe()
        assert self._commit is not None
        return self._commit

    def _describe(self) -> None:
        """Ask for the commit and the files of the revision, once."""
        with self._lock:
            if not self._files:
                from huggingface_hub import HfApi  # noqa: PLC0415 - an extra

                with _understood(f"hf://{self._hub.repo}"):
                    info = HfApi().model_info(
                        self._hub.repo, revision=self._hub.revision, timeout=self._patience.stall_s
                    )
                self._commit = info.sha or self._hub.revision or "main"
                self._files = tuple(each.rfilename for each in info.siblings or ())

    def _place(self, name: str) -> _Place:
        commit = self._pin_commit()
        with self._resolving[name]:  # many threads want the same file at the same time
            if name not in self._places:
                self._places[name] = self._locate(name, commit)
            return self._places[name]

    def _locate(self, name: str, commit: str) -> _Place:
        from huggingface_hub import get_hf_file_metadata, get_token, hf_hub_url  # noqa: PLC0415 - an extra

        where = f"{self.root}/{name}"
        url = hf_hub_url(self._hub.repo, name, revision=commit)
        token = get_token()
        with _understood(where):
            found = get_hf_file_metadata(url, token=token or False, timeout=self._patience.stall_s)
        place = urlsplit(found.location)
        folder, _, last = place.path.rpartition("/")
        # The token is for the Hub alone: a signed URL of another host needs none, and some refuse it.
        own = token and place.netloc == urlsplit(url).netloc
        client = make_client(
            urlunsplit(place._replace(path=folder)),
            self._patience,
            retries=False,
            headers={"authorization": f"Bearer {token}"} if own else None,
        )
        return _Place(client, last, Pin(found.size or 0, found.etag or ""))


@contextmanager
def _understood(where: str) -> Iterator[None]:
    """Turn what `huggingface_hub` raises into our errors; what may pass becomes one that is tried again.

    Raises:
        CheckpointNotFoundError: If there is no such repository, revision or file, or offline.
        AccessDeniedError: If the repository is gated or private.
        ConnectionError: If the Hub does not answer now.
    """
    from huggingface_hub import errors  # noqa: PLC0415 - an extra

    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise CheckpointNotFoundError(
            f"{where} is not in the local cache, and HF_HUB_OFFLINE forbids to ask the Hub"
        ) from error
    except errors.GatedRepoError as error:
        raise AccessDeniedError(
            f"{where} is gated: ask for access on its page, then log in (hf auth login, or HF_TOKEN)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{where}: there is no such model on the Hub, or it is private and no token for it was given (HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointNotFoundError(f"{where}: the model has no such branch, tag or commit") from error
    except errors.EntryNotFoundError as error:
        raise CheckpointNotFoundError(f"{where} is missing: no such file in the repository") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise AccessDeniedError(f"{where}: the Hub denied access ({status}): check HF_TOKEN") from error
        if status not in TRANSIENT:
            raise CheckpointNotFoundError(f"{where}: the Hub answered {status}: {_brief(error)}") from error
        raise ConnectionError(f"{where}: the Hub answered status code: {status}") from error
    except errors.HTTPError as error:  # type: ignore[attr-defined] # of whichever HTTP library it uses
        raise ConnectionError(f"{where}: {_brief(error)}") from error


def _brief(error: Exception) -> str:
    return redact_all(str(error).partition("\n")[0])
