"""Names of models on the Hugging Face Hub, and where the local cache holds one."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# As the Hub checks them: https://huggingface.co/docs/hub/repositories, letters, digits, "-", "_" and ".".
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}", re.ASCII)


class HubPath(NamedTuple):
    """What an `hf://` path names.

    Attributes:
        repo: `org/name`.
        revision: Branch, tag or commit; None for the main branch.
        entry: A file of it; None for all.
    """

    repo: str
    revision: str | None
    entry: str | None


def parse_hub_path(path: str) -> HubPath | None:
    """Return what `hf://org/name[@revision][/file]` or a bare `org/name[@revision]` says, None for anything else.

    Examples:
        >>> parse_hub_path("hf://org/name@v2/model.safetensors")
        HubPath(repo='org/name', revision='v2', entry='model.safetensors')
        >>> parse_hub_path("/ckpt/name") is None
        True
    """
    bare = path.removeprefix("hf://").rstrip("/")
    org, _, rest = bare.partition("/")
    name, _, entry = rest.partition("/")
    if entry and not path.startswith("hf://"):
        return None
    name, at, revision = name.partition("@")
    if _REPO.fullmatch(f"{org}/{name}") is None or ".." in name or (at and not revision):
        return None
    return HubPath(f"{org}/{name}", revision or None, entry or None)


def cached_snapshot(hub: HubPath) -> str | None:
    """Return the folder of the local cache that holds a revision, None if it is not there."""
    try:
        from huggingface_hub import constants  # noqa: PLC0415 - an extra
    except ImportError:
        return None
    folder = Path(constants.HF_HUB_CACHE, "models--" + hub.repo.replace("/", "--"))
    revision = hub.revision or constants.DEFAULT_REVISION
    commit = revision
    with suppress(OSError, ValueError):  # a commit has no reference
        commit = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    snapshot = folder / "snapshots" / commit
    held = snapshot.is_dir() and any(snapshot.glob("*.safetensors*"))  # others may have fetched its config only
    return str(snapshot) if held else None


def is_offline() -> bool:
    """Return whether `huggingface_hub` may not ask the Hub (HF_HUB_OFFLINE), or is not installed."""
    try:
        from huggingface_hub import constants  # noqa: PLC0415 - an extra
    except ImportError:
        return True
    return bool(constants.HF_HUB_OFFLINE)
