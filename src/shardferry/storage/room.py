"""How much more the page cache can take before something has to leave: what the machine and its cgroups leave free.

Pages are charged to the cgroup of the process that reads them first, so a container's limit counts, not the machine's
memory. Page cache that is there already can be given up for other pages and counts as free.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardferry.units import KIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

# Part of memory left to everything else; a guess, after vLLM, which fetches nothing ahead beyond 90 % of memory.
KEPT_FREE = 0.1
# cgroup v1 writes "no limit" as the largest multiple of a page; no machine has half of it.
_NO_LIMIT = 1 << 62


class Room(NamedTuple):
    """Memory that a page cache may use.

    Attributes:
        num_bytes: Bytes, page cache that is there now included.
        cache_bytes: Page cache that is there now and charged to the same limit.
        limit: What sets the limit, in words.
    """

    num_bytes: int
    cache_bytes: int
    limit: str


class _Mount(NamedTuple):
    root: str
    point: str
    version: int


def cache_room(system: Path = Path("/")) -> Room:
    """Return what the tightest of the machine and this process's cgroups leaves for page cache.

    Args:
        system: Where `proc` and `sys` are.
    """
    rooms = [_machine(system), *_cgroups(system)]
    return min(rooms, key=lambda room: room.num_bytes)


def _machine(system: Path) -> Room:
    fields = {}
    for line in (system / "proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * KIB
    cached = fields.get("Active(file)", 0) + fields.get("Inactive(file)", 0)
    total, available = fields["MemTotal"], fields["MemAvailable"]
    return _room(total, available, cached, f"the machine has {format_bytes(available)} of memory available")


def _cgroups(system: Path) -> Iterator[Room]:
    """Yield the room of every cgroup with a limit, from the process's own to the outermost that can be seen."""
    mounts = list(_mounts(system))
    for line in (system / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        version = 1 if "memory" in controllers.split(",") else 0 if controllers else 2
        for mount in mounts:
            if mount.version == version:
                yield from _limits(system, mount, path)


def _mounts(system: Path) -> Iterator[_Mount]:
    for line in (system / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        # proc_pid_mountinfo(5): id, parent, major:minor, root, mount point, ... "-", type, source, super options
        fields, _, rest = line.partition(" - ")
        words, (kind, *_, options) = fields.split(), rest.split() or ("", "")
        if kind == "cgroup2":
            yield _Mount(words[3], words[4], 2)
        elif kind == "cgroup" and "memory" in options.split(","):
            yield _Mount(words[3], words[4], 1)


def _limits(system: Path, mount: _Mount, path: str) -> Iterator[Room]:
    # In a container the path may be the host's and the mount show only the part below the container's own cgroup.
    inside = path.removeprefix(mount.root) if mount.root != "/" else path
    top = system / mount.point.lstrip("/")
    folder = top / inside.lstrip("/")
    if ".." in folder.parts or not folder.is_dir():
        folder = top
    while True:
        room = _limit_of(folder, mount.version)
        if room is not None:
            yield room
        if folder == top:
            return
        folder = folder.parent


def _limit_of(folder: Path, version: int) -> Room | None:
    names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)  # noqa: PLR2004
    limits = [limit for limit in (_number(folder / name) for name in names) if limit is not None]
    used = _number(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes"))  # noqa: PLR2004
    if not limits or used is None or min(limits) >= _NO_LIMIT:
        return None
    prefix = "" if version == 2 else "total_"  # noqa: PLR2004 - v1 counts the groups below apart
    fields = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
    cached = sum(int(fields.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    limit = min(limits)
    available = max(0, limit - used + cached)
    words = f"the cgroup {folder} may use {format_bytes(limit)} and has {format_bytes(available)} left"
    return _room(limit, available, cached, words)


def _room(total: int, available: int, cached: int, words: str) -> Room:
    return Room(max(0, available - int(total * KEPT_FREE)), cached, words)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:  # the outermost cgroup has no limit files
        return ""
