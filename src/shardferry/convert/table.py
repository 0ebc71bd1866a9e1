"""Apply rules to the table of all tensors: the same on every rank, before anything is read.

A table maps names to tensors. Every rule takes tensors out and puts others in; two under one name are an error, and
so is a part that is missing. What does not fit is said with the names of the tensors that do not.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from shardferry.convert.names import Template, compile_pattern
from shardferry.convert.ops import leaves
from shardferry.convert.rules import AddPrefix, Convert, Rename, Rule, StripPrefix, reverse_rules
from shardferry.convert.steps import Operand, apply
from shardferry.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shardferry.convert.tensor import Tensor

# Sources named in an error; of a list of experts the first ones say which it is.
LISTED = 4


@dataclass(frozen=True, slots=True)
class Converted:
    """What rules have made of a table.

    Attributes:
        tensors: By new name; their leaves have the old names as keys.
        unmatched: Rules that changed nothing.
        left: Names that no rule has changed, though they belong to a tensor that a `Convert` has taken: its scales or
            its bias, which would now have a name that fits nothing.
    """

    tensors: dict[str, Tensor]
    unmatched: tuple[Rule, ...]
    left: tuple[str, ...]


class Conversions(Protocol):
    """A way from a checkpoint's tensors to a model's and back that is not written as rules, such as a library's own."""

    def to_model(self, tensors: Mapping[str, Tensor]) -> Converted:
        """Return a checkpoint's tensors as the model has them; those the model lacks keep their names."""
        ...

    def to_checkpoint(self, tensors: Mapping[str, Tensor]) -> Converted:
        """Return a model's tensors as the checkpoint has them."""
        ...

    def module_in_checkpoint(self, name: str) -> str:
        """Return how the checkpoint spells the name of a module, from the top, or a pattern of such names."""
        ...

    def ignores(self, name: str, is_ignored: Callable[[str], bool]) -> bool:
        """Return whether a name of the checkpoint is of no use on purpose; asked after `to_model`.

        Args:
            name: As the checkpoint spells it.
            is_ignored: Says it of a name as the model would spell it.
        """
        ...

    def loaded(self) -> None:
        """Take note that a model was filled by these conversions; called on every rank after a load."""
        ...


class _Group(NamedTuple):
    """What one target, or set of targets, is made from.

    Attributes:
        fields: What the shared fields stand for.
        parts: Per source of the rule the names found, by number; by -1 where there is no list.
    """

    fields: Mapping[str, str]
    parts: tuple[dict[int, str], ...]


def to_model(tensors: Mapping[str, Tensor], conversions: Sequence[Rule] | Conversions) -> Converted:
    """Return a checkpoint's tensors as a model has them.

    Raises:
        InvalidInputError: As `apply_rules`.
    """
    return apply_rules(tensors, conversions) if isinstance(conversions, Sequence) else conversions.to_model(tensors)


def to_checkpoint(tensors: Mapping[str, Tensor], conversions: Sequence[Rule] | Conversions) -> Converted:
    """Return a model's tensors as a checkpoint has them.

    Raises:
        InvalidInputError: As `apply_rules`, and if it takes more than a rule says to undo it.
    """
    if isinstance(conversions, Sequence):
        return apply_rules(tensors, reverse_rules(conversions))
    return conversions.to_checkpoint(tensors)


def module_in_checkpoint(name: str, conversions: Sequence[Rule] | Conversions) -> str:
    """Return how a checkpoint spells the name of a module, from the top, or a pattern of such names, of a model.

    Of rules, those that rename count: a `Convert` names tensors, of which a module may have several.
    """
    if not isinstance(conversions, Sequence):
        return conversions.module_in_checkpoint(name)
    weight = f"{name}.weight"  # what renamings are written for
    for rule in reverse_rules([rule for rule in conversions if not isinstance(rule, Convert)]):
        assert not isinstance(rule, Convert)
        weight = _renaming(rule)(weight)
    return weight.removesuffix(".weight")


