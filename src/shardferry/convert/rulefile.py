r"""Rules in a file: TOML or JSON, a list of tables named `rules`, each one rule.

    [[rules]]
    strip_prefix = "module."

    [[rules]]
    rename = '\.block_sparse_moe\.'
    to = ".mlp."

    [[rules]]
    convert = ["{head*}.experts.{e}.w1.weight", "{head*}.experts.{e}.w3.weight"]
    to = ["{head*}.experts.gate_up_proj"]
    steps = [{ step = "stack", dim = 0 }, { step = "concatenate", dim = 1 }]

The other keys are the attributes of the rules and steps of the same names. `Custom` is a function, and so in no file.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

from shardferry.convert import steps as kinds
from shardferry.convert.quant import MEMBERS
from shardferry.convert.rules import AddPrefix, Convert, Rename, Rule, StripPrefix
from shardferry.errors import InvalidInputError
from shardferry.format.problem import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardferry.convert.steps import Step

_Made = TypeVar("_Made")

_STEPS: dict[str, type[Step]] = {
    kind.__name__.lower(): kind
    for kind in (
        kinds.Stack,
        kinds.Unstack,
        kinds.Concatenate,
        kinds.Chunk,
        kinds.Split,
        kinds.Transpose,
        kinds.Permute,
        kinds.Reshape,
        kinds.Interleave,
        kinds.Deinterleave,
        kinds.Rope,
        kinds.Unrope,
        kinds.Pad,
        kinds.Unpad,
        kinds.Dequantize,
    )
}


def parse_rules(text: str, *, is_json: bool) -> tuple[Rule, ...]:
    """Return the rules a file holds.

    Args:
        text: Its content.
        is_json: Whether it is JSON; else it is TOML.

    Raises:
        InvalidInputError: If it is not well-formed, or something in it is no rule; names the rule by its number.
    """
    try:
        document = json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the rules are no {'JSON' if is_json else 'TOML'}: {error}") from error
    if not isinstance(document, dict) or set(document) != {"rules"} or not isinstance(document["rules"], list):
        raise InvalidInputError('the rules are not a table with one list "rules"')
    rules: list[Rule] = []
    for number, table in enumerate(document["rules"], 1):
        try:
            rules.append(_rule(table))
        except InvalidInputError as error:
            raise InvalidInputError(f"rule {number}: {error}") from error
    return tuple(rules)


def _rule(table: object) -> Rule:
    if not isinstance(table, dict):
        raise InvalidInputError(f"{shown(repr(table))} is no table")
    kind = next((key for key in ("rename", "add_prefix", "strip_prefix", "convert") if key in table), None)
    rest = {key: value for key, value in table.items() if key != kind}
    if kind == "rename":
        return _make(Rename, {"pattern": table[kind], **_renamed(rest, "to", "replacement")})
    if kind == "add_prefix":
        return _make(AddPrefix, {"prefix": table[kind], **rest})
    if kind == "strip_prefix":
        return _make(StripPrefix, {"prefix": table[kind], **rest})
    if kind == "convert":
        values = {"sources": table[kind], **_renamed(rest, "to", "targets")}
        if "steps" in values:
            values["steps"] = _listed(values["steps"], _step)
        if "back" in values:
            values["back"] = _rule(values["back"])
        return _make(Convert, values)
    raise InvalidInputError('it has none of the keys "rename", "add_prefix", "strip_prefix" and "convert"')


def _step(table: object) -> Step:
    if not isinstance(table, dict) or not isinstance(table.get("step"), str) or table["step"] not in _STEPS:
        raise InvalidInputError(f'{shown(repr(table))} is no step: it has a key "step", one of {", ".join(_STEPS)}')
    return _make(_STEPS[table["step"]], {key: value for key, value in table.items() if key != "step"})


def _listed(value: object, make: Callable[[object], Any]) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise InvalidInputError(f"{shown(repr(value))} is no list")
    return tuple(make(one) for one in value)


def _renamed(table: Mapping[str, object], old: str, new: str) -> dict[str, object]:
    if new in table:
        raise InvalidInputError(f'"{new}" is called "{old}" in a file')
    return {new if key == old else key: value for key, value in table.items()}


def _make(kind: type[_Made], values: Mapping[str, object]) -> _Made:
    """Return a rule or step with these attributes, after a look at each one's type."""
    known = {field.name: field for field in fields(cast("Any", kind))}
    for name, value in values.items():
        if name not in known:
            raise InvalidInputError(f'"{name}" is no key of {kind.__name__}: it has {", ".join(known)}')
        if not _fits(value, str(known[name].type)):
            raise InvalidInputError(
                f'"{name}" of {kind.__name__} is {shown(repr(value))}, which is no {known[name].type}'
            )
    missing = [name for name, field in known.items() if field.default is MISSING and name not in values]
    if missing:
        raise InvalidInputError(f"{kind.__name__} wants {', '.join(missing)}")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _fits(value: object, kind: str) -> bool:
    """Return whether a value of a file is what an attribute's type says."""
    plain = kind.removesuffix(" | None")
    match plain:
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "bool":
            return isinstance(value, bool)
        case "str":
            return isinstance(value, str)
        case "Scheme":
            return isinstance(value, str) and value in MEMBERS
        case "tuple[Step, ...]" | "Convert":
            return True  # made above
    inner, _, rest = plain.removeprefix("tuple[").removesuffix("]").partition(", ")
    sized = rest == "..." or (isinstance(value, list) and len(value) == 1 + rest.count(",") + 1)
    return isinstance(value, list) and sized and all(_fits(one, inner) for one in value)
