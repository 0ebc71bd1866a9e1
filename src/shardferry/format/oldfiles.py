"""Which entries of a directory make up the checkpoint that a save would replace.

That is the single file, the index and the numbered shard files of one stem and variant, and whatever the index names.
Everything else is foreign to the save, other variants, adapters and other models' files too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

# checkpoint: files of the same stem and variant are there. foreign: something else is.
Content = Literal["absent", "empty", "foreign", "checkpoint"]


@dataclass(frozen=True, slots=True)
class Naming:
    """How the files of one checkpoint are called.

    Attributes:
        stem: `"model"`, `"diffusion_pytorch_model"` and so on.
        variant: E.g. `"fp16"` for `model.fp16.safetensors`; None for the plain files.
    """

    stem: str = "model"
    variant: str | None = None

    @property
    def single(self) -> str:
        """Name of the file of a checkpoint that has only one."""
        return f"{self.stem}{self._part}.safetensors"

    @property
    def index(self) -> str:
        """Name of the index."""
        return f"{self.stem}.safetensors.index{self._part}.json"

    @property
    def _part(self) -> str:
        return f".{self.variant}" if self.variant else ""


def old_files(entries: Iterable[str], naming: Naming, promised: Iterable[str]) -> tuple[str, ...]:
    """Return the files of the old checkpoint in the order in which they must disappear.

    The files that make a reader open the others come first: without them it finds no checkpoint.

    Args:
        entries: Names of what lies directly in the directory.
        naming: How the checkpoint's files are called.
        promised: Files that the index names, relative to the directory.

    Examples:
        >>> names = ["config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"]
        >>> old_files(names, Naming(), ["model-00001-of-00001.safetensors"])
        ('model.safetensors.index.json', 'model-00001-of-00001.safetensors')
    """
    there = set(entries)
    first = [name for name in (naming.index, naming.single) if name in there]
    numbered = {name for name in there if is_checkpoint_file(name, naming)}
    return (*first, *sorted((numbered | set(promised)).difference(first)))


def is_checkpoint_file(name: str, naming: Naming) -> bool:
    """Return whether a file of this name means that there is a checkpoint already.

    Examples:
        >>> [is_checkpoint_file(name, Naming()) for name in ("model-00001-of-00002.safetensors", "mtp.safetensors")]
        [True, False]
    """
    if name in (naming.single, naming.index):
        return True
    stem, number = re.escape(naming.stem), "-[0-9]{5,9}-of-[0-9]{5,9}"
    if naming.variant is None:
        return re.fullmatch(rf"{stem}{number}\.safetensors", name) is not None
    variant = re.escape(naming.variant)  # before or after the number: both are in use
    return re.fullmatch(rf"{stem}(?:\.{variant}{number}|{number}\.{variant})\.safetensors", name) is not None