def apply_rules(tensors: Mapping[str, Tensor], rules: Sequence[Rule]) -> Converted:
    """Return the tensors after all rules, in the order of those they are made of.

    Raises:
        InvalidInputError: If two tensors get one name, a part of a tensor is missing, or shapes or dtypes do not allow
            a step; names the tensors.
    """
    table = dict(tensors)
    unmatched: list[Rule] = []
    taken: set[str] = set()
    for rule in rules:
        if isinstance(rule, Convert):
            used = _convert(table, rule)
            taken |= used
            changed = bool(used)
        else:
            renamed = _renamed(table, _renaming(rule))
            changed = renamed.keys() != table.keys()
            table = renamed
        if not changed:
            unmatched.append(rule)
    return Converted(table, tuple(unmatched), left_behind(table, tensors, taken))


def describe_rule(rule: Rule) -> str:
    """Return a rule in few words, for reports."""
    match rule:
        case Convert(sources, targets):
            return f"{' + '.join(sources)} -> {' + '.join(targets)}"
        case Rename(pattern, replacement):
            return f"rename {pattern} -> {replacement}"
        case AddPrefix(prefix):
            return f"add prefix {prefix}"
        case StripPrefix(prefix):
            return f"strip prefix {prefix}"


def left_behind(table: Mapping[str, Tensor], tensors: Mapping[str, Tensor], taken: set[str]) -> tuple[str, ...]:
    """Return the names that nothing has changed though they belong to a tensor that was taken, such as its scales.

    Args:
        table: All tensors afterwards.
        tensors: All tensors before.
        taken: Names of those that others were made of.
    """
    return tuple(
        name
        for name, tensor in table.items()
        if tensors.get(name) is tensor
        and name not in taken
        and any(stem in taken or f"{stem}.weight" in taken for stem in _stems(name))
    )


def _renaming(rule: Rename | AddPrefix | StripPrefix) -> Callable[[str], str]:
    if isinstance(rule, AddPrefix):
        known = (rule.prefix, *rule.besides)
        return lambda name: name if name.startswith(known) else rule.prefix + name
    if isinstance(rule, StripPrefix):
        return lambda name: name.removeprefix(rule.prefix)
    pattern = compile_pattern(rule.pattern)
    unless = compile_pattern(rule.unless) if rule.unless is not None else None

    def rename(name: str) -> str:
        if unless is not None and unless.search(name):
            return name
        try:
            return pattern.sub(rule.replacement, name)
        except (re.error, IndexError) as error:
            raise InvalidInputError(f"{describe_rule(rule)}: {error}") from error

    return rename


def _renamed(table: Mapping[str, Tensor], rename: Callable[[str], str]) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for name, tensor in table.items():
        _put(renamed, rename(name), tensor)
    return renamed


