"""A web server of one folder that is as slow as it is told: a latency per request, one bandwidth for all of them.

    python -m tests.tools.slow_http --latency-ms 20 --rate-mb 200 ROOT

Answers GET and HEAD, with or without one range. Prints its URL when it is ready, and ends when its standard input does;
`slow_web` starts it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[2]
CHUNK_BYTES = 128 << 10
# Bandwidth not used for so long is lost: a pause earns no burst.
BURST_S = 0.005


class Line:
    """One bandwidth, in bytes per second, which all answers share."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._busy_until = 0.0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._busy_until = done = max(self._busy_until, now - BURST_S) + num_bytes / self._rate
        time.sleep(max(0.0, done - now))


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, *words: object, root: Path, latency_s: float, line: Line) -> None:
        self.root, self.latency_s, self.line = root, latency_s, line
        super().__init__(*words)  # type: ignore[arg-type]  # socketserver passes its three along

    def do_GET(self) -> None:
        time.sleep(self.latency_s)
        file = self.root / self.path.lstrip("/")
        if not file.is_file():
            self.send_error(404)
            return
        size = file.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(asked[1]), min(int(asked[2]) + 1, size)) if asked else (0, size)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", f'"{size}"')
        self.send_header("Last-Modified", self.date_time_string(0))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        if self.command == "GET":
            self._send(file, start, stop)

    do_HEAD = do_GET  # noqa: N815 - as above

    def _send(self, file: Path, start: int, stop: int) -> None:
        with file.open("rb") as stream:
            for at in range(start, stop, CHUNK_BYTES):
                chunk = os.pread(stream.fileno(), min(CHUNK_BYTES, stop - at), at)
                self.line.take(len(chunk))
                self.wfile.write(chunk)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def slow_web(root: Path, *, latency_ms: float, rate_mb: float) -> Iterator[str]:
    """Serve the files of `root`, and give the URL.

    Args:
        root: The folder.
        latency_ms: What every request takes beside its bytes.
        rate_mb: Million bytes per second over all requests.
    """
    options = [f"--latency-ms={latency_ms}", f"--rate-mb={rate_mb}"]
    words = [sys.executable, "-m", "tests.tools.slow_http", *options, str(root)]
    with subprocess.Popen(words, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().decode().strip()
        finally:
            server.communicate(timeout=20)  # the end of its input ends it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--latency-ms", type=float, required=True)
    parser.add_argument("--rate-mb", type=float, required=True)
    arguments = parser.parse_args()
    line = Line(arguments.rate_mb * 1e6)
    handler = partial(Handler, root=arguments.root, latency_s=arguments.latency_ms / 1e3, line=line)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"http://127.0.0.1:{server.server_port}", flush=True)  # noqa: T201 - whoever started it waits for this
        sys.stdin.read()


if __name__ == "__main__":
    main()
