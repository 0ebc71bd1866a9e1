"""Match what a model wants with what a checkpoint holds, by name, shape and dtype.

Names that do not fit are collected by class, not raised one by one: the lists of all ranks make one error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardferry.collector import paused_collector
from shardferry.convert.ops import Expression, Stored, dtypes_of, leaves
from shardferry.convert.table import to_model
from shardferry.convert.tensor import stored_tensors
from shardferry.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from shardferry.convert.rules import Rule
    from shardferry.convert.table import Conversions
    from shardferry.format.index import CheckpointIndex
    from shardferry.plan.target import Target

FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
# Integers that a framework without 64 bits can hold only if every value fits.
NARROWED = {"I64": "I32", "U64": "U32"}
Cast = bool | Literal["integers"]
# Names listed per class in an error; the rest is counted.
LISTED = 20

# What DDP, torch.compile, FSDP1 and activation checkpointing put into names.
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

_NUMBER = re.compile(r"([0-9]+)")

_CLASSES = {
    "missing": "the model wants them, the checkpoint lacks them; strict=False loads the rest and reports them",
    "unexpected": "the checkpoint has them, no rank's model does; strict=False loads the rest and reports them",
    "shape": "the shapes differ",
    "dtype": "the dtypes differ and are not cast",
    "unfilled": "on the meta device, but not saved by the model (non-persistent buffers, or taken out by a hook), so "
    "no checkpoint fills them; compute them first, the buffers of a transformers model with "
    "shardferry.torch.transformers.initialize_buffers(model)",
}


@dataclass(slots=True)
class Problems:
    """Names that do not fit, by class; a name may carry an explanation after a colon."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shape: list[str] = field(default_factory=list)
    dtype: list[str] = field(default_factory=list)
    unfilled: list[str] = field(default_factory=list)


class Match(NamedTuple):
    """A target and what fills it.

    Attributes:
        target: What the model wants.
        source: How it is made of stored tensors.
        cast: Whether its dtype is not the stored one.
    """

    target: Target
    source: Expression
    cast: bool


@dataclass(frozen=True, slots=True)
class Matching:
    """What one rank loads, and what does not fit.

    Attributes:
        matches: Targets that can be filled.
        used: Checkpoint names they are made of.
        ignored: Checkpoint names this rank's model does not load on purpose.
        problems: What does not fit on this rank.
        unmatched: Conversion rules that have changed nothing; the same on every rank.
    """

    matches: tuple[Match, ...]
    used: frozenset[str]
    ignored: frozenset[str]
    problems: Problems
    unmatched: tuple[Rule, ...] = ()


class Rules(NamedTuple):
    """How a model and a checkpoint are matched.

    Attributes:
        sources: How targets are made of stored tensors, by target name; a name not listed is stored under itself.
        cast: Whether a floating dtype may be cast to the model's; `"integers"`: and 64-bit integers to 32 bits.
        ignorable: Whether a name is of no use to this model on purpose.
        conversions: How names and shapes of the checkpoint become the model's, before names are matched.
        skip_mismatched: Whether a tensor of another shape counts as missing, instead of as an error of its own.
    """

    sources: Mapping[str, Expression]
    cast: Cast
    ignorable: Callable[[str], bool]
    conversions: tuple[Rule, ...] | Conversions = ()
    skip_mismatched: bool = False


@paused_collector()
def match_targets(index: CheckpointIndex, targets: Sequence[Target], rules: Rules) -> Matching:
    """Return what fills each target, and every name that does not fit.

    Raises:
        InvalidInputError: If a conversion rule does not fit the checkpoint; names the tensors.
    """
    converted = to_model(stored_tensors(index.tensors), rules.conversions) if rules.conversions else None
    made = {} if converted is None else {name: tensor.source for name, tensor in converted.tensors.items()}
    table = _Table(index, {**made, **rules.sources}, made if converted is not None else index.tensors)
    problems = Problems()
    matches: list[Match] = []
    used: set[str] = set()
    others: set[str] = set()
    for target in targets:
        found = _find(table, target)
        if found is None:
            problems.missing.append(target.names[0])
            continue
        name, source = found
        others.update(other for other in target.names if other != name)
        names = {leaf.key for leaf in leaves(source)}
        used |= names
        stored = dtypes_of(source, lambda key: index.tensors[key].dtype)
        if _fits(target, source, stored, rules, problems):
            matches.append(Match(target, source, stored != {target.dtype}))
    unwanted = {name for name in table.names if name in others or rules.ignorable(name)}
    ignored = {key for name in unwanted for key in table.keys(name)} - used
    unmatched = () if converted is None else converted.unmatched
    return Matching(tuple(matches), frozenset(used), frozenset(ignored), problems, unmatched)


