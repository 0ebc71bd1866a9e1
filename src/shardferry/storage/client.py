"""Clients of object stores and web servers, made by obstore, and what their failures mean.

A client belongs to the process that made it: obstore's threads do not live on in a child made by `fork`, where a
request would wait for ever. So clients are made when they are first used, and a child is told.
"""

from __future__ import annotations

import os
import random
import re
import time
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardferry.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    InvalidInputError,
    ShardferryError,
    StorageError,
)
from shardferry.storage.url import HTTP_SCHEMES, redact_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from obstore import ObjectMeta, PutResult
    from obstore.store import ClientConfig, ObjectStore, RetryConfig


class AccessDeniedError(StorageError):
    """A store does not let this process read or write an object."""


class Patience(NamedTuple):
    """How long a store may take.

    Attributes:
        stall_s: After so long without a byte a request is given up and made again.
        request_s: The same after so long in all: it may be that bytes trickle.
        retry_s: Requests that fail for so long, and bring nothing, are an error; not less than `request_s`, as every
            request is made again once.
    """

    stall_s: float
    request_s: float
    retry_s: float

    def within(self, timeout_s: float) -> Patience:
        """Return what ends in an error within `timeout_s`: this, or the same in less time."""
        scale = min(1.0, timeout_s / (self.retry_s + self.request_s))  # the last request begins before `retry_s`
        return Patience(*(seconds * scale for seconds in self))


# Guesses: longer than any pause of a working store, shorter than anybody waits for a broken one.
PATIENCE = Patience(stall_s=20.0, request_s=60.0, retry_s=120.0)
# A checkpoint that is being opened may be a typing error: nobody waits long to be told. One stall is let pass.
OPEN_PATIENCE = PATIENCE._replace(request_s=30.0, retry_s=30.0)
# Pauses between attempts double up to the second (guesses, as most clients of object stores have them).
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
# A pause looks this often whether the work is to stop.
POLL_S = 0.1
# Answers after which the same request may succeed: too slow, too many requests, and the server's own failures.
TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
MAX_CAUSE_CHARACTERS = 300
# Of the environment variables that configure obstore.
ENVIRONMENT = ("AWS_", "AZURE_", "GOOGLE_")

_STATUS = re.compile(r"status code: (\d{3})")
_used_by: int | None = None


def make_client(
    url: str, patience: Patience, *, retries: bool, headers: Mapping[str, str] | None = None
) -> ObjectStore:
    """Return a client of the folder at a URL, configured by obstore's own environment variables.

    Args:
        url: As obstore takes it, credentials and query included.
        patience: How long to wait.
        retries: Whether obstore makes failed requests again; reading does that itself, to know of it.
        headers: Sent with every request to a web server.

    Raises:
        InvalidInputError: If obstore is not installed or refuses the configuration.
        StorageError: In a child of a process that has used a client.
    """
    check_process(url)
    settings = tuple(item for item in os.environ.items() if item[0].startswith(ENVIRONMENT))
    return _make_client(url, patience, retries, tuple((headers or {}).items()), settings)


def check_process(url: str) -> None:
    """Check that clients can be used in this process.

    Raises:
        StorageError: In a child of a process that has used one.
    """
    if _used_by not in (None, os.getpid()):
        raise StorageError(
            f"{redact_all(url)}: process {os.getpid()} was forked from {_used_by}, which has used object stores; its "
            "connections cannot be used here. Start processes with spawn or forkserver, or fork before the first use"
        )


# A checkpoint is opened, planned and read by parts that know its path only: they share the connections.
@lru_cache(maxsize=64)
def _make_client(
    url: str,
    patience: Patience,
    retries: bool,  # noqa: FBT001 - a cache's key
    headers: tuple[tuple[str, str], ...],
    _settings: tuple[tuple[str, str], ...],  # read by obstore itself; others ask for another client
) -> ObjectStore:
    global _used_by  # noqa: PLW0603 - obstore's threads are the process's too
    try:
        from obstore import store as stores  # noqa: PLC0415 - an extra, and slow to import
        from obstore.exceptions import BaseError  # noqa: PLC0415
    except ImportError as error:
        raise InvalidInputError(
            f"{redact_all(url)}: reading and writing URLs needs obstore: pip install 'shardferry[cloud]'"
        ) from error
    _used_by = os.getpid()
    client: ClientConfig = {
        "allow_http": not url.startswith("https://"),  # a store's own endpoints are https; http is what the user gave
        "connect_timeout": timedelta(seconds=min(patience.stall_s, 10)),
        "read_timeout": timedelta(seconds=patience.stall_s),
        "timeout": timedelta(seconds=patience.request_s),
    }
    retry: RetryConfig = {"max_retries": 10 if retries else 0, "retry_timeout": timedelta(seconds=patience.retry_s)}
    try:
        if url.startswith(tuple(f"{scheme}://" for scheme in HTTP_SCHEMES)):
            client["default_headers"] = dict(headers)
            return stores.HTTPStore.from_url(url, client_options=client, retry_config=retry)
        return stores.from_url(url, client_options=client, retry_config=retry)
    except (BaseError, ValueError) as error:
        raise InvalidInputError(f"{redact_all(url)} cannot be used: {cause_of(error)}") from None


