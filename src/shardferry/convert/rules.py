r"""Rules: how the names and shapes of a checkpoint become those of a model, as data, in both directions.

A sequence of rules is applied to the table of a checkpoint's tensors one after another, each to what the one before
has left: `Rename`, `AddPrefix` and `StripPrefix` change names, `Convert` makes tensors from others. What comes out
depends on the rules and on names, shapes and dtypes only, so every rank finds the same.

    rules = [
        StripPrefix("module."),
        Rename(r"\.block_sparse_moe\.", ".mlp.", back=(r"\.mlp\.", ".block_sparse_moe.")),
        Convert(
            ("{head*}.experts.{e}.w1.weight", "{head*}.experts.{e}.w3.weight"),
            ("{head*}.experts.gate_up_proj",),
            (Stack(0), Concatenate(1)),
        ),
    ]

`reverse_rules` returns the rules that lead back, for saving: applied to a model's tensors they give the checkpoint's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardferry.convert.names import Template, compile_pattern, written_only
from shardferry.convert.steps import Step, inverse
from shardferry.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Rename:
    r"""Replace what a regular expression matches in every name, as `re.sub` does.

    Attributes:
        pattern: The regular expression.
        replacement: What replaces it; groups as `\1`.
        back: Pattern and replacement that undo it, for saving; not needed for a pattern that is plain text.
        unless: Names that this regular expression matches stay as they are.
    """

    pattern: str
    replacement: str
    back: tuple[str, str] | None = None
    unless: str | None = None


@dataclass(frozen=True, slots=True)
class AddPrefix:
    """Put text in front of every name that does not begin with it, nor with one of `besides`."""

    prefix: str
    besides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StripPrefix:
    """Take text away from the front of every name that begins with it.

    Attributes:
        prefix: The text, e.g. `"module."` or `"_orig_mod."`.
        besides: How names begin that never had it, for the way back, e.g. `("lm_head.",)`.
    """

    prefix: str
    besides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Convert:
    """Make the tensors of some names from those of others.

    Names are templates: `{layer}` stands for what lies between two dots, `{head*}` for any text, also none. The rule
    is carried out once for every value of the fields that sources and targets share. A field that only sources have
    stands for a number, and collects a list in numeric order from 0, such as the experts of a layer; one that only
    targets have numbers what `Unstack` takes apart.

    Attributes:
        sources: What is read; taken out of the table.
        targets: What is made; put into the table. The steps must end with as many operands.
        steps: What happens to the sources, in order.
        partial: Leave a group alone of which some sources are not there, instead of refusing it.
        back: The rule that undoes it, where sources are regular expressions or a step has no inverse.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    partial: bool = False
    back: Convert | None = None

    def __post_init__(self) -> None:
        if not self.sources or not self.targets:
            raise InvalidInputError(f"{self} has no source or no target")
        written_only(self.targets)
        read, written = (
            {name for text in texts for name in Template(text).fields} for texts in (self.sources, self.targets)
        )
        for text in self.sources:
            fields = set(Template(text).fields)
            missing, lists = (read & written) - fields, fields - written
            if missing or len(lists) > 1:
                what = f"lacks {{{min(missing)}}}" if missing else f"has the fields {sorted(lists)} that no target has"
                raise InvalidInputError(f"source {text!r} {what}, so that it is not clear which belong together")
        for text in self.targets:
            unknown = set(Template(text).fields) - read
            if len(unknown) > 1:
                raise InvalidInputError(f"target {text!r} has the fields {sorted(unknown)} that no source has")


Rule = Rename | AddPrefix | StripPrefix | Convert


def reverse_rules(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the rules that undo a sequence of rules.

    What they give is left alone when they are applied once more.

    Raises:
        InvalidInputError: If it takes more to undo one than the rule says; names it.
    """
    return tuple(map(_reversed, reversed(rules)))


def _reversed(rule: Rule) -> Rule:
    match rule:
        case AddPrefix(prefix, besides):
            return StripPrefix(prefix, besides)
        case StripPrefix(prefix, besides):
            return AddPrefix(prefix, besides)
        case Rename(pattern, replacement, back):
            return _rename_back(pattern, replacement, back)
        case Convert(sources, targets, steps, partial, back):
            if back is not None:
                return back
            return Convert(targets, sources, tuple(inverse(step) for step in reversed(steps)), partial, rule)


def _rename_back(pattern: str, replacement: str, back: tuple[str, str] | None) -> Rename:
    if back is None:
        plain = pattern.replace(r"\.", ".")
        if (
            not plain
            or not replacement
            or compile_pattern(plain).groups
            or set(plain + replacement) & set(r"\^$*+?{}[]|()")
        ):
            raise InvalidInputError(
                f"renaming {pattern!r} to {replacement!r} cannot be undone without knowing more: give back=, the "
                "pattern and the replacement to go back"
            )
        back = (replacement.replace(".", r"\."), plain)
    return Rename(*back, back=(pattern, replacement), unless=pattern)
