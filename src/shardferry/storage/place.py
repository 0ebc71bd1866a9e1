"""Where the parts of one save lie: the target, what is staged, what is retired, the journals."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from shardferry.format.savenames import JournalKind, SiblingKind, journal_name, sibling_name


@dataclass(frozen=True, slots=True)
class Place:
    """The paths of one save; rank 0 makes it and shares it.

    Attributes:
        target: The directory that is to hold the checkpoint, absolute, links resolved.
        home: Where the save keeps what is not published.
        token: Tells this save's names from those of others.
        in_place: Whether files are written where they belong at once, because nothing can be renamed.
    """

    target: str
    home: str
    token: str
    in_place: bool = False

    @property
    def staging(self) -> str:
        """The directory in which the new files are written."""
        return self.target if self.in_place else self._beside("staging")

    @property
    def retired(self) -> str:
        """The directory that holds what is replaced."""
        return self._beside("retired")

    @property
    def probe(self) -> str:
        """The directory in which the filesystem is tried out."""
        return self._beside("probe")

    def path_of(self, name: str) -> str:
        """Return where a file of the new checkpoint is written."""
        return f"{self.staging}/{name}"

    def journal(self, kind: JournalKind) -> str:
        """Return the path of a journal in the target."""
        return f"{self.target}/{journal_name(self.token, kind)}"

    @property
    def mark(self) -> str:
        """The file that tells a staged directory from one that has been replaced; it becomes the journal."""
        return f"{self._beside('staging')}/{journal_name(self.token, 'published')}"

    def to_bytes(self) -> bytes:
        """Return what other ranks need to make the same place."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Place:
        """Return the place that `to_bytes` was called on."""
        return cls(**json.loads(data))

    def _beside(self, kind: SiblingKind) -> str:
        return f"{self.home}/{sibling_name(os.path.basename(self.target), self.token, kind)}"  # noqa: PTH119
