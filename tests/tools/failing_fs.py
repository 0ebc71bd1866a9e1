"""A FUSE filesystem that passes everything through to a folder, and fails where it is told, as a broken disk does.

A process of its own answers the kernel: one that used what it serves could wait for itself, holding the interpreter.
Writes go through as they are made, in pieces of a page, so a `write` that fails does so in the call itself. What a
filesystem may lack is lacking: symbolic links, attributes, reserving space.
"""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tests.tools import fuse_wire as wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

Operation = Literal["write", "fsync", "rename"]

NUM_THREADS = 8
READ_BYTES = 128 << 10
# A guess: many times what starting a process and mounting take.
LIMIT_S = 20
# linux/fs.h and fcntl.h
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class _Fault:
    """A request that is answered with EIO.

    Attributes:
        operation: Its kind.
        ending: How the path ends, the old one of a rename.
        byte: The byte that a write touches; None for any.
        waits: How many such requests are still let through before.
    """

    operation: Operation
    ending: str
    byte: int | None
    waits: int


class FailingMount:
    """A mounted folder."""

    def __init__(self, path: Path, server: Connection) -> None:
        """Take over the pipe to the process that serves the mount at `path`."""
        self.path = path
        self._server = server

    def fail(self, operation: Operation, ending: str, *, byte: int | None = None, number: int = 1) -> None:
        """Answer one request with EIO: the `number`-th of this kind, of a path that ends so, that touches `byte`."""
        self._ask(_Fault(operation, ending, byte, number - 1))

    def num_failed(self) -> int:
        """Return how many requests were answered with EIO."""
        return self._ask(None)

    def _ask(self, fault: _Fault | None) -> int:
        self._server.send(fault)
        assert self._server.poll(LIMIT_S), "the failing filesystem does not answer"
        num_failed: int = self._server.recv()
        return num_failed


