"""One save at a time to one path: a lock file that says who holds it.

The kernel's lock (flock) decides: it is gone when its holder is, however that ended. Two things it does not cover:

* A filesystem without locks. Then the file itself is the lock, and the process it names is looked for.
* A network filesystem that locks on each machine for itself. There, a lock file of another machine counts as held
  while anything of its save has changed within `QUIET_S`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import NamedTuple

from shardferry.errors import StorageError
from shardferry.format.problem import shown
from shardferry.storage.filesystem import filesystem_type

# A guess: longer than any pause of a writer that is alive, shorter than it takes to notice a dead job and restart it.
QUIET_S = 600
# One kernel sees every lock of these.
_ONE_KERNEL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay"})
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL})
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Owner(NamedTuple):
    """Who holds a lock; a process is named by more than its number, which others get later."""

    host: str
    boot: str
    pids: str
    pid: int
    started: str


class SaveLock:
    """A lock that is held; made by `take_lock`."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def release(self) -> None:
        """Let others save, and take the file away."""
        os.unlink(self.path)  # noqa: PTH108 - first: who locks a file that has lost its name starts again
        self.close()

    def close(self) -> None:
        """Let go of the lock as the kernel does when a process ends: the file stays."""
        os.close(self._descriptor)


def take_lock(path: str, staged: tuple[str, ...]) -> SaveLock:
    """Return the lock of one target.

    Args:
        path: The lock file.
        staged: Directories of earlier saves, where changes show that one of them is alive.

    Raises:
        StorageError: If another save to this path is running; says where.
        OSError: If no file can be made there.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        descriptor = os.open(path, flags, 0o666)
        lock = SaveLock(path, descriptor)
        try:
            _take(descriptor, path, staged)
            is_ours = _is_at(descriptor, path)
        except BaseException:
            lock.close()
            raise
        if is_ours:
            return _signed(lock, descriptor)
        lock.close()


def is_held(owner: Owner, me: Owner, *, locked: bool | None, one_kernel: bool, quiet_s: float) -> bool:
    """Return whether the save that wrote a lock file may still run, although the kernel did not refuse the lock.

    Args:
        owner: Who wrote the file.
        me: Who asks.
        locked: True if the kernel gave the lock; None if the filesystem has no locks.
        one_kernel: Whether the kernel that gave it would know of everybody's lock.
        quiet_s: Seconds since the lock file or anything that is staged has changed.
    """
    if locked and one_kernel:
        return False
    if (owner.boot, owner.pids) == (me.boot, me.pids):
        return not locked and _started(owner.pid) == owner.started
    return quiet_s < QUIET_S


def myself() -> Owner:
    """Return this process."""
    pid = os.getpid()
    boot = _BOOT_ID.read_text(encoding="ascii").strip()
    return Owner(socket.gethostname(), boot, str(Path("/proc/self/ns/pid").readlink()), pid, _started(pid))


def _take(descriptor: int, path: str, staged: tuple[str, ...]) -> None:
    locked = _lock(descriptor)
    owner = _read_owner(descriptor)
    if owner is not None and locked is not False:
        one_kernel = filesystem_type(descriptor) in _ONE_KERNEL
        changed = max((os.fstat(descriptor).st_mtime, *map(_last_change, staged)))
        quiet_s = time.time() - changed
        if not is_held(owner, myself(), locked=locked, one_kernel=one_kernel, quiet_s=quiet_s):
            return
    elif locked is not False:
        return
    raise StorageError(_running(path, owner))


def _lock(descriptor: int) -> bool | None:
    """Return whether the kernel gave the lock; None if the filesystem has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _last_change(folder: str) -> float:
    times = [0.0]
    try:
        with os.scandir(folder) as entries:
            times += [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
    except OSError:
        pass  # it has gone meanwhile: no sign of life
    return max(times)


def _running(path: str, owner: Owner | None) -> str:
    who = f" by process {owner.pid} on {shown(owner.host)}" if owner else ""
    return (
        f"another save to the same path is running{who}: it holds '{path}'. Wait for it or save to another path; "
        "if that process is gone, remove this file"
    )


def _is_at(descriptor: int, path: str) -> bool:
    """Return whether the locked file still has its name: its holder may have removed it just before."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))  # noqa: PTH116
    except FileNotFoundError:
        return False


def _started(pid: int) -> str:
    """Return when a process started, in the kernel's ticks; empty if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]  # proc_pid_stat(5): field 22; the name before may hold anything


def _read_owner(descriptor: int) -> Owner | None:
    try:
        return Owner(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):  # empty, or its writer died while it wrote
        return None


def _signed(lock: SaveLock, descriptor: int) -> SaveLock:
    """Return a lock after writing down whose it is; where that fails, no file is left."""
    try:
        _write_owner(descriptor)
    except BaseException:
        lock.release()
        raise
    return lock


def _write_owner(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(myself()._asdict()).encode(), 0)
    os.fsync(descriptor)
