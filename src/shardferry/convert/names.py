r"""Templates of tensor names: text with fields, read one way and written the other.

`"{head*}.experts.{e}.gate_proj.weight"` matches names; `{e}` stands for what lies between two dots, `{head*}` for any
text, also none. A name written `re:...` is a regular expression whose named groups are the fields; it can be read
only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardferry.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_FIELD = re.compile(r"\{(\w+)(\*?)\}")
_REGEX = "re:"


@dataclass(frozen=True)
class Template:
    """A pattern of names.

    Attributes:
        text: As it was written.
        numbers: Fields that stand for numbers only.
    """

    text: str
    numbers: frozenset[str] = frozenset()

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields, in order."""
        if self.text.startswith(_REGEX):
            return tuple(self._compiled.groupindex)
        return tuple(name for name, _ in _FIELD.findall(self.text))

    @property
    def is_name(self) -> bool:
        """Whether it matches one name only: itself."""
        return not self.fields and not self.text.startswith(_REGEX)

    @cached_property
    def literal(self) -> str:
        """The longest text every name has that matches; empty for a regular expression."""
        if self.text.startswith(_REGEX):
            return ""
        return max(_FIELD.sub("\0", self.text).split("\0"), key=len)

    def match(self, name: str) -> dict[str, str] | None:
        """Return the fields of a name; None if it does not match."""
        if self.is_name:
            return {} if name == self.text else None
        if self.literal not in name:
            return None
        found = self._compiled.fullmatch(name)
        return None if found is None else found.groupdict(default="")

    def write(self, fields: Mapping[str, str]) -> str:
        """Return the name that has these fields."""
        return _FIELD.sub(lambda field: fields[field[1]], self.text)

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        if self.text.startswith(_REGEX):
            return compile_pattern(self.text[len(_REGEX) :])
        seen: set[str] = set()
        parts = re.split(_FIELD.pattern, self.text)
        pattern = re.escape(parts[0])
        for name, star, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            what = "[0-9]+" if name in self.numbers else ".*" if star else r"[^.]+"
            pattern += (f"(?P={name})" if name in seen else f"(?P<{name}>{what})") + re.escape(text)
            seen.add(name)
        return compile_pattern(pattern)


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return a compiled regular expression.

    Raises:
        InvalidInputError: If it is none; names it.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InvalidInputError(f"{pattern!r} is no regular expression: {error}") from error


def written_only(texts: Collection[str]) -> None:
    """Raise `InvalidInputError` if one of the names cannot be written because it is a regular expression."""
    for text in texts:
        if text.startswith(_REGEX):
            raise InvalidInputError(f"names cannot be made from {text!r}: a target is a template with {{fields}}")
