"""Real servers on free loopback ports: nginx, S3 (moto) and Azure (Azurite); a proxy that counts requests, fails some.

Servers are children that end with their `with` block; the proxy is a thread of this process that speaks over sockets
like any other.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HOST = "127.0.0.1"
START_S = 60.0
SEND_BYTES = 256 << 10
TRICKLE_S = 0.1
HOW_TO_GET_NGINX = "nginx is not installed: apt-get install nginx-light"
HOW_TO_GET_AZURITE = "azurite is not installed: npm install --global azurite"

NGINX = """daemon off; master_process off; pid {home}/pid; error_log {home}/error warn;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; keepalive_requests 100000;
  client_body_temp_path {home}/tmp; proxy_temp_path {home}/tmp; fastcgi_temp_path {home}/tmp;
  uwsgi_temp_path {home}/tmp; scgi_temp_path {home}/tmp;
  server {{ listen {host}:{port}; root {root}; }}
}}
"""


def find_nginx() -> str | None:
    """Return the path of the program, None if it is not installed."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@contextmanager
def nginx(root: Path, home: Path) -> Iterator[str]:
    """Serve the files below `root`; give the URL.

    Args:
        root: What is served.
        home: An empty folder for the server's own files.
    """
    program = find_nginx()
    assert program is not None, HOW_TO_GET_NGINX
    port = free_port()
    (home / "conf").write_text(NGINX.format(home=home, host=HOST, port=port, root=root))
    with child([program, "-c", str(home / "conf"), "-p", str(home)], port, home / "out"):
        yield f"http://{HOST}:{port}"


@contextmanager
def s3_server(home: Path) -> Iterator[str]:
    """Run an S3 server that keeps its objects in memory; give its endpoint."""
    port = free_port()
    with child([sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)], port, home / "out"):
        yield f"http://{HOST}:{port}"


@contextmanager
def azure_server(home: Path) -> Iterator[str]:
    """Run an Azure blob server that keeps its objects in memory; give its endpoint."""
    program = shutil.which("azurite-blob")
    assert program is not None, HOW_TO_GET_AZURITE
    port = free_port()
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    with child([program, "--blobPort", str(port), *options], port, home / "out"):
        yield f"http://{HOST}:{port}"