def failures() -> tuple[type[Exception], ...]:
    """Return the classes of errors that a client raises."""
    try:
        from obstore.exceptions import BaseError  # noqa: PLC0415 - an extra
    except ImportError:  # whoever makes a client has been told, and that is what is on its way
        return ()
    return (BaseError, FileNotFoundError, PermissionError, ConnectionError, TimeoutError, NotImplementedError)


def status_of(error: Exception) -> int | None:
    """Return the HTTP status that an error of a client tells of, None if there was no answer."""
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def cause_of(error: Exception) -> str:
    """Return what an error of a client says, in one line and without secrets."""
    text = str(error).partition("\n\nDebug source")[0]
    return " ".join(redact_all(text).split())[:MAX_CAUSE_CHARACTERS]


def translate(error: Exception, where: str) -> Exception:
    """Return what an error of a client means to the user.

    Args:
        error: Raised by a client.
        where: URL of the object, redacted.
    """
    name, status = type(error).__name__, status_of(error)
    if isinstance(error, ShardferryError):
        return error
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return CheckpointNotFoundError(f"{where} is missing: no such object")
    if name == "PreconditionError" or status == 412:  # noqa: PLR2004 - HTTP
        return CheckpointChangedError(f"{where} has changed since it was opened. Load again, when nothing writes to it")
    if name in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403):
        return AccessDeniedError(
            f"{where}: access was denied ({status or name}). Check the credentials in the environment of this rank; for"
            " what everyone may read, say so, e.g. AWS_SKIP_SIGNATURE=true"
        )
    if name == "NotSupportedError" or "non-partial" in str(error).lower():
        return StorageError(f"{where}: the server does not answer requests for a part of a file (ranges)")
    return StorageError(f"{where}: {cause_of(error)}")


def e_tag_of(found: ObjectMeta | PutResult) -> str:
    """Return the ETag of an object in quotes, as HTTP has it: Azure lists it without. Empty if there is none."""
    tag = found["e_tag"] or ""
    return f'"{tag}"' if tag and not tag.endswith('"') else tag


class Trouble:
    """Decides about a request that fails: again after a pause, or an error."""

    def __init__(self, where: str, patience: Patience) -> None:
        """Watch over requests to `where`, as messages name it."""
        self._where = where
        self._patience = patience
        self._since, self._tries = time.monotonic(), 0

    def clear(self) -> None:
        """Forget failures: something has arrived."""
        self._since, self._tries = time.monotonic(), 0

    def wait(self, error: Exception, check: Callable[[], None]) -> None:
        """Pause before the next attempt.

        Args:
            error: What the client raised.
            check: Called now and then; may raise to stop.

        Raises:
            ShardferryError: If another attempt cannot help, or was in vain for too long.
        """
        status = status_of(error)
        # Answers of 4xx come as their own classes or with their status; no status at all is a broken connection.
        permanent = type(error).__name__ not in ("GenericError", "ConnectionError", "TimeoutError", "JoinError")
        if (permanent and status not in TRANSIENT) or (status is not None and status not in TRANSIENT):
            raise translate(error, self._where) from None
        now = time.monotonic()
        self._tries += 1
        if self._tries > 1 and now - self._since >= self._patience.retry_s:  # one failure may be chance
            raise StorageError(
                f"{self._where}: gave up after {self._tries} failed requests in {now - self._since:.0f} s, the last: "
                f"{cause_of(error)}"
            ) from None
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._tries - 1)) * random.uniform(0.5, 1)  # noqa: S311
        end = now + min(pause, self._since + self._patience.retry_s - now)
        while (left := end - time.monotonic()) > 0:
            check()
            time.sleep(min(POLL_S, left))
