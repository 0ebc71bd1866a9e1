"""Options of the public calls, looked at and compared over ranks alike whatever the framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from shardferry.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

_Choice = TypeVar("_Choice", bound=str | bool)

# Options that ranks tell each other as a hash, which says nothing to anybody.
HASHED_OPTIONS = ("conversions", "files_like")


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


def check_alike(told: Sequence[Mapping[str, object]], call: str) -> None:
    """Raise the same error on all ranks unless all give the same options.

    Args:
        told: The options of every rank, by name; the same names on all.
        call: What the ranks call, in words that follow "this".

    Raises:
        InvalidInputError: If they do not; names the first that differs, the ranks and both values.
    """
    for rank, options in enumerate(told):
        for name, first in told[0].items():
            if options[name] != first:
                values = "" if name in HASHED_OPTIONS else f": {first!r} and {options[name]!r}"
                raise InvalidInputError(
                    f"ranks 0 and {rank} call this {call} with different {name}{values}. Give every rank the same "
                    "options"
                )