class _Server:
    """What answers the kernel."""

    def __init__(self, root: str, point: str) -> None:
        self.faults: list[_Fault] = []
        self.num_failed = 0
        self._root = root
        self._paths = {wire.ROOT_NODE: ""}
        self._lock = threading.Lock()
        self._device = wire.mount(point, f",max_read={READ_BYTES}", read_only=False)
        for _ in range(NUM_THREADS):
            threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while (request := wire.receive(self._device)) is not None:
            if request.opcode in wire.SILENT:
                continue
            try:
                with self._lock:  # names and what lies behind them change together
                    body: bytes | int = self._answer_to(request)
            except OSError as error:
                body = error.errno or errno.EIO
            wire.answer(self._device, request, body)

    def _answer_to(self, request: wire.Request) -> bytes | int:
        answers: dict[int, Callable[[wire.Request], bytes | int]] = {
            wire.INIT: lambda asked: wire.settings_for(asked.body, in_flight=NUM_THREADS, max_read_bytes=READ_BYTES),
            wire.LOOKUP: lambda asked: self._entry(self._child(asked.node, wire.names_in(asked.body)[0])),
            wire.GETATTR: lambda asked: wire.attributes_of(asked.node, os.lstat(self._real(asked.node))),
            wire.SETATTR: self._set_attributes,
            wire.MKDIR: self._make_directory,
            wire.UNLINK: lambda asked: self._remove(os.unlink, asked),
            wire.RMDIR: lambda asked: self._remove(os.rmdir, asked),
            wire.RENAME: self._rename,
            wire.RENAME2: self._rename,
            wire.LINK: self._link,
            wire.CREATE: self._create,
            wire.OPEN: lambda asked: wire.opened(os.open(self._real(asked.node), _flags(asked.body)), cached=True),
            wire.READ: self._read,
            wire.WRITE: self._write,
            wire.FSYNC: self._sync,
            wire.RELEASE: lambda asked: _done(os.close, wire.handle_of(asked.body)),
            wire.OPENDIR: lambda _: wire.opened(0, cached=False),
            wire.READDIR: self._list,
            wire.STATFS: lambda _: wire.space_of(self._root),
            wire.RELEASEDIR: lambda _: b"",
            wire.FSYNCDIR: lambda _: b"",
            wire.FLUSH: lambda _: b"",
            wire.DESTROY: lambda _: b"",
        }
        answer = answers.get(request.opcode)
        return errno.ENOSYS if answer is None else answer(request)

    def _set_attributes(self, request: wire.Request) -> bytes:
        size, mode = wire.changes_of(request.body)
        if size is not None:
            os.truncate(self._real(request.node), size)
        if mode is not None:
            os.chmod(self._real(request.node), mode)  # noqa: PTH101 - paths are strings here
        return wire.attributes_of(request.node, os.lstat(self._real(request.node)))

    def _make_directory(self, request: wire.Request) -> bytes:
        path = self._child(request.node, wire.names_in(request.body, skip=8)[0])
        os.mkdir(self._root + path)  # noqa: PTH102
        return self._entry(path)

    def _create(self, request: wire.Request) -> bytes:
        path = self._child(request.node, wire.names_in(request.body, skip=16)[0])
        handle = os.open(self._root + path, _flags(request.body), 0o644)
        return self._entry(path) + wire.opened(handle, cached=True)

    def _link(self, request: wire.Request) -> bytes:
        path = self._child(request.node, wire.names_in(request.body, skip=8)[0])
        os.link(self._real(wire.handle_of(request.body)), self._root + path, follow_symlinks=False)
        return self._entry(path)

    def _rename(self, request: wire.Request) -> bytes:
        folder, flags, (old, new) = wire.rename_of(request)
        source, target = self._child(request.node, old), self._child(folder, new)
        self._may_fail("rename", source)
        code = _libc.renameat2(
            _AT_FDCWD, os.fsencode(self._root + source), _AT_FDCWD, os.fsencode(self._root + target), flags
        )
        if code:
            raise OSError(ctypes.get_errno(), "rename")
        if flags != _RENAME_EXCHANGE:
            self._forget(target)
        for node, path in self._paths.items():
            if _is_below(path, source):
                self._paths[node] = target + path[len(source) :]
            elif _is_below(path, target):
                self._paths[node] = source + path[len(target) :]
        return b""

    def _remove(self, change: Callable[[str], None], request: wire.Request) -> bytes:
        path = self._child(request.node, wire.names_in(request.body)[0])
        change(self._root + path)
        self._forget(path)
        return b""

    def _forget(self, path: str) -> None:
        """Let nodes of a path that is gone lead nowhere: what is made there later has nodes of its own."""
        for node, known in self._paths.items():
            if _is_below(known, path):
                self._paths[node] = f"{known} was removed"

    def _read(self, request: wire.Request) -> bytes:
        handle, offset, size = wire.read_of(request.body)
        return os.pread(handle, size, offset)

    def _write(self, request: wire.Request) -> bytes:
        handle, offset, data = wire.write_of(request.body)
        self._may_fail("write", self._paths[request.node], range(offset, offset + len(data)))
        return wire.written(os.pwrite(handle, data, offset))

    def _sync(self, request: wire.Request) -> bytes:
        self._may_fail("fsync", self._paths[request.node])
        return b""

    def _list(self, request: wire.Request) -> bytes:
        _, offset, size = wire.read_of(request.body)
        names = sorted(os.listdir(self._real(request.node)))  # noqa: PTH208
        return wire.entries_from([".", "..", *names], offset, size)

    def _may_fail(self, operation: Operation, path: str, touched: range = range(0)) -> None:
        for fault in self.faults:
            if fault.operation == operation and path.endswith(fault.ending) and fault.byte in {None, *touched}:
                fault.waits -= 1
                if fault.waits == -1:
                    self.num_failed += 1
                    raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _entry(self, path: str) -> bytes:
        """Return what the kernel is told of a path; each path it is told of has a node of its own."""
        status = os.lstat(self._root + path)
        node = next((node for node, known in self._paths.items() if known == path), 0) or max(self._paths) + 1
        self._paths[node] = path
        return wire.entry_of(node, status)

    def _child(self, node: int, name: str) -> str:
        return f"{self._paths[node]}/{name}"

    def _real(self, node: int) -> str:
        return self._root + self._paths[node]


@contextmanager
def failing_mount(root: Path, point: Path) -> Iterator[FailingMount]:
    """Show the folder `root` at `point` while the context lasts; both exist."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_until_closed, args=(theirs, str(root), str(point)), daemon=True)
    process.start()
    theirs.close()
    try:
        mounted = FailingMount(point, ours)
        mounted.num_failed()  # it is up
        yield mounted
    finally:
        ours.close()
        process.join(LIMIT_S)
        process.kill()
        process.close()


def _serve_until_closed(asked: Connection, root: str, point: str) -> None:
    """Mount, and do what is asked until nobody can ask any more. Runs in a process of its own."""
    server = _Server(root, point)
    try:
        while True:
            fault: _Fault | None = asked.recv()
            server.faults += [fault] if fault else []
            asked.send(server.num_failed)
    except EOFError:
        return
    finally:
        wire.unmount(point)


def _done(change: Callable[..., object], *arguments: object) -> bytes:
    change(*arguments)
    return b""


def _flags(body: bytes) -> int:
    """Return the flags of an OPEN or CREATE."""
    return int.from_bytes(body[:4], "little") | os.O_CLOEXEC


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
