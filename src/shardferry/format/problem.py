"""What is wrong with a checkpoint, as data.

Parsing never raises for what it finds in the bytes: it returns problems, so that one mechanism serves an error that
lists everything, warnings, and a check of the whole folder. `refusal` and `remarks` are the only places that decide
what a problem means for somebody who opens the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from shardferry.errors import CheckpointError, CheckpointNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable

# missing: a file that is needed is not there.   fatal: nobody can say which bytes are meant.
# strict:  the format forbids it, common readers load it; strict=False goes on with the choice the message states.
# verify:  does not touch what is loaded, but makes a check of the folder fail.
# warning: odd, allowed.
Severity = Literal["missing", "fatal", "strict", "verify", "warning"]

# Lines of one error message: enough for one line per shard file of the largest public checkpoints (163 files).
MAX_LINES = 200
# A name of the length of a header would make an unreadable message.
MAX_NAME = 400


class Problem(NamedTuple):
    """One thing that is wrong.

    Attributes:
        message: A whole sentence that begins with the file, names the tensor and the actual values.
        file: Name relative to the checkpoint's root, `""` if the problem is the folder itself.
        severity: What it means; see `Severity`.
    """

    message: str
    file: str
    severity: Severity


class Findings:
    """Collects the problems of one file; every message begins with its name."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []

    def add(self, severity: Severity, text: str) -> None:
        """Record `text`, a sentence that goes on after the file's name."""
        self.problems.append(Problem(f"{shown(self.file)}: {text}", self.file, severity))

    def strict(self, text: str, otherwise: str) -> None:
        """Record what the caller may accept; `otherwise` says what is done then."""
        self.add("strict", f"{text}; with strict=False (--no-strict) {otherwise}")


def shown(text: str) -> str:
    """Return `text` fit for one line of a message: control characters escaped, overlong text cut.

    Examples:
        >>> print(shown("layers.0.w"), shown("line" + chr(10)) == "line" + chr(92) + "n")
        layers.0.w True
    """
    if len(text) > MAX_NAME:
        text = f"{text[:MAX_NAME]}... ({len(text)} characters)"
    return text if text.isprintable() else repr(text)[1:-1]


def listed(names: Iterable[str], limit: int) -> str:
    """Return the first `limit` of `names` separated by commas, and how many more there are.

    Examples:
        >>> listed(["a", "b", "c"], 2)
        'a, b and 1 more'
    """
    every = [shown(name) for name in names]
    more = len(every) - limit
    return ", ".join(every[:limit]) + (f" and {more} more" if more > 0 else "")


def refusal(problems: Iterable[Problem], where: str, *, strict: bool) -> CheckpointError | None:
    """Return the error that opening must end with, or None if the checkpoint is acceptable.

    Args:
        problems: Everything that was found.
        where: The path as the caller gave it.
        strict: False accepts problems of severity `strict`.
    """
    refused = ("missing", "fatal", "strict") if strict else ("missing", "fatal")
    wrong = [problem for problem in problems if problem.severity in refused]
    if not wrong:
        return None
    lines = [problem.message for problem in wrong[:MAX_LINES]]
    if len(wrong) > MAX_LINES:
        lines.append(f"... and {len(wrong) - MAX_LINES} more; `shardferry verify` lists all of them")
    text = f"{shown(where)} cannot be opened:\n  " + "\n  ".join(lines)
    only_missing = all(problem.severity == "missing" for problem in wrong)
    return CheckpointNotFoundError(text) if only_missing else CheckpointError(text)


def remarks(problems: Iterable[Problem]) -> tuple[str, ...]:
    """Return the messages that a checkpoint opened all the same comes with."""
    return tuple(problem.message for problem in problems if problem.severity in ("strict", "verify", "warning"))
