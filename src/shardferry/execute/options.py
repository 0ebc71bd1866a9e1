"""Options of the public calls, looked at and compared over ranks alike whatever the framework."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, SupportsIndex, get_args

from shardferry.convert.rules import Rule
from shardferry.errors import InvalidInputError
from shardferry.execute.meter import MIN_BUDGET_BYTES
from shardferry.execute.warm import WhenShort
from shardferry.format.problem import shown
from shardferry.plan.costmodel import CostModel
from shardferry.plan.estimate import ReadOnce
from shardferry.units import MIB, format_bytes

DEFAULT_TIMEOUT_S = 600.0
# Below this, a round of an exchange would be so small that it costs more than its bytes; a guess.
MIN_EXCHANGE_BYTES = MIB
# Options that ranks tell each other as a hash, which says nothing to anybody.
HASHED_OPTIONS = ("conversions", "files_like")


class Kind(NamedTuple):
    """What may be given for an option or argument.

    Attributes:
        words: That, in words that follow "it must be".
        fits: Whether a value is such.
    """

    words: str
    fits: Callable[[object], bool]

    def or_none(self) -> Kind:
        """Return the kind that None is of too."""
        return Kind(f"{self.words}, or None", lambda value: value is None or self.fits(value))


def instance(words: str, *types: type) -> Kind:
    """Return the kind of what is an instance of some types."""
    return Kind(words, lambda value: isinstance(value, types))


def sequence(words: str, *types: type) -> Kind:
    """Return the kind of sequences of instances of some types; text is none."""
    return Kind(
        words,
        lambda value: (
            isinstance(value, Sequence)
            and not isinstance(value, str | bytes)
            and all(isinstance(each, types) for each in value)
        ),
    )


def choice(*values: str | bool) -> Kind:
    """Return the kind of a few values."""
    *others, last = map(repr, values)
    return Kind(f"{', '.join(others)} or {last}", lambda value: isinstance(value, str | bool) and value in values)


def _bytes(least: int) -> Kind:
    words = f"a number of bytes, at least {least} ({format_bytes(least)})"
    return Kind(words, lambda value: isinstance(value, int) and value >= least)


def _is_path(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, os.PathLike) and isinstance(os.fspath(value), str))


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


_FLAG = choice(False, True)  # noqa: FBT003 - these are the values
_PATH = Kind("a path or a URL", _is_path)
_CALLBACK = Kind("a function", callable).or_none()
# Of options and arguments that calls of every framework have, by name.
KINDS: Mapping[str, Kind] = {
    "budget_bytes": _bytes(MIN_BUDGET_BYTES),
    "cast": _FLAG,
    "checkpoint_strict": _FLAG,
    "conversions": sequence("a sequence of rules of shardferry.conversions", *get_args(Rule)),
    "cost": instance("a CostModel", CostModel).or_none(),
    "exchange_bytes": _bytes(MIN_EXCHANGE_BYTES),
    "files_like": _PATH.or_none(),
    "hub_limits": _FLAG,
    "ignore_mismatched_sizes": _FLAG,
    "max_shard_size": instance("a size in bytes", int, str),
    "metadata": instance("a mapping of text to text", Mapping),
    "node_of_rank": sequence("a sequence with the number of every rank's node", SupportsIndex).or_none(),
    "on_existing": choice("refuse", "replace"),
    "on_progress": _CALLBACK,
    "on_report": _CALLBACK,
    "path": _PATH,
    "read_once": choice(*get_args(ReadOnce)),
    "replicas": choice("trust", "check"),
    "stem": instance("text", str),
    "strict": _FLAG,
    "timeout_s": Kind("a positive number of seconds", _is_time),
    "variant": instance("text", str).or_none(),
    "when_short": choice(*get_args(WhenShort)),
}


def check_call(
    call: str, known: frozenset[str], options: Mapping[str, object], kinds: Mapping[str, Kind], **arguments: object
) -> None:
    """Look at what a call was given.

    Args:
        call: Which call, such as "a load".
        known: Names of its options.
        options: Those that were given.
        kinds: What options and arguments may be, by name.
        **arguments: Its arguments.

    Raises:
        TypeError: If an option is unknown.
        InvalidInputError: If one is of the wrong kind; names it, what it may be, and what was given.
    """
    unknown = sorted(set(options) - known)
    if unknown:
        raise TypeError(f"unknown option {', '.join(unknown)}; {call} takes {', '.join(sorted(known))}")
    for name, value in {**arguments, **options}.items():
        if not kinds[name].fits(value):
            raise InvalidInputError(f"{name} is {shown(repr(value))}; it must be {kinds[name].words}")


def timeout_of(options: Mapping[str, object]) -> float:
    """Return the time-out of the group that a call opens before it looks at its options.

    One that is none is taken for the default: `check_call` then refuses it on all ranks.
    """
    timeout_s = options.get("timeout_s")
    return float(timeout_s) if isinstance(timeout_s, int | float) and _is_time(timeout_s) else DEFAULT_TIMEOUT_S


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
