"""JSON as the safetensors format and the Hub's index need it: no duplicate keys, no surprises.

Python's parser keeps the last of two equal keys, takes NaN, and gives half a surrogate pair as text. Here the first is
reported, the others are refused, and whatever the text holds the only exception is `BadJsonError`.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import NamedTuple, NoReturn, TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


class BadJsonError(ValueError):
    """The text is no JSON object; the message goes on after "the header"."""


class Twins(NamedTuple):
    """Keys given more than once in one object.

    Attributes:
        found: The object with the last value of every key; compare with `is` to know which one it is.
        keys: The repeated keys, decoded.
    """

    found: dict[str, Json]
    keys: list[str]


def parse_object(raw: bytes) -> tuple[dict[str, Json], list[Twins]]:
    """Return the object that `raw` holds, and every object in it whose keys are not unique.

    Raises:
        BadJsonError: If `raw` is not UTF-8, not JSON, or not an object.
    """
    twins: list[Twins] = []

    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        found = dict(pairs)
        if len(found) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            twins.append(Twins(found, [key for key, count in counts.items() if count > 1]))
        return found

    # The format's integers are unsigned: `-0` is none of them, but int() would make it 0.
    parse_int = _integer if b"-0" in raw else None
    try:
        text = raw.decode("utf-8")
        value = json.loads(text, object_pairs_hook=unique, parse_int=parse_int, parse_constant=_refuse_constant)
        if b"\\u" in raw:
            _refuse_lone_surrogates(value)
    except UnicodeDecodeError as error:
        raise BadJsonError(f"is not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise BadJsonError("is not acceptable JSON: it is nested too deeply") from error
    except BadJsonError:
        raise
    except json.JSONDecodeError as error:
        raise BadJsonError(f"is not valid JSON: {error}") from error
    except ValueError as error:  # Python refuses to convert thousands of digits, which takes time without bound
        raise BadJsonError("is not acceptable JSON: an integer has thousands of digits") from error
    if not isinstance(value, dict):
        raise BadJsonError(f"must be a JSON object, not {json_kind(value)}")
    return value, twins


def json_kind(value: Json) -> str:
    """Return what JSON calls `value`.

    Examples:
        >>> json_kind([]), json_kind(True), json_kind(None)
        ('an array', 'true', 'null')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    kinds = {dict: "an object", list: "an array", str: "a string", int: "an integer", float: "a fraction"}
    return kinds[type(value)]


def _integer(digits: str) -> int | float:
    return -0.0 if digits == "-0" else int(digits)


def _refuse_constant(word: str) -> NoReturn:
    raise BadJsonError(f"is not valid JSON: {word} is not a JSON value")


def _refuse_lone_surrogates(value: Json) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadJsonError("is not Unicode text: an escape is half a surrogate pair") from error
