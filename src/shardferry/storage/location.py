"""What is behind the path of a checkpoint: a folder of this machine, an object store, a web server or the Hub."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote, urlsplit

from shardferry.errors import CheckpointNotFoundError, InvalidInputError, StorageError
from shardferry.format.fileset import likely_names
from shardferry.storage.files import LocalFiles
from shardferry.storage.hubpath import HubPath, cached_snapshot, is_offline, parse_hub_path
from shardferry.storage.url import HTTP_SCHEMES, parse_url, redact, scheme_of

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from shardferry.format.files import Files
    from shardferry.format.index import FileInfo
    from shardferry.storage.base import Store
    from shardferry.storage.source import Source

# URLs with their credentials by what is shown of them: an index knows its root as it is shown.
_whole: dict[str, str] = {}
MAX_REMEMBERED = 1000


class OpenStore(Protocol):
    """Makes what reads tensors."""

    def __call__(self, files: Mapping[str, FileInfo], wanted_whole: Container[str] = ..., /) -> Store:
        """Return it.

        Args:
            files: What the job has agreed to read.
            wanted_whole: Names of files of which this machine's ranks together want every byte.
        """
        ...


@dataclass(frozen=True, slots=True)
class Location:
    """Where a checkpoint is.

    Attributes:
        root: What file names are relative to, as messages name it: a path, or a URL without secrets.
        entry: The file that the path names; None for a folder.
        files: Reads headers and indexes.
        open_store: Makes what reads tensors.
        is_local: Whether it is a path of the file system, network mounts among them.
    """

    root: str
    entry: str | None
    files: Files
    open_store: OpenStore
    is_local: bool


def locate(path: str | os.PathLike[str], variant: str | None = None, *, timeout_s: float = math.inf) -> Location:
    """Return what is behind a path or URL. Nothing is read from it yet, and no connection is made.

    Args:
        path: A path, `file://`, `s3://`, `gs://`, `az://`, `http(s)://`, `hf://org/name[@revision]`, or a bare
            `org/name` that is no path here but in the local Hugging Face cache, or else on the Hub.
        variant: Variant of the file names to look for where nothing can be listed.
        timeout_s: Within this a server that does not answer is an error; two or three minutes are the most.

    Raises:
        InvalidInputError: If it is a URL of an unknown scheme or without a host, or a package is missing.
        CheckpointNotFoundError: If `hf://` names a repository that is not in the cache, and the Hub may not be asked.
        StorageError: If a path cannot be looked at.
    """
    text = os.fspath(path)
    scheme = scheme_of(text)
    if scheme is None:
        hub = parse_hub_path(text)
        if hub is not None and not os.path.lexists(text):
            return _locate_hub(hub, timeout_s) if cached_snapshot(hub) or not is_offline() else _locate_local(text)
        return _locate_local(text)
    if scheme == "file":
        return _locate_local(_path_of(text))
    if scheme == "hf":
        hub = parse_hub_path(text)
        if hub is None:
            raise InvalidInputError(f"{text} must be hf://org/name, hf://org/name@revision, or a file of one")
        return _locate_hub(hub, timeout_s)
    from shardferry.storage.client import PATIENCE  # noqa: PLC0415 - as in `_local_store`
    from shardferry.storage.source import ObjectSource, WebSource  # noqa: PLC0415

    url = parse_url(_whole.get(text, text))
    if len(_whole) < MAX_REMEMBERED:
        _whole.setdefault(redact(url.folder), url.folder)
    patience = PATIENCE.within(timeout_s)
    if scheme in HTTP_SCHEMES:
        return _remote(WebSource(url.folder, patience, likely_names(variant)), url.entry, timeout_s)
    return _remote(ObjectSource(url.folder, patience), url.entry, timeout_s)


def locate_again(path: str | os.PathLike[str], root: str, *, timeout_s: float) -> Location:
    """Return what is behind the path of a checkpoint that another rank has opened.

    Args:
        path: What both ranks were given; it may be local here and not there.
        root: Root of the index that the other rank made; on the Hub it names the commit, where a branch may move.
        timeout_s: As for `locate`.

    Raises:
        ShardferryError: As `locate`.
    """
    where = locate(path, timeout_s=timeout_s)
    here, there = parse_hub_path(where.root), parse_hub_path(root)
    if where.is_local or here is None or there is None or here.repo != there.repo:
        return where
    return locate(root, timeout_s=timeout_s)


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL of something that is not on this machine's file systems.

    Raises:
        InvalidInputError: If it is a URL of an unknown scheme.
    """
    return scheme_of(os.fspath(path)) not in (None, "file")


def local_path(path: str | os.PathLike[str]) -> str:
    """Return the path that a path or a `file://` URL names.

    Raises:
        InvalidInputError: If it is another URL.
    """
    text = os.fspath(path)
    scheme = scheme_of(text)
    if scheme is None:
        return text
    if scheme != "file":
        raise InvalidInputError(f"{redact(text)} is not on a file system of this machine, as is needed here")
    return _path_of(text)


def _path_of(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise InvalidInputError(f"{url} names a file of host {parts.netloc}: only files of this machine can be opened")
    return unquote(parts.path)


def _locate_local(path: str) -> Location:
    where = Path(path).absolute()  # not resolved: the name of a link counts, not the name of its target
    try:
        is_folder = where.is_dir()
    except OSError as error:  # no permission on the way, a name too long
        raise StorageError(f"{where} cannot be looked at: {error.strerror}") from error
    root = str(where if is_folder else where.parent)
    return Location(
        root, None if is_folder else where.name, LocalFiles(root), partial(_local_store, root), is_local=True
    )


def _local_store(root: str, _: Mapping[str, FileInfo], wanted_whole: Container[str] = ()) -> Store:
    from shardferry.storage.local import LocalStore  # noqa: PLC0415 - who only opens a checkpoint needs no NumPy

    return LocalStore(root, wanted_whole)


def _locate_hub(hub: HubPath, timeout_s: float) -> Location:
    snapshot = cached_snapshot(hub)
    if snapshot is not None:
        return _locate_local(f"{snapshot}/{hub.entry}" if hub.entry else snapshot)
    if is_offline():
        raise CheckpointNotFoundError(
            f"hf://{hub.repo} is not in the local Hugging Face cache, and the Hub may not be asked: HF_HUB_OFFLINE is "
            "set, or huggingface_hub is not installed (pip install 'shardferry[cloud]')"
        )
    from shardferry.storage.client import PATIENCE  # noqa: PLC0415 - as in `_local_store`
    from shardferry.storage.hub import HubSource  # noqa: PLC0415

    return _remote(HubSource(hub, PATIENCE.within(timeout_s)), hub.entry, timeout_s)


def _remote(source: Source, entry: str | None, timeout_s: float) -> Location:
    from shardferry.storage.client import OPEN_PATIENCE, PATIENCE  # noqa: PLC0415 - as in `_local_store`
    from shardferry.storage.object import ObjectFiles, ObjectStore  # noqa: PLC0415

    return Location(
        root=source.root,
        entry=entry,
        files=ObjectFiles(source, OPEN_PATIENCE.within(timeout_s)),
        open_store=lambda files, _=(): ObjectStore(source, files, PATIENCE.within(timeout_s)),
        is_local=False,
    )
