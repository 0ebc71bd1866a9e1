"""The part of the FUSE kernel protocol that filesystems of ordinary files need, and nothing of libfuse.

Layouts are those of <linux/fuse.h> 7.31; numbers are little or big endian as the machine has them. Mounting is
mount(2) itself, which needs CAP_SYS_ADMIN.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH, INIT = 1, 2, 3, 14, 15, 17, 18, 25, 26
OPENDIR, READDIR, RELEASEDIR, INTERRUPT, DESTROY, BATCH_FORGET = 27, 28, 29, 36, 38, 42
SETATTR, MKDIR, UNLINK, RMDIR, RENAME, LINK, WRITE, FSYNC, FSYNCDIR, CREATE, RENAME2 = (
    4,
    9,
    10,
    11,
    12,
    13,
    16,
    20,
    30,
    35,
    45,
)
# Requests that are never answered.
SILENT = frozenset({FORGET, INTERRUPT, BATCH_FORGET})
ROOT_NODE = 1

# Above the smallest buffer that the kernel accepts, with room for a write of _MAX_WRITE bytes.
REQUEST_BYTES = 16 << 10
_MAX_WRITE = 4096
_IN_HEADER = struct.Struct("=IIQQIIIHH")
_OUT_HEADER = struct.Struct("=IiQ")
_ATTRIBUTES = struct.Struct("=6Q10I")
_ENTRY = struct.Struct("=4QII")
_ATTRIBUTES_OUT = struct.Struct("=QII")
_OPEN_OUT = struct.Struct("=QII")
_READ_IN = struct.Struct("=QQI")
_INIT_IN = struct.Struct("=4I")
_INIT_OUT = struct.Struct("=4I2H2I2H8I")
_STATFS_OUT = struct.Struct("=5Q4I24x")
_WRITE_IN = struct.Struct("=QQIIQII")
_WRITE_OUT = struct.Struct("=II")
_SETATTR_IN = struct.Struct("=IIQQQQQQIIIIIIII")
_SET_MODE, _SET_SIZE = 1 << 0, 1 << 3
_RENAME2_IN = struct.Struct("=QII")
_DIRENT = struct.Struct("=QQII")
_ASYNC_READ, _PARALLEL_DIROPS, _MAX_PAGES = 1 << 0, 1 << 18, 1 << 22
_DIRECT_IO, _KEEP_CACHE = 1 << 0, 1 << 1
_ATTRIBUTES_VALID_S = 1

_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


class Request(NamedTuple):
    """One question of the kernel."""

    opcode: int
    unique: int
    node: int
    body: bytes


def mount(point: str, options: str, *, read_only: bool = True) -> int:
    """Mount an empty FUSE filesystem at `point`, and return the descriptor on which the kernel asks.

    Raises:
        OSError: If there is no /dev/fuse, or this process may not mount.
    """
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    data = f"fd={device},rootmode=40755,user_id={os.getuid()},group_id={os.getgid()},allow_other{options}"
    flags = (_MS_RDONLY if read_only else 0) | _MS_NOSUID | _MS_NODEV
    if _libc.mount(b"slow_fs", point.encode(), b"fuse.slow_fs", flags, data.encode()) != 0:
        error = ctypes.get_errno()
        os.close(device)
        raise OSError(error, os.strerror(error), point)
    return device


def unmount(point: str) -> None:
    """Detach the filesystem at `point`; those who wait for it get an error."""
    _libc.umount2(point.encode(), _MNT_DETACH)


def receive(device: int) -> Request | None:
    """Return the next request; None when the filesystem is no longer mounted."""
    try:
        message = os.read(device, REQUEST_BYTES)
    except OSError:
        return None
    _, opcode, unique, node, *_ = _IN_HEADER.unpack_from(message)
    return Request(opcode, unique, node, message[_IN_HEADER.size :])


def answer(device: int, request: Request, body: bytes | int) -> None:
    """Answer with bytes, or with an errno; a request that was interrupted meanwhile takes no answer."""
    error, payload = (-body, b"") if isinstance(body, int) else (0, body)
    header = _OUT_HEADER.pack(_OUT_HEADER.size + len(payload), error, request.unique)
    try:
        os.writev(device, [header, payload])
    except (FileNotFoundError, OSError):
        return


def settings_for(body: bytes, *, in_flight: int, max_read_bytes: int) -> bytes:
    """Return the answer to INIT: so many requests at once, of at most so many bytes."""
    _, _, read_ahead, offered = _INIT_IN.unpack_from(body)
    flags = offered & (_ASYNC_READ | _PARALLEL_DIROPS | _MAX_PAGES)
    pages = max_read_bytes // os.sysconf("SC_PAGE_SIZE")
    return _INIT_OUT.pack(7, 31, read_ahead, flags, in_flight, in_flight, _MAX_WRITE, 1, pages, 0, *[0] * 8)


def attributes_of(node: int, status: os.stat_result) -> bytes:
    """Return the answer to GETATTR."""
    return _ATTRIBUTES_OUT.pack(_ATTRIBUTES_VALID_S, 0, 0) + _packed(node, status)


def entry_of(node: int, status: os.stat_result) -> bytes:
    """Return the answer to LOOKUP."""
    return _ENTRY.pack(node, 0, _ATTRIBUTES_VALID_S, _ATTRIBUTES_VALID_S, 0, 0) + _packed(node, status)


def opened(handle: int, *, cached: bool) -> bytes:
    """Return the answer to OPEN: with or without the page cache, which outlives a close."""
    return _OPEN_OUT.pack(handle, _KEEP_CACHE if cached else _DIRECT_IO, 0)


def read_of(body: bytes) -> tuple[int, int, int]:
    """Return handle, offset and bytes of a READ or READDIR."""
    handle, offset, size = _READ_IN.unpack_from(body)
    return handle, offset, size


def names_in(body: bytes, skip: int = 0) -> list[str]:
    """Return the names that end a request, after `skip` bytes of numbers."""
    return [name.decode() for name in body[skip:].split(bytes(1))[:-1]]


def write_of(body: bytes) -> tuple[int, int, bytes]:
    """Return handle, offset and data of a WRITE."""
    handle, offset, size, *_ = _WRITE_IN.unpack_from(body)
    return handle, offset, body[_WRITE_IN.size : _WRITE_IN.size + size]


def written(num_bytes: int) -> bytes:
    """Return the answer to WRITE."""
    return _WRITE_OUT.pack(num_bytes, 0)


def changes_of(body: bytes) -> tuple[int | None, int | None]:
    """Return the size and the permissions that a SETATTR sets, None for what stays; it may set more, such as times."""
    valid, _, _, size, *rest = _SETATTR_IN.unpack_from(body)
    mode = rest[7]
    return size if valid & _SET_SIZE else None, mode & 0o7777 if valid & _SET_MODE else None


def rename_of(request: Request) -> tuple[int, int, list[str]]:
    """Return the node of the new folder, the flags, and the old and new name of a RENAME or RENAME2."""
    if request.opcode == RENAME:
        return handle_of(request.body), 0, names_in(request.body, skip=8)
    folder, flags, _ = _RENAME2_IN.unpack_from(request.body)
    return folder, flags, names_in(request.body, skip=_RENAME2_IN.size)


def handle_of(body: bytes) -> int:
    """Return the handle of a RELEASE, or the node that other requests begin with."""
    return int.from_bytes(body[:8], "little" if struct.pack("=H", 1)[0] else "big")


def entries_from(names: Sequence[str], offset: int, size: int) -> bytes:
    """Return the answer to READDIR, from entry `offset` on."""
    packed = b""
    for number, name in enumerate(names[offset:], offset + 1):
        raw = name.encode()
        entry = _DIRENT.pack(number, number, len(raw), 0) + raw
        entry += bytes(-len(entry) % 8)
        if len(packed) + len(entry) > size:
            break
        packed += entry
    return packed


def space_of(path: str) -> bytes:
    """Return the answer to STATFS."""
    told = os.statvfs(path)
    counts = (told.f_blocks, told.f_bfree, told.f_bavail, told.f_files, told.f_ffree)
    return _STATFS_OUT.pack(*counts, told.f_bsize, told.f_namemax, told.f_frsize, 0)


def _packed(node: int, status: os.stat_result) -> bytes:
    times = [status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns]
    return _ATTRIBUTES.pack(
        node,
        status.st_size,
        status.st_blocks,
        *(time // 10**9 for time in times),
        *(time % 10**9 for time in times),
        status.st_mode,
        status.st_nlink,
        status.st_uid,
        status.st_gid,
        0,
        4096,
        0,
    )
