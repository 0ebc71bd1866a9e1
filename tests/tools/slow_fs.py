"""A read-only FUSE filesystem that is as slow as it is told, counts what is read, and fails where it is told.

    python -m tests.tools.slow_fs --latency-ms 5 --rate-mb 200 ROOT SOCKET MOUNT [MOUNT ...]

Shows the files below ROOT at every MOUNT. Each mount has its own page cache and its own counters, so two mounts are two
nodes; all of them share one bandwidth, as clients of one file server do. Every read request of the kernel takes the
latency, and its bytes take their turn in the bandwidth. Ends, and unmounts, when its standard input ends. `slow_mounts`
in mounts.py starts it; the requests that SOCKET answers are the methods there.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import socketserver
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from tests.tools import fuse_wire as wire

if TYPE_CHECKING:
    from collections.abc import Callable

# Requests a mount serves at once; the kernel is told the same.
IN_FLIGHT = 64
MAX_READ_BYTES = 1 << 20
# Bandwidth not used for so long is lost: a pause earns no burst.
BURST_S = 0.005


class Server:
    """What all mounts share: the files, the latency, the bandwidth, the faults."""

    def __init__(self, root: str, *, latency_s: float, rate: float, direct_io: bool) -> None:
        self.root = root
        self.latency_s = latency_s
        self.rate = rate  # bytes per second, 0 for no limit
        self.direct_io = direct_io
        self.bad: list[tuple[str, int, int]] = []
        self._busy_until = 0.0
        self._lock = threading.Lock()

    def pass_through(self, num_bytes: int) -> None:
        """Wait as long as these bytes take to come from the server."""
        start = time.monotonic()
        done = start
        if self.rate:
            with self._lock:
                self._busy_until = max(self._busy_until, start - BURST_S) + num_bytes / self.rate
                done = max(done, self._busy_until)
        time.sleep(max(0.0, done + self.latency_s - time.monotonic()))

    def is_bad(self, path: str, start: int, stop: int) -> bool:
        return any(path == name and start < until and stop > since for name, since, until in self.bad)


class Mount:
    """One mount: answers the kernel, and counts."""

    def __init__(self, server: Server, point: str) -> None:
        self.point = point
        self.counts: Counter[str] = Counter()
        self._server = server
        self._paths = {wire.ROOT_NODE: ""}
        self._nodes = {"": wire.ROOT_NODE}
        self._lock = threading.Lock()
        self._in_flight = 0
        self._device = wire.mount(point, f",max_read={MAX_READ_BYTES}")
        for _ in range(IN_FLIGHT):
            threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while (request := wire.receive(self._device)) is not None:
            if request.opcode in wire.SILENT:
                continue
            try:
                body: bytes | int = self._answer_to(request)
            except OSError as error:
                body = error.errno or errno.EIO
            wire.answer(self._device, request, body)

    def _answer_to(self, request: wire.Request) -> bytes | int:
        answers: dict[int, Callable[[wire.Request], bytes | int]] = {
            wire.INIT: lambda asked: wire.settings_for(asked.body, in_flight=IN_FLIGHT, max_read_bytes=MAX_READ_BYTES),
            wire.LOOKUP: self._look_up,
            wire.GETATTR: lambda asked: wire.attributes_of(asked.node, self._path(asked.node).stat()),
            wire.OPEN: self._open,
            wire.READ: self._read,
            wire.RELEASE: self._release,
            wire.OPENDIR: lambda _: wire.opened(0, cached=False),
            wire.READDIR: self._list,
            wire.STATFS: lambda _: wire.space_of(self._server.root),
            wire.RELEASEDIR: lambda _: b"",
            wire.FLUSH: lambda _: b"",
            wire.DESTROY: lambda _: b"",
        }
        answer = answers.get(request.opcode)
        return errno.ENOSYS if answer is None else answer(request)

    def _look_up(self, request: wire.Request) -> bytes | int:
        path = f"{self._paths[request.node]}/{request.body.rstrip(bytes(1)).decode()}"
        status = Path(self._server.root + path).stat()
        with self._lock:
            node = self._nodes.setdefault(path, len(self._nodes) + 1)
            self._paths[node] = path
        return wire.entry_of(node, status)

    def _open(self, request: wire.Request) -> bytes:
        handle = os.open(self._path(request.node), os.O_RDONLY | os.O_CLOEXEC)
        self._count(opens=1)
        return wire.opened(handle, cached=not self._server.direct_io)

    def _read(self, request: wire.Request) -> bytes | int:
        handle, offset, size = wire.read_of(request.body)
        path = self._paths[request.node]
        with self._lock:
            self._in_flight += 1
            self.counts["max_in_flight"] = max(self.counts["max_in_flight"], self._in_flight)
        try:
            data = os.pread(handle, size, offset)
            self._server.pass_through(len(data))
        finally:
            with self._lock:
                self._in_flight -= 1
        self._count(requests=1)
        if self._server.is_bad(path, offset, offset + size):
            self._count(faults=1)
            return errno.EIO
        self._count(read_bytes=len(data), **{f"read_bytes:{path[1:]}": len(data)})
        return data

    def _release(self, request: wire.Request) -> bytes:
        os.close(wire.handle_of(request.body))
        return b""

    def _list(self, request: wire.Request) -> bytes:
        _, offset, size = wire.read_of(request.body)
        return wire.entries_from(
            [".", "..", *sorted(path.name for path in self._path(request.node).iterdir())], offset, size
        )

    def _path(self, node: int) -> Path:
        return Path(self._server.root + self._paths[node])

    def _count(self, **counts: int) -> None:
        with self._lock:
            self.counts.update(counts)


def command(server: Server, mounts: list[Mount], asked: dict[str, object]) -> object:
    """Change what is asked for; return the counters of every mount."""
    match asked:
        case {"set": dict(values)}:
            server.latency_s = float(values.get("latency_ms", server.latency_s * 1e3)) / 1e3
            server.rate = float(values.get("rate_mb", server.rate / 1e6)) * 1e6
        case {"bad": [str(path), int(start), int(stop)]}:
            server.bad.append((path, start, stop))
        case {"mend": True}:
            server.bad.clear()
        case {"reset": True}:
            for mount in mounts:
                mount.counts.clear()
    return [dict(mount.counts) for mount in mounts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("socket")
    parser.add_argument("mounts", nargs="+")
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--rate-mb", type=float, default=0.0)
    parser.add_argument("--direct-io", action="store_true")
    arguments = parser.parse_args()
    server = Server(
        str(Path(arguments.root).resolve()),
        latency_s=arguments.latency_ms / 1e3,
        rate=arguments.rate_mb * 1e6,
        direct_io=arguments.direct_io,
    )
    mounts: list[Mount] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                answer = command(server, mounts, json.loads(line))
                self.wfile.write(json.dumps(answer).encode() + b"\n")

    try:
        mounts += [Mount(server, point) for point in arguments.mounts]
        with socketserver.ThreadingUnixStreamServer(arguments.socket, Handler) as control:
            control.daemon_threads = True
            threading.Thread(target=control.serve_forever, daemon=True).start()
            print("ready", flush=True)  # noqa: T201 - whoever started it waits for this
            sys.stdin.read()
    finally:
        for point in arguments.mounts:
            wire.unmount(point)


if __name__ == "__main__":
    main()
