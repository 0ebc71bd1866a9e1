"""Options of the public calls, looked at alike whatever the framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from shardferry.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Collection

_Choice = TypeVar("_Choice", bound=str | bool)


def check_options(given: Collection[str], known: frozenset[str], what: str) -> None:
    """Raise `TypeError` for an option that does not exist; `what` is the call, such as "a load"."""
    unknown = sorted(set(given) - known)
    if unknown:
        raise TypeError(f"unknown option {', '.join(unknown)}; {what} takes {', '.join(sorted(known))}")


def one_of(value: _Choice, name: str, choices: tuple[str | bool, ...]) -> _Choice:
    """Return `value`.

    Raises:
        InvalidInputError: If it is none of `choices`; names the option.
    """
    if value not in choices:
        raise InvalidInputError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
    return value
