"""What belongs beside the weights: a model's own configuration, and what the caller adds, such as a tokenizer."""

from __future__ import annotations

import copy
import json
import re
from typing import TYPE_CHECKING, Protocol

import torch

from shardferry.torch.entries import plain_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import nn

# FSDP2 puts this before the name of the class of a model it wraps.
_FSDP_PREFIX = "FSDP"
# Where a configuration of quantization lists modules by name (transformers 5.24, utils/quantization_config).
MODULE_LISTS = ("modules_to_not_convert", "modules_to_convert", "ignore", "exclude_modules")
# What a list may say: a name, or the end of one, between stars.
_LISTED = re.compile(r"(\*?\.?)([^*].*?)(\.?\*?)")
_NUMBER = re.compile(r"\.\d+(?=\.)")


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
        spell: Returns how the checkpoint spells the name, from the top, of a module of the model, or a pattern of such.
    """
    config = getattr(model, "config", None)
    if model is not None and config is not None and hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        if hasattr(config, "architectures"):
            config.architectures = [type(model).__name__.removeprefix(_FSDP_PREFIX)]
            config.dtype = str(dtype or getattr(model, "dtype", torch.float32)).removeprefix("torch.")
        config.save_pretrained(folder)
        if getattr(config, "quantization_config", None) is not None:
            _spell_modules(folder / "config.json", model, spell)
    generation = getattr(model, "generation_config", None)
    if generation is not None and hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)
    for extra in extras:
        extra.save_pretrained(folder)


def _spell_modules(path: Path, model: nn.Module, spell: Callable[[str], str]) -> None:
    """Give the modules that a written configuration of quantization lists the names that their weights have."""
    config = json.loads(path.read_text())
    said = config["quantization_config"]
    modules = [plain_name(name) for name, _ in model.named_modules() if name]
    for key in MODULE_LISTS:
        if isinstance(said.get(key), list):
            said[key] = [new for listed in said[key] for new in _spelled(listed, modules, spell)]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _spelled(listed: str, modules: Sequence[str], spell: Callable[[str], str]) -> tuple[str, ...]:
    """Return what a list says of the checkpoint that says `listed` of the model.

    What begins as the names of the model's modules do is a name from the top, though the module may be in another
    stage of a pipeline. Otherwise it is the end of names (`gate`), and becomes the ends, as long, of those names in
    the checkpoint. What is the end of none is left alone: a regular expression (`re:...`), `*`.

    Args:
        listed: A name of modules of the model, the end of one, or a pattern of either with `*` at its ends.
        modules: Names of the model's modules.
        spell: Returns how the checkpoint spells a name from the top.
    """
    found = _LISTED.fullmatch(listed)
    if found is None:
        return (listed,)
    head, stem, tail = found.groups()
    if not head and any(name.split(".")[0] == stem.split(".")[0] for name in modules):
        return (spell(stem) + tail,)
    length = stem.count(".") + 1
    # Modules that differ in their numbers alone are spelled alike: there may be thousands.
    befores = (name.removesuffix(stem) for name in modules if f".{name}".endswith(f".{stem}"))
    alike = dict.fromkeys(_NUMBER.sub(".0", before) + stem for before in befores)
    ends = dict.fromkeys(".".join(spell(name).split(".")[-length:]) for name in alike)
    return tuple(head + end + tail for end in ends) or (listed,)
