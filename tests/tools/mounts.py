"""Slow, counting mounts of a folder, for tests and benchmarks: `slow_mounts` starts slow_fs.py and ends it again."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.tools import fuse_wire

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[2]
# What a network client reads ahead; FUSE's own default is 128 KiB.
READ_AHEAD_KIB = 1024


class SlowMounts(NamedTuple):
    """Mounts of one folder by one slow server; picklable, so that other processes can ask too.

    Attributes:
        paths: The mount points, one per "node": each has its own page cache and its own counters.
        socket: Where the server answers.
    """

    paths: tuple[Path, ...]
    socket: Path

    def counts(self, node: int = 0) -> dict[str, int]:
        """Return what came from the server since the last reset.

        Keys: requests, read_bytes, `read_bytes:FILE` of each file, opens, max_in_flight, faults.
        """
        return {"requests": 0, "read_bytes": 0, "opens": 0, "faults": 0} | self._ask({})[node]

    def reset(self) -> None:
        """Set all counters to zero."""
        self._ask({"reset": True})

    def set(self, *, latency_ms: float | None = None, rate_mb: float | None = None) -> None:
        """Change the latency of each request, or the bandwidth shared by all (0: no limit)."""
        given = {"latency_ms": latency_ms, "rate_mb": rate_mb}
        self._ask({"set": {name: value for name, value in given.items() if value is not None}})

    def break_bytes(self, name: str, start: int, stop: int) -> None:
        """Answer EIO to every request that touches bytes [start, stop) of the file, until `mend`."""
        self._ask({"bad": [f"/{name}", start, stop]})

    def mend(self) -> None:
        """Fail no more."""
        self._ask({"mend": True})

    def drop(self, name: str, node: int = 0) -> None:
        """Take one file out of the page cache of one mount."""
        descriptor = os.open(self.paths[node] / name, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)

    def _ask(self, question: dict[str, object]) -> list[dict[str, int]]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(str(self.socket))
            connection.sendall(json.dumps(question).encode() + b"\n")
            answer: list[dict[str, int]] = json.loads(connection.makefile().readline())
            return answer


# What the fixture `make_mounts` gives: `slow_mounts`.
MakeMounts = Callable[..., AbstractContextManager[SlowMounts]]


@contextmanager
def slow_mounts(
    root: Path, *, nodes: int = 1, latency_ms: float = 0, rate_mb: float = 0, direct_io: bool = False
) -> Iterator[SlowMounts]:
    """Show the folder `root` at new mount points, read-only and slowly; see slow_fs.py.

    Args:
        root: The folder; files that are added later show too.
        nodes: Mounts to make, which share no page cache but one bandwidth.
        latency_ms: What every read request takes beside its bytes.
        rate_mb: Million bytes per second over all mounts; 0 for no limit.
        direct_io: Without a page cache: every read goes to the server.
    """
    with tempfile.TemporaryDirectory(prefix="slow_fs-") as folder:
        paths = tuple(Path(folder) / f"node{number}" for number in range(nodes))
        for path in paths:
            path.mkdir()
        answers = Path(folder) / "socket"
        options = [f"--latency-ms={latency_ms}", f"--rate-mb={rate_mb}", *["--direct-io"] * direct_io]
        words = [sys.executable, "-m", "tests.tools.slow_fs", *options, str(root), str(answers), *map(str, paths)]
        with subprocess.Popen(words, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            try:
                assert server.stdout is not None
                assert server.stdout.readline() == b"ready\n", "slow_fs did not start"
                for path in paths:
                    _read_ahead(path)
                yield SlowMounts(paths, answers)
            finally:
                server.communicate(timeout=20)  # the end of its input ends it


def why_no_mounts() -> str | None:
    """Return why this machine cannot mount, in one line; None if it can."""
    with tempfile.TemporaryDirectory() as point:
        try:
            device = fuse_wire.mount(point, "")
        except OSError as error:
            return f"slow mounts need root and /dev/fuse: {error}"
        fuse_wire.unmount(point)
        os.close(device)
    return None


def _read_ahead(path: Path) -> None:
    device = path.stat().st_dev
    with suppress(PermissionError, FileNotFoundError):  # fewer bytes ahead, in a container
        setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
        setting.write_text(str(READ_AHEAD_KIB), encoding="ascii")