def _put(table: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    if name in table:
        both = " and ".join(_sources((one,)) for one in (table[name], tensor))
        raise InvalidInputError(f"{both} would both become {name}: a tensor is made once. Change the rules")
    table[name] = tensor


def _convert(table: dict[str, Tensor], rule: Convert) -> set[str]:
    """Carry out a rule for every group of its sources; return the names it has taken."""
    groups = _groups(table, rule)
    made: list[tuple[str, Tensor]] = []
    used: set[str] = set()
    for group in groups:
        names = [name for part in group.parts for name in part.values()]
        try:
            made.extend(_make(table, rule, group))
        except InvalidInputError as error:
            sources = _sources([table[name] for name in names])
            raise InvalidInputError(f"{sources}: {error}. The rule is {describe_rule(rule)}") from error
        used.update(names)
    for name in used:
        del table[name]
    for name, tensor in made:
        _put(table, name, tensor)
    return used


def _groups(table: Mapping[str, Tensor], rule: Convert) -> list[_Group]:
    """Return the complete groups of a rule's sources, in the order of the table."""
    written = {field for text in rule.targets for field in Template(text).fields}
    templates = [_template(text, written) for text in rule.sources]
    shared = sorted(written.intersection(templates[0].fields))  # the same of every source, as `Convert` sees to
    found: dict[tuple[str, ...], tuple[dict[int, str], ...]] = defaultdict(lambda: tuple({} for _ in templates))
    plain = all(template.is_name for template in templates)
    for name in [name for name in dict.fromkeys(rule.sources) if name in table] if plain else table:
        for at, template in enumerate(templates):
            fields = template.match(name)
            if fields is not None:
                number = next((int(fields[field]) for field in template.numbers), -1)
                key = tuple([fields[field] for field in shared])
                _put_part(found[key][at], number, name)
    groups = [_Group(dict(zip(shared, key, strict=True)), parts) for key, parts in found.items()]
    return [group for group in groups if _is_complete(group, templates, rule)]


def _template(text: str, written: set[str]) -> Template:
    lists = frozenset(field for field in Template(text).fields if field not in written)
    return Template(text, lists)


def _put_part(part: dict[int, str], number: int, name: str) -> None:
    if number in part:
        raise InvalidInputError(f"{part[number]} and {name} are both number {number} of one list: nothing tells which")
    part[number] = name


def _is_complete(group: _Group, templates: Sequence[Template], rule: Convert) -> bool:
    """Return whether every source is there, every list without a gap.

    Raises:
        InvalidInputError: If not, and the rule does not leave such groups alone.
    """
    size = max((max(part) for part in group.parts if part), default=-1) + 1
    for part, template in zip(group.parts, templates, strict=True):
        numbers = range(size) if template.numbers else (-1,)
        if len(part) == len(numbers):
            continue
        if rule.partial:
            return False
        gap = next(number for number in numbers if number not in part)
        fields = {**group.fields, **dict.fromkeys(template.numbers, str(gap))}
        missing = template.write(fields) if not template.text.startswith("re:") else template.text
        there = next(name for some in group.parts for name in some.values())
        raise InvalidInputError(f"{missing} is missing, but {there} is there. The rule is {describe_rule(rule)}")
    return True


def _make(table: Mapping[str, Tensor], rule: Convert, group: _Group) -> Iterable[tuple[str, Tensor]]:
    operands: list[Operand] = []
    for part in group.parts:
        tensors = [table[part[number]] for number in sorted(part)]
        operands.append(tensors[0] if -1 in part else tensors)
    for step in rule.steps:
        operands = apply(step, operands, len(rule.targets))
    if len(operands) != len(rule.targets):
        raise InvalidInputError(f"the steps end with {len(operands)} tensors for {len(rule.targets)} targets")
    for operand, text in zip(operands, rule.targets, strict=True):
        template = Template(text)
        numbered = [field for field in template.fields if field not in group.fields]
        if isinstance(operand, list) != bool(numbered):
            what = "a list of tensors" if isinstance(operand, list) else "one tensor"
            raise InvalidInputError(f"the steps end with {what} for the target {text}")
        if isinstance(operand, list):
            for at, tensor in enumerate(operand):
                name = template.write({**group.fields, numbered[0]: str(at)})
                yield name, tensor._replace(name=name)
        else:
            name = template.write(group.fields)
            yield name, operand._replace(name=name)


def _sources(tensors: Sequence[Tensor]) -> str:
    """Return the names of the stored tensors that tensors are made of, the first ones of many."""
    names = list(dict.fromkeys(leaf.key for tensor in tensors for leaf in leaves(tensor.source)))
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _stems(name: str) -> Iterable[str]:
    """Yield what a name may belong to: all before each of the dots and underscores of its last two parts."""
    for at in range(len(name) - 1, 0, -1):
        if name[at] in "._":
            yield name[:at]
            if name[at] == "." and name.count(".", at) > 1:
                return
