"""A bucket that answers as Google Cloud Storage's XML interface does: objects have versions, by which writes ask.

Only what a save asks for, in memory: https://cloud.google.com/storage/docs/xml-api/overview
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = "127.0.0.1"


class Kept(NamedTuple):
    """An object."""

    data: bytes
    version: int

    @property
    def headers(self) -> dict[str, str]:
        """What tells of it in every answer."""
        return {
            "ETag": f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"',
            "x-goog-generation": str(self.version),
            "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
        }


@dataclass
class GoogleBucket:
    """A bucket."""

    url: str
    name: str = "bucket"
    kept: dict[str, Kept] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    versions: count[int] = field(default_factory=lambda: count(1))

    def environment(self) -> dict[str, str]:
        """Return the variables that make obstore use it."""
        account = {"gcs_base_url": self.url, "disable_oauth": True}
        unused = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account | unused)}

    def keep(self, key: str, data: bytes) -> Kept:
        """Put an object."""
        self.kept[key] = Kept(data, next(self.versions))
        return self.kept[key]


@contextmanager
def google_server() -> Iterator[GoogleBucket]:
    """Serve a bucket from a thread of this process."""

    class Handler(_Handler):
        lock = threading.Lock()

    server = ThreadingHTTPServer((HOST, 0), Handler)
    server.daemon_threads = True
    Handler.bucket = GoogleBucket(f"http://{HOST}:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield Handler.bucket
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: GoogleBucket
    lock: threading.Lock

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path)
        key = unquote(parts.path).removeprefix(f"/{self.bucket.name}").removeprefix("/")
        asked = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        with self.lock:
            status, headers, content = self.carry_out(key, asked, body)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815 - the base class looks for these

    def carry_out(  # noqa: PLR0911 - a return for every request
        self, key: str, asked: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        bucket = self.bucket
        found = bucket.kept.get(key)
        wanted = self.headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != (found.version if found else 0):
            return 412, {}, b""
        if "uploads" in asked:
            token = secrets.token_hex(4)
            bucket.uploads[token] = {}
            return 200, {}, _xml("InitiateMultipartUploadResult", f"<UploadId>{token}</UploadId>")
        if self.command == "PUT" and "uploadId" in asked:
            bucket.uploads[asked["uploadId"]][int(asked["partNumber"])] = body
            return 200, {"ETag": '"part"'}, b""
        if self.command == "DELETE" and "uploadId" in asked:
            del bucket.uploads[asked["uploadId"]]
            return 204, {}, b""
        if "uploadId" in asked:
            sent = bucket.uploads.pop(asked["uploadId"])
            kept = bucket.keep(key, b"".join(sent[number] for number in sorted(sent)))
            tag = kept.headers["ETag"].replace('"', "&quot;")
            return 200, kept.headers, _xml("CompleteMultipartUploadResult", f"<ETag>{tag}</ETag>")
        if self.command == "PUT":
            return 200, bucket.keep(key, body).headers, b""
        if not key:
            listed = (_entry(name, kept) for name, kept in bucket.kept.items() if name.startswith(asked["prefix"]))
            return 200, {}, _xml("ListBucketResult", "".join(listed))
        if found is None:
            return 404, {}, b""
        if self.command == "DELETE":
            del bucket.kept[key]
            return 204, {}, b""
        return 200, found.headers, found.data

    def log_message(self, *_: object) -> None:
        pass


def _xml(name: str, content: str) -> bytes:
    return f"<?xml version='1.0'?><{name}>{content}</{name}>".encode()


def _entry(name: str, kept: Kept) -> str:
    tag = kept.headers["ETag"].replace('"', "&quot;")
    size, time = len(kept.data), "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    return f"<Contents><Key>{name}</Key><Size>{size}</Size>{time}<ETag>{tag}</ETag></Contents>"