@contextmanager
def child(command: list[str], port: int, log: Path) -> Iterator[None]:
    """Run a server until the block ends; it answers when the block begins."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        end = time.monotonic() + START_S
        while not _answers(port):
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}: {log.read_text()}"
            assert time.monotonic() < end, f"{command[0]} does not answer: {log.read_text()}"
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://{HOST}:{port}/", timeout=2).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@dataclass
class Fault:
    """What happens to some requests.

    Attributes:
        kind: `status` (the answer has only `code`), `lost` (the request is carried out, the answer is `code`), `reset`
            and `truncate` (the connection breaks in the middle of the body, by RST or a clean close), `length` (another
            size of the object is told), `etag` (another ETag), `drip` (one byte, then silence), `trickle` (a byte now
            and then), `stall` (no answer), `whole` and `unconditional` (the range, or the condition, is ignored).
        every: Which of the requests that match: every n-th, the n-th first.
        first: How many are spared before counting begins.
        times: How often at most.
        match: Requests are counted if this is found in "METHOD path".
        code: Status of an answer.
    """

    kind: str
    every: int = 1
    first: int = 0
    times: int = 10**9
    match: str = ""
    code: int = 503
    seen: int = 0
    done: int = 0


@dataclass
class Proxy:
    """What passes between clients and a server.

    Attributes:
        upstream: URL of the server.
        url: URL of the proxy.
        fault: What goes wrong now; None if nothing does.
        log: "METHOD path range" of every request.
        sent: Bytes of bodies that have been sent to clients.
        latency_s: Before each answer.
        rate: Bytes per second of all answers together; 0 is no limit.
        interludes: What is done before a request that matches, and how it is found; each once.
    """

    upstream: str
    url: str = ""
    fault: Fault | None = None
    log: list[str] = field(default_factory=list)
    sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    closing: threading.Event = field(default_factory=threading.Event)
    latency_s: float = 0.0
    rate: float = 0.0
    free_at: float = 0.0
    interludes: list[tuple[str, Callable[[], object]]] = field(default_factory=list)

    def wait(self, num_bytes: int) -> None:
        """Wait until so many bytes may pass, at `rate` bytes per second over all connections; 0 is no limit."""
        if self.rate:
            with self.lock:
                self.free_at = max(self.free_at, time.monotonic()) + num_bytes / self.rate
                left = self.free_at - time.monotonic()
            time.sleep(max(0.0, left))

    def reset(self) -> None:
        """Forget what has passed, and let everything pass."""
        self.log.clear()
        self.sent = 0
        self.fault = None

    def requests(self, method: str) -> int:
        """Return how many requests of this method have passed."""
        return sum(line.startswith(method + " ") for line in self.log)

    def before(self, match: str, work: Callable[[], object]) -> None:
        """Do something once, before the first request that matches is passed on; requests that it makes pass."""
        self.interludes.append((match, work))

    def due(self, line: str) -> Fault | None:
        """Count a request, and return what is to happen to it."""
        with self.lock:
            here = [each for each in self.interludes if re.search(each[0], line)]
            self.interludes = [each for each in self.interludes if each not in here]
        for _, work in here:
            work()
        with self.lock:
            self.log.append(line)
            fault = self.fault
            if fault is None or not re.search(fault.match, line):
                return None
            fault.seen += 1
            due = fault.seen > fault.first and (fault.seen - fault.first) % fault.every == 0
            if not due or fault.done >= fault.times:
                return None
            fault.done += 1
            return fault


@contextmanager
def proxy(upstream: str) -> Iterator[Proxy]:
    """Run a proxy in front of a server."""
    state = Proxy(upstream)

    class Handler(_Handler):
        proxy = state

    server = ThreadingHTTPServer((HOST, 0), Handler)
    server.daemon_threads = True
    state.url = f"http://{HOST}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


class _Handler(BaseHTTPRequestHandler):
    """Passes a request on, with a connection of its own, and the whole answer back."""

    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:  # the client has gone
            self.close_connection = True

    def pass_on(self) -> None:
        line = f"{self.command} {self.path} {self.headers.get('Range', '')}".rstrip()
        fault = self.proxy.due(line)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if fault is not None and fault.kind == "status":
            self.reply(fault.code, {}, b"")
            return
        if fault is not None and fault.kind == "stall":
            self.proxy.closing.wait(60)
            self.close_connection = True
            return
        if fault is not None and fault.kind == "whole":
            del self.headers["Range"]
            fault = None
        if fault is not None and fault.kind == "unconditional":
            for name in ("If-Match", "If-None-Match"):
                del self.headers[name]
            fault = None
        answer, headers, content = self.ask(body)
        if fault is not None and fault.kind == "lost":
            self.reply(fault.code, {}, b"")
        elif fault is None or not self.spoil(fault, answer.status, headers, content):
            self.reply(answer.status, headers, content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on  # noqa: N815 - the base class looks for these

    def ask(self, body: bytes) -> tuple[HTTPResponse, dict[str, str], bytes]:
        connection = HTTPConnection(urlsplit(self.proxy.upstream).netloc, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():  # the Host too: a signature covers it
                if name.lower() != "connection":
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            content = answer.read()
            dropped = {"transfer-encoding", "connection", "server", "date"}
            return answer, {k: v for k, v in answer.getheaders() if k.lower() not in dropped}, content
        finally:
            connection.close()

    def spoil(self, fault: Fault, status: int, headers: dict[str, str], content: bytes) -> bool:
        """Change the headers, or send something else; return whether anything has been sent."""
        if fault.kind == "etag":
            headers.update({name: '"other"' for name in headers if name.lower() == "etag"})
            return False
        if fault.kind == "length":
            for name in headers:
                if name.lower() == "content-range":
                    headers[name] = headers[name].rpartition("/")[0] + f"/{10**9}"
            return False
        self.head(status, headers, len(content))
        if fault.kind == "trickle":
            for byte in content:
                self.wfile.write(bytes([byte]))
                if self.proxy.closing.wait(TRICKLE_S):
                    break
            self.close_connection = True
            return True
        part = content[:1] if fault.kind == "drip" else content[: len(content) // 2]
        self.wfile.write(part)
        self.wfile.flush()
        if fault.kind == "drip":
            self.proxy.closing.wait(60)
        elif fault.kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        return True

    def reply(self, status: int, headers: dict[str, str], content: bytes) -> None:
        told = next((int(v) for k, v in headers.items() if k.lower() == "content-length"), len(content))
        self.head(status, headers, told if self.command == "HEAD" else len(content))
        if self.command != "HEAD":
            with self.proxy.lock:
                self.proxy.sent += len(content)
            time.sleep(self.proxy.latency_s)
            for at in range(0, len(content), SEND_BYTES):
                self.proxy.wait(len(content[at : at + SEND_BYTES]))
                self.wfile.write(content[at : at + SEND_BYTES])

    def head(self, status: int, headers: dict[str, str], length: int) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() != "content-length":
                self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *_: Any) -> None:  # noqa: ANN401 - its signature
        """Say nothing."""