def conversions_key(conversions: tuple[Rule, ...] | Conversions) -> str:
    """Return a short text that is the same on ranks that convert alike."""
    if not isinstance(conversions, tuple):
        return type(conversions).__name__
    words = re.sub(r" at 0x[0-9a-f]+", "", repr(conversions))  # where a function lies in memory, another on every rank
    return blake2b(words.encode(), digest_size=8).hexdigest() if conversions else ""


def merge_problems(parts: Sequence[Problems]) -> Problems:
    """Return the lists of all ranks as one, each name once, in natural order."""
    merged = Problems()
    for kind in _CLASSES:
        names = {name for part in parts for name in getattr(part, kind)}
        setattr(merged, kind, sorted(names, key=natural_key))
    return merged


def raise_problems(problems: Problems, *, strict: bool) -> None:
    """Raise one error for everything that stands in the way of a load.

    Raises:
        MismatchError: Listing the names by class.
    """
    tolerated = () if strict else ("missing", "unexpected")
    lines = [
        _line(kind, getattr(problems, kind)) for kind in _CLASSES if getattr(problems, kind) and kind not in tolerated
    ]
    if lines:
        message = "model and checkpoint do not fit, nothing was read:\n" + "\n".join([*lines, *_wrapper_hint(problems)])
        raise MismatchError(message)


def natural_key(name: str) -> str:
    """Return a sort key under which layer 2 comes before layer 10.

    Names that differ only in leading zeros have equal keys. The key is text, because sorting a million tuples takes
    six times as long.
    """
    parts = _NUMBER.split(name)
    for i in range(1, len(parts), 2):
        digits = parts[i].lstrip("0")
        parts[i] = f"\0{chr(len(digits))}{digits}"  # NUL puts a number before any text
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class _Table:
    """What there is to match with.

    Attributes:
        index: The checkpoint.
        sources: How tensors are made, by name, those that rules have made and those a caller gives.
        names: The names the checkpoint's tensors have after all rules.
    """

    index: CheckpointIndex
    sources: Mapping[str, Expression]
    names: Collection[str]

    def find(self, name: str) -> Expression | None:
        """Return how a tensor is made; None if the checkpoint does not have all of it."""
        if name in self.sources:
            source = self.sources[name]
            return source if all(leaf.key in self.index.tensors for leaf in leaves(source)) else None
        return Stored(name, self.index.tensors[name].shape) if name in self.names else None

    def keys(self, name: str) -> set[str]:
        """Return the checkpoint's names for what a name is made of."""
        return {leaf.key for leaf in leaves(self.sources[name])} if name in self.sources else {name}


def _wrapper_hint(problems: Problems) -> list[str]:
    """Return what to do if names differ only by what a wrapper has put into them."""
    missing, unexpected = set(problems.missing), set(problems.unexpected)
    for wrapper in WRAPPERS:
        if any(name.replace(wrapper, "") in missing for name in unexpected if wrapper in name):
            what = f"the checkpoint's names have {wrapper} of a wrapper, the model's have not"
            return [
                f"  {what}: load with conversions=[Rename({re.escape(wrapper)!r}, '')], shardferry.conversions.Rename"
            ]
        if any(name.replace(wrapper, "") in unexpected for name in missing if wrapper in name):
            what = f"the model's names have {wrapper} of a wrapper, the checkpoint's have not: give the model inside it"
            return [f"  {what}, or conversions=[AddPrefix({wrapper!r})] if all names begin with it"]
    return []


def _find(table: _Table, target: Target) -> tuple[str, Expression] | None:
    for name in target.names:
        source = table.find(name)
        if source is not None:
            return name, source
    return None


def _fits(target: Target, source: Expression, stored: set[str], rules: Rules, problems: Problems) -> bool:
    if target.shape is not None and target.shape != source.shape:
        kind = problems.missing if rules.skip_mismatched else problems.shape
        kind.append(f"{target.names[0]}: model {list(target.shape)}, checkpoint {list(source.shape)}")
        return False
    wrong = sorted(dtype for dtype in stored if not _is_taken(dtype, target.dtype, rules))
    if wrong:
        problems.dtype.append(f"{target.names[0]}: model {target.dtype}, checkpoint {', '.join(wrong)}")
        return False
    return True


def _is_taken(stored: str, wanted: str, rules: Rules) -> bool:
    """Return whether a stored dtype is the one that is wanted, or may be cast to it."""
    if stored == wanted or (rules.cast == "integers" and NARROWED.get(stored) == wanted):
        return True
    return bool(rules.cast) and {stored, wanted} <= FLOATS


def _line(kind: str, names: list[str]) -> str:
    more = f"\n    and {len(names) - LISTED} more" if len(names) > LISTED else ""
    listed = "".join(f"\n    {name}" for name in names[:LISTED])
    return f"  {kind} ({len(names)}; {_CLASSES[kind]}):{listed}{more}"
