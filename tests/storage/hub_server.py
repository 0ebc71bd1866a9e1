"""A server that answers as the Hugging Face Hub does, and as the network that delivers its large files.

Of a small file the Hub sends the bytes; of a large one a redirect to another host, with a signed URL that expires,
and headers that tell the large file's size and ETag. Gated and private repositories want a token.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

TOKEN = "hf_test"  # noqa: S105 - of the test server alone
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """A Hub with one model, `org/model`, and a gated one, `org/gated`.

    Attributes:
        contents: Bytes by file name; safetensors files are large files.
        url: Of the Hub itself.
        network: Of the other host.
        expire_after: Answers after which a signed URL is refused; None for never.
        log: "HOST METHOD path" of every request.
        tokens: The Authorization header of every request to the other host.
    """

    contents: Mapping[str, bytes]
    url: str = ""
    network: str = ""
    expire_after: int | None = None
    log: list[str] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    signed: dict[str, int] = field(default_factory=dict)


@contextmanager
def hub_server(contents: Mapping[str, bytes]) -> Iterator[Hub]:
    """Run both hosts."""
    state = Hub(contents)

    class Site(_Site):
        hub = state

    class Network(_Network):
        hub = state

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), kind) for kind in (Site, Network)]
    state.url, state.network = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    for server in servers:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield state
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def send(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:  # noqa: ANN401 - its signature
        """Say nothing."""


class _Site(_Handler):
    """The Hub itself."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.hub.log.append(f"hub {self.command} {path}")
        if "/org/gated" in path and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.send(401, X_Error_Code="GatedRepo", X_Error_Message="Access to model org/gated is restricted.")
        elif match := re.fullmatch(r"/api/models/org/(?:model|gated)(?:/revision/(.+))?", path):
            self.describe(match[1])
        elif match := re.fullmatch(r"/org/(?:model|gated)/resolve/([^/]+)/(.+)", path):
            self.resolve(match[2])
        else:
            self.send(404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")

    do_HEAD = do_GET  # noqa: N815 - the base class looks for this

    def describe(self, revision: str | None) -> None:
        if revision not in (None, "main", COMMIT):
            self.send(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
            return
        files = [{"rfilename": name} for name in self.hub.contents]
        body = {"id": "org/model", "modelId": "org/model", "sha": COMMIT, "siblings": files, "private": False}
        self.send(200, json.dumps(body).encode(), Content_Type="application/json")

    def resolve(self, name: str) -> None:
        content = self.hub.contents.get(name)
        if content is None:
            self.send(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
            return
        tag = hashlib.sha256(content).hexdigest()
        if not name.endswith(".safetensors"):
            self.send(200, content, ETag=f'"{tag}"', X_Repo_Commit=COMMIT)
            return
        signature = f"{name}-{len(self.hub.signed)}"
        self.hub.signed[signature] = 0
        self.send(
            302,
            Location=f"{self.hub.network}/lfs/{tag}?file={name}&Signature={signature}",
            X_Linked_Size=str(len(content)),
            X_Linked_ETag=f'"{tag}"',
            X_Repo_Commit=COMMIT,
        )


class _Network(_Handler):
    """The host that delivers large files."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.hub.log.append(f"network {self.command} {url.path}")
        self.hub.tokens.append(self.headers.get("Authorization"))
        query = parse_qs(url.query)
        signature = query.get("Signature", [""])[0]
        used = self.hub.signed.get(signature)
        if used is None or (self.hub.expire_after is not None and used >= self.hub.expire_after):
            self.send(403, b"<Error>AccessDenied: Request has expired</Error>")
            return
        self.hub.signed[signature] += 1
        content = self.hub.contents[query["file"][0]]
        start, stop = 0, len(content)
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            start, stop = int(match[1]), min(int(match[2]) + 1, stop)
        self.send(206, content[start:stop], ETag='"network"', Content_Range=f"bytes {start}-{stop - 1}/{len(content)}")
