"""What belongs beside the weights: a model's own configuration, and what the caller adds, such as a tokenizer."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import nn

# FSDP2 puts this before the name of the class of a model it wraps.
_FSDP_PREFIX = "FSDP"
# Where a configuration of quantization lists modules by name (transformers 5.24, utils/quantization_config).
MODULE_LISTS = ("modules_to_not_convert", "modules_to_convert", "ignore", "exclude_modules")


class Savable(Protocol):
    """What writes its own files into a folder: a tokenizer, a processor, a configuration."""

    def save_pretrained(self, save_directory: Path, /) -> object:
        """Write the files."""


def write_extras(
    folder: Path,
    model: nn.Module | None,
    extras: Sequence[Savable],
    dtype: torch.dtype | None,
    spell: Callable[[str], str],
) -> None:
    """Write the configuration of a transformers-like model, and everything in `extras`, into a folder.

    The written configuration names the model's class and the dtype of its weights, as transformers' own
    `save_pretrained` writes them (5.24): readers choose the class by it.

    Args:
        folder: Exists and is empty.
        model: Whose `config` and `generation_config` are written, if it has them.
        extras: What else there is.
        dtype: What floating weights are cast to; None if they keep theirs.
        spell: Returns how the checkpoint spells a module, or a pattern of modules, of the model.
    """
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        if hasattr(config, "architectures"):
            config.architectures = [type(model).__name__.removeprefix(_FSDP_PREFIX)]
            config.dtype = str(dtype or getattr(model, "dtype", torch.float32)).removeprefix("torch.")
        config.save_pretrained(folder)
        if getattr(config, "quantization_config", None) is not None:
            _spell_modules(folder / "config.json", spell)
    generation = getattr(model, "generation_config", None)
    if generation is not None and hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)
    for extra in extras:
        extra.save_pretrained(folder)


def _spell_modules(path: Path, spell: Callable[[str], str]) -> None:
    """Give the modules that a written configuration of quantization lists the names that their weights have."""
    config = json.loads(path.read_text())
    said = config["quantization_config"]
    for key in MODULE_LISTS:
        if isinstance(said.get(key), list):
            said[key] = [spell(name) for name in said[key]]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
