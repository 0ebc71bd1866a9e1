"""The names a save uses beside and inside the directory it publishes to, and what they tell a reader who meets one.

Beside the target `out`, or inside it where nothing can be put beside it:

    .out.shardferry.lock               held while a save to `out` runs
    .out.shardferry-TOKEN.staging      the new checkpoint, not published yet
    .out.shardferry-TOKEN.retired      what the new checkpoint replaces, until all of it is dealt with
    .out.shardferry-TOKEN.probe        tiny files that find out what the filesystem can do

Inside the target, one journal:

    .shardferry-TOKEN.publishing       files are being put in place one by one: no checkpoint can be read now
    .shardferry-TOKEN.published        the checkpoint is complete; what it replaced is being cleared away

All begin with a dot, so no reader takes them for a part of a checkpoint. In an object store, where nothing can be
renamed, the index itself says that a save is putting its objects in place: it then holds a marker and names no tensor.
Only names and the marker are known here, no file is opened.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardferry.format.problem import Problem, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

SiblingKind = Literal["staging", "retired", "probe", "lock"]
JournalKind = Literal["publishing", "published"]
# How the staged files become the checkpoint; `docs/explanation/how-a-save-publishes.md` describes each.
PublishProtocol = Literal["rename", "exchange", "swap", "files", "in place"]
# The key of a marker, which an index of tensors does not have.
PUBLISHING = "shardferry_publishing"
# For so long a marker keeps all other saves out; `storage/objecttarget.py` says why.
STALE_S = 1200.0
# Of random bytes: the name of one save.
TOKEN_BYTES = 4

# NAME_MAX is 255 bytes on every common filesystem; what is put around the label takes less than 60.
_MAX_LABEL_BYTES = 180
_OWN = "[0-9a-z]{4,32}"
_JOURNAL = re.compile(rf"\.shardferry-({_OWN})\.(publishing|published)")
_KINDS = "staging|retired|probe"
_ANY_SIBLING = re.compile(rf"\..+\.shardferry(?:-{_OWN}\.(?:{_KINDS})|\.lock)", re.DOTALL)


class SaveName(NamedTuple):
    """What a name that a save uses says; the lock has an empty token."""

    token: str
    kind: str


def sibling_name(target: str, token: str, kind: SiblingKind) -> str:
    """Return the name of a file or directory that a save to a directory called `target` puts beside it.

    Examples:
        >>> sibling_name("out", "1f2e", "staging"), sibling_name("out", "", "lock")
        ('.out.shardferry-1f2e.staging', '.out.shardferry.lock')
    """
    own = f"-{token}" if token else ""
    return f".{_label(target)}.shardferry{own}.{kind}"


def journal_name(token: str, kind: JournalKind) -> str:
    """Return the name of a journal inside the target."""
    return f".shardferry-{token}.{kind}"


def parse_sibling(entry: str, target: str) -> SaveName | None:
    """Return what an entry's name says if a save to a directory called `target` made it."""
    if entry == sibling_name(target, "", "lock"):
        return SaveName("", "lock")
    match = re.fullmatch(rf"\.{re.escape(_label(target))}\.shardferry-({_OWN})\.({_KINDS})", entry)
    return SaveName(*match.groups()) if match else None


def parse_journal(entry: str) -> SaveName | None:
    """Return what an entry's name says if it is a journal.

    Examples:
        >>> parse_journal(".shardferry-1f2e.published")
        SaveName(token='1f2e', kind='published')
    """
    match = _JOURNAL.fullmatch(entry)
    return SaveName(*match.groups()) if match else None


def marker_bytes(token: str, host: str, started: str) -> bytes:
    """Return what stands in the place of the index while a save puts its objects in place.

    Examples:
        >>> marker_bytes("1f2e", "gpu-7", "2026-01-31 12:00:00 UTC")
        b'{"shardferry_publishing": {"token": "1f2e", "host": "gpu-7", "started": "2026-01-31 12:00:00 UTC"}}'
    """
    return json.dumps({PUBLISHING: {"token": token, "host": host, "started": started}}).encode()


def describe_marker(said: object) -> str:
    """Return who put a marker there and when, from the value of its key."""
    if not isinstance(said, dict):
        return "by an unknown host"
    return shown(f"begun on host {said.get('host')} at {said.get('started')}")


def is_save_name(entry: str) -> bool:
    """Return whether a save, to whatever directory, uses this name."""
    return bool(_JOURNAL.fullmatch(entry) or _ANY_SIBLING.fullmatch(entry))


def inner_problems(entries: Iterable[str]) -> list[Problem]:
    """Return what the names directly inside a checkpoint's folder say about a save that has not ended."""
    problems = []
    for entry in sorted(filter(is_save_name, entries)):
        journal = parse_journal(entry)
        if journal is not None and journal.kind == "publishing":
            text = (
                f"{shown(entry)}: a save is putting its files in place, or was interrupted while it did. "
                "Save to this path again: that finishes or undoes it first"
            )
            problems.append(Problem(text, entry, "missing"))
        else:
            problems.append(_leftover(entry))
    return problems


def outer_problems(entries: Iterable[str], target: str) -> list[Problem]:
    """Return what the names beside a folder called `target` say about saves to it that have not ended."""
    return [_leftover(entry) for entry in sorted(entries) if parse_sibling(entry, target) is not None]


def _leftover(entry: str) -> Problem:
    text = (
        f"{shown(entry)}: a save to this path is running or was interrupted. "
        "If none is running, the next save to this path clears it away"
    )
    return Problem(text, entry, "verify")


def _label(target: str) -> str:
    raw = target.encode("utf-8", "surrogateescape")
    if len(raw) <= _MAX_LABEL_BYTES:
        return target
    return raw[:100].decode("utf-8", "ignore") + "-" + hashlib.sha256(raw).hexdigest()[:16]
