"""What belongs beside the weights, on the rank that publishes: written aside, because names are wanted early."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol

from shardferry.errors import InvalidInputError
from shardferry.format.oldfiles import Naming, is_checkpoint_file
from shardferry.format.problem import listed

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardferry.plan.packing import CheckpointLayout


class Takes(Protocol):
    """What small files are put into."""

    def add(self, name: str, data: bytes) -> None:
        """Write a file that belongs beside the weights."""
        ...


class Extras:
    """Small files in a folder of their own until they are staged.

    Attributes:
        names: Relative to the checkpoint, sorted.
    """

    def __init__(self, write_extras: Callable[[Path], None], layout: CheckpointLayout, naming: Naming) -> None:
        """Have the files written.

        Raises:
            InvalidInputError: If there is a file of weights among them.
        """
        self._folder = TemporaryDirectory(prefix="shardferry-")
        root = Path(self._folder.name)
        try:
            write_extras(root)
            self.names = tuple(sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()))
            _check_names(self.names, layout, naming)
        except BaseException:
            self.remove()
            raise

    def stage(self, publication: Takes) -> None:
        """Put the files beside the weights, which are still staged."""
        for name in self.names:
            publication.add(name, Path(self._folder.name, name).read_bytes())

    def remove(self) -> None:
        """Remove the folder; what has been staged stays."""
        self._folder.cleanup()


def _check_names(names: tuple[str, ...], layout: CheckpointLayout, naming: Naming) -> None:
    taken = {file.name for file in layout.files}
    wrong = [name for name in names if name in taken or is_checkpoint_file(name, naming)]
    if wrong:
        raise InvalidInputError(
            f"what is to be saved beside the weights has weights of its own: {listed(wrong, 5)}. Give what has none, "
            "such as a tokenizer"
        )
