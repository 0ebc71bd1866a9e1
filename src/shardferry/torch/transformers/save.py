"""Save a model of transformers as a checkpoint that transformers reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Unpack

from shardferry.errors import InvalidInputError
from shardferry.torch.save import save_model
from shardferry.torch.transformers.family import family_conversions

if TYPE_CHECKING:
    import os

    from transformers import PreTrainedModel

    from shardferry.execute.report import SaveReport
    from shardferry.torch.save import SaveOptions


def save_pretrained(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    on_existing: Literal["refuse", "replace"] = "refuse",
    layout: Literal["hub", "model"] = "hub",
    **options: Unpack[SaveOptions],
) -> SaveReport:
    """Save a sharded model as a checkpoint with its configuration, which `from_pretrained` of transformers reads.

    Collective. Nothing is gathered, and the files appear all at once; see `shardferry.torch.save_model`.

    Args:
        model: Sharded or whole.
        path: Directory of the checkpoint.
        max_shard_size: Most bytes of tensors in a file.
        on_existing: What to do about a checkpoint that is there.
        layout: `"hub"` for the names and shapes the family's checkpoints have on the Hub: those of the checkpoint the
            model was filled from. `"model"` for the model's own, as transformers holds it in memory; it reads both.
        **options: See `shardferry.torch.SaveOptions`; `conversions`, if given, are used instead of the layout's.

    Raises:
        InvalidInputError: If the layout is neither, or the family's conversions cannot be undone.
        ShardferryError: As `shardferry.torch.save_model`.
    """
    if layout not in {"hub", "model"}:
        raise InvalidInputError(f"layout is {layout!r}; it must be 'hub' or 'model'")
    if "conversions" not in options:
        options["conversions"] = family_conversions(model) if layout == "hub" else ()
    return save_model(model, path, max_shard_size=max_shard_size, on_existing=on_existing, **options)
