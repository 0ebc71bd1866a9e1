"""What a path that is a URL says, and how it may be shown: nothing secret reaches a message, a plan or a report."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from shardferry.errors import InvalidInputError

# Object stores, and what they are reached with; `file` and `hf` are handled elsewhere.
OBJECT_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "adl")
HTTP_SCHEMES = ("http", "https")
SCHEMES = ("file", "hf", *OBJECT_SCHEMES, *HTTP_SCHEMES)

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s'\"<>]+", re.IGNORECASE)
_ENDINGS = (".safetensors", ".json")


class Url(NamedTuple):
    """A URL taken apart.

    Attributes:
        folder: URL of the folder that file names are relative to, credentials and query included; no slash at its end.
        entry: Name of the file the URL names; None for a folder.
    """

    folder: str
    entry: str | None


def scheme_of(path: str) -> str | None:
    """Return the scheme of a URL in lower case, None for a path of the file system.

    Raises:
        InvalidInputError: If it has the form of a URL, but nothing is known of its scheme.

    Examples:
        >>> scheme_of("S3://bucket/key"), scheme_of("/ckpt"), scheme_of("org/name")
        ('s3', None, None)
    """
    match = _SCHEME.match(path)
    if match is None:
        return None
    scheme = match[1].lower()
    if scheme not in SCHEMES:
        raise InvalidInputError(
            f"{redact(path)}: checkpoints are not read from {scheme}://, but from a path or {', '.join(SCHEMES)}"
        )
    return scheme


def parse_url(url: str) -> Url:
    """Return the folder and the file of a URL; a last part that ends like a checkpoint's file is one.

    Raises:
        InvalidInputError: If it names no bucket or host.

    Examples:
        >>> parse_url("s3://bucket/llama/"), parse_url("http://host/a/model.safetensors?key=1")
        (Url(folder='s3://bucket/llama', entry=None), Url(folder='http://host/a?key=1', entry='model.safetensors'))
    """
    parts = urlsplit(url)
    if not parts.netloc:
        raise InvalidInputError(f"{redact(url)}: names no bucket or host, as in {parts.scheme}://name/folder")
    path, entry = parts.path.rstrip("/"), None
    if path.endswith(_ENDINGS):
        path, _, entry = path.rpartition("/")
    return Url(urlunsplit(parts._replace(path=path, fragment="")), unquote(entry) if entry else None)


def redact(url: str) -> str:
    """Return a URL without what may be secret: who asks, the query and the fragment.

    Examples:
        >>> redact("https://me:pw@host/a/b?X-Amz-Signature=1")
        'https://host/a/b'
    """
    if "://" not in url:
        return url
    scheme, _, rest = url.partition("://")
    rest = re.split(r"[?#]", rest, maxsplit=1)[0]
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def redact_all(text: str) -> str:
    """Return a text in which every URL is redacted.

    Examples:
        >>> redact_all("GET http://me:pw@host/a?sig=1 failed")
        'GET http://host/a failed'
    """
    return _URL.sub(lambda match: redact(match[0]), text)
