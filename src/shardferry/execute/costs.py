"""Which cost model a path has: what `shardferry probe` measured on its mount, or else the preset of its filesystem.

Never measures: a load must not wait for that, nor get another plan from it. What was measured is kept in one small file
per mount below the user's cache folder, written by `remember` and looked up by the mount's type, source, root and
point; for a disk also by the host, since a cache folder may be shared by hosts with disks of equal names.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from shardferry.errors import InvalidInputError, StorageError
from shardferry.plan.costmodel import PRESETS, cost_model_from_json, cost_model_to_json
from shardferry.storage.filesystem import MEMORY_FILESYSTEMS, Mount, mount_of
from shardferry.storage.location import is_remote, locate

if TYPE_CHECKING:
    from shardferry.format.index import CheckpointIndex
    from shardferry.plan.costmodel import CostModel
    from shardferry.storage.location import Location

# A cost model has some hundred bytes; more is something else.
MAX_FILE_BYTES = 64 << 10
# Storage changes: a guess.
MAX_AGE_S = 90 * 24 * 3600
# Ends the type of what is no mount, but read by a URL: no filesystem's type has it.
_REMOTE = "://"


def cost_model_for(path: str | os.PathLike[str]) -> CostModel:
    """Return what the storage below a path costs; `source` says where the numbers are from.

    Args:
        path: A file or folder, or a URL.

    Raises:
        InvalidInputError: If it is a URL of an unknown scheme.
        StorageError: If there is nothing at the path, or it cannot be looked at.
    """
    where = locate(path)
    mount = mount_of_location(where)
    preset = preset_of(mount)
    file = _cache_file(mount)
    try:
        age = time.time() - file.stat().st_mtime
        if age > MAX_AGE_S:
            return replace(preset, source=f"{preset.source} (what was measured is {age / 86400:.0f} days old)")
        return read_cost_model(file)
    except FileNotFoundError:
        return preset
    except (OSError, InvalidInputError) as error:
        return replace(preset, source=f"{preset.source} ({error})"[:400])


def storage_cost(index: CheckpointIndex) -> CostModel:
    """Return what the storage of a checkpoint costs, on a filesystem or at a URL.

    A file of it tells, not the folder: that may be full of links to somewhere else.

    Raises:
        StorageError: If it is a path and cannot be looked at.
    """
    is_folder = index.files and not is_remote(index.root)
    return cost_model_for(Path(index.root, next(iter(index.files))) if is_folder else index.root)


def target_cost(path: str) -> CostModel:
    """Return what the storage costs on which something will be: that of the nearest folder above it that is there.

    Args:
        path: A path of this machine.

    Raises:
        StorageError: If not even the root can be looked at.
    """
    there = Path(path).absolute()
    while not os.path.exists(there) and there != there.parent:  # noqa: PTH110 - False for what can be no path
        there = there.parent
    return cost_model_for(there)


def named_cost_model(name: str) -> CostModel:
    """Return the preset of this name, or the model in the file of this name.

    Raises:
        InvalidInputError: If it is neither, or the file holds no cost model.
    """
    if name in PRESETS:
        return PRESETS[name]
    try:
        return read_cost_model(Path(name))
    except OSError as error:
        known = ", ".join(PRESETS)
        message = f"{name!r} is neither a preset ({known}) nor a file of `shardferry probe --json`: {error.strerror}"
        raise InvalidInputError(message) from error


def read_cost_model(file: Path) -> CostModel:
    """Return the model in a file.

    Raises:
        OSError: If the file cannot be read.
        InvalidInputError: If it is no regular file, too long, or holds no cost model.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not hold us
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InvalidInputError(f"{file} is no regular file")
        raw = os.read(descriptor, MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(raw) > MAX_FILE_BYTES:
        raise InvalidInputError(f"{file} has more than {MAX_FILE_BYTES} bytes: it is no cost model")
    return cost_model_from_json(raw, str(file))


def remember(mount: Mount, model: CostModel) -> Path:
    """Keep what was measured on a mount for `cost_model_for`, and return the file.

    Raises:
        OSError: If it cannot be written.
    """
    file = _cache_file(mount)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = json.dumps({"mount": mount._asdict(), "cost_model": cost_model_to_json(model)}, allow_nan=False)
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=".probe-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(written)
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink()
        raise
    return file


def mount_below(path: str | os.PathLike[str]) -> Mount:
    """Return the mount that a file or folder lies on.

    Raises:
        StorageError: If there is nothing at the path, or it cannot be looked at.
    """
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"cannot open '{os.fspath(path)}': {error.strerror}") from error
    try:
        return mount_of(descriptor)
    finally:
        os.close(descriptor)


def mount_of_location(where: Location) -> Mount:
    """Return the mount a location lies on; for a URL one of the scheme's type, with the bucket or host as source.

    Raises:
        StorageError: If it is a path at which there is nothing, or that cannot be looked at.
    """
    if where.is_local:
        return mount_below(Path(where.root) / (where.entry or ""))
    parts = urlsplit(where.root)
    return Mount(f"{parts.scheme}{_REMOTE}", parts.netloc, "", "")


def preset_of(mount: Mount) -> CostModel:
    """Return the preset that suits a mount; what the kernel knows nothing of is taken for a local disk."""
    if mount.type.endswith(_REMOTE):
        return PRESETS["object_store"]
    if mount.type in MEMORY_FILESYSTEMS:
        return PRESETS["memory"]
    return PRESETS["network_mount" if mount.is_network else "local"]


def _cache_file(mount: Mount) -> Path:
    """Return where a mount's model is kept; XDG_CACHE_HOME is where the user's caches are, `~/.cache` without it."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(given) if given.startswith("/") else Path.home() / ".cache"  # the specification ignores relative ones
    host = "" if mount.is_network or mount.type.endswith(_REMOTE) else socket.gethostname()
    identity = "\0".join((*mount, host)).encode("utf-8", "surrogateescape")
    return caches / "shardferry" / "probes" / f"{hashlib.sha256(identity).hexdigest()[:32]}.json"
