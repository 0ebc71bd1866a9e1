"""Save a model of transformers as a checkpoint that transformers reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Unpack

from shardferry.torch.save import save_model

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
    **options: Unpack[SaveOptions],
) -> SaveReport:
    """Save a sharded model as a checkpoint with its configuration, which `from_pretrained` of transformers reads.

    Collective. Nothing is gathered, and the files appear all at once; see `shardferry.torch.save_model`.
    """
    return save_model(model, path, max_shard_size=max_shard_size, on_existing=on_existing, **options)
