"""What a save writes down before it changes the target, so that the next one can finish or undo it after a crash.

A journal counts only if it is whole: its last line is the hash of the rest. No rename is needed to write it safely.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardferry.format.savenames import PublishProtocol

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Journal:
    """What is being published.

    Attributes:
        protocol: How.
        files: Size in bytes of every new file by its name, relative to the target.
        last: The file that makes a reader open the others; it goes last.
        replaced: Names of the files it replaces, in the order in which they go.
        linked: Foreign files that were given a second name in the staged directory.
    """

    protocol: PublishProtocol
    files: Mapping[str, int]
    last: str
    replaced: tuple[str, ...]
    linked: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """Return what the file holds."""
        text = json.dumps({"version": _VERSION, **asdict(self)}).encode()
        return text + b"\n" + hashlib.sha256(text).hexdigest().encode() + b"\n"


def read_journal(path: str) -> Journal | None:
    """Return the journal at `path`; None if there is none or it was not written to its end.

    Raises:
        OSError: If it is there but cannot be read.
    """
    try:
        text, _, rest = Path(path).read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    if rest.decode("ascii", "replace").strip() != hashlib.sha256(text).hexdigest():
        return None
    fields = json.loads(text)
    if fields["version"] != _VERSION:
        return None
    replaced, linked = tuple(fields["replaced"]), tuple(fields["linked"])
    return Journal(fields["protocol"], fields["files"], fields["last"], replaced, linked)
