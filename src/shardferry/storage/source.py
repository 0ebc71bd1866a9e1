"""Folders of object stores and web servers, asked for ranges of their objects: one request at a time, once.

What an answer says of the whole object comes with it, and its bytes arrive in chunks.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from shardferry.storage.client import failures, make_client, status_of
from shardferry.storage.url import redact
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from obstore import GetOptions
    from obstore.store import ObjectStore as Client

    from shardferry.storage.base import Bytes
    from shardferry.storage.client import Patience

# What a request in flight holds: 256 KiB to 1 MiB were the fastest of 0.25 to 8 (measured: nginx, 8 to 32 in flight).
CHUNK_BYTES = MIB
RANGE_NOT_SATISFIABLE = 416  # HTTP


class Pin(NamedTuple):
    """What identifies an object.

    Attributes:
        size: Bytes.
        version: ETag as the server gave it; empty if it gives none.
    """

    size: int
    version: str


class Answer(NamedTuple):
    """The beginning of an answer.

    Attributes:
        pin: What the server says of the whole object.
        start: Offset of the first byte that comes.
        chunks: The bytes; taking the next may raise an error of the client.
    """

    pin: Pin
    start: int
    chunks: Iterator[Bytes]


class Source(Protocol):
    """A folder of objects, asked with one request at a time and not again if that fails."""

    @property
    def root(self) -> str:
        """Its URL without secrets, as messages name it."""
        ...

    def names(self) -> tuple[str, ...]:
        """Return what lies directly in the folder."""
        ...

    def ask(self, name: str, start: int, stop: int, version: str) -> Answer:
        """Ask for bytes of an object: at most [start, stop), fewer if it ends before.

        Args:
            name: Relative to the folder.
            start: Offset in bytes.
            stop: Offset in bytes.
            version: What its ETag must be; empty for any.

        Raises:
            Exception: One of `failures()`.
        """
        ...


class ObjectSource:
    """A folder that obstore reads."""

    def __init__(self, url: str, patience: Patience) -> None:
        """Read below `url`; nothing is asked yet."""
        self.root = redact(url)
        self._url = url
        self._patience = patience

    @cached_property
    def client(self) -> Client:
        """The client, made by the process and at the time that first needs it."""
        return make_client(self._url, self._patience, retries=False)

    def names(self) -> tuple[str, ...]:
        """Return the names of objects and folders directly below the root."""
        from obstore import list_with_delimiter  # noqa: PLC0415 - an extra

        found = list_with_delimiter(self.client)
        return tuple(sorted([*found["common_prefixes"], *(each["path"] for each in found["objects"])]))

    def ask(self, name: str, start: int, stop: int, version: str) -> Answer:
        """Ask for a range, of this version if the server can compare it."""
        return ask_client(self.client, name, (start, stop), version)


class WebSource(ObjectSource):
    """A folder of a web server, which cannot be listed: names that may be there are tried."""

    def __init__(self, url: str, patience: Patience, likely: Sequence[str]) -> None:
        """Read below `url`; `likely` are the names to look for."""
        super().__init__(url, patience)
        self.likely = tuple(likely)


def ask_client(client: Client, name: str, span: tuple[int, int], version: str) -> Answer:
    """Ask a client for bytes [start, stop) of an object."""
    from obstore import get, head  # noqa: PLC0415 - an extra

    options: GetOptions = {"range": span}
    if version and not version.startswith("W/"):  # a weak ETag equals nothing
        options["if_match"] = version
    try:
        result = get(client, name, options=options)
    except failures() as error:
        refused = status_of(error) == RANGE_NOT_SATISFIABLE or type(error).__name__ == "NotSupportedError"
        if span[0] or not refused or (meta := head(client, name))["size"]:
            raise
        return Answer(Pin(0, meta["e_tag"] or ""), 0, iter(()))  # an empty object has no first byte to ask for
    meta = result.meta
    chunks = (np.frombuffer(memoryview(chunk), np.uint8) for chunk in result.stream(min_chunk_size=CHUNK_BYTES))
    return Answer(Pin(meta["size"], meta["e_tag"] or ""), result.range[0], chunks)
