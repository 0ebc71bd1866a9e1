"""What `conversions=` of a load or a save stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

from shardferry.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from shardferry.convert.rules import Rule
    from shardferry.convert.table import Conversions

    GivenConversions = Sequence[Rule] | Conversions | Literal["auto"]


def chosen_conversions(given: GivenConversions, model: nn.Module | None) -> tuple[Rule, ...] | Conversions:
    """Return rules, or what takes their place.

    Raises:
        InvalidInputError: If the model is to say them and there is none, or it is none of transformers.
    """
    if given != "auto":
        return tuple(cast("Sequence[Rule]", given)) if isinstance(given, Sequence) else given
    # Only here, because it takes the adapter of a library that need not be installed.
    from shardferry.torch.transformers.family import family_conversions  # noqa: PLC0415

    if model is None:
        raise InvalidInputError("conversions='auto' asks the model for its family: give model=, or rules")
    return family_conversions(model)


def ignorable_by_either_name(
    ignorable: Callable[[str], bool], conversions: tuple[Rule, ...] | Conversions
) -> Callable[[str], bool]:
    """Return whether a name is of no use to a model, as the checkpoint spells it or as the model would."""
    if isinstance(conversions, tuple):
        return ignorable
    return lambda name: ignorable(name) or conversions.ignores(name, ignorable)
