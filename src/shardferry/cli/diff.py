"""`shardferry diff`: whether two checkpoints hold the same tensors, and where they differ."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from shardferry.cli.progress import progress_bar
from shardferry.execute.diff import CheckpointDiff, diff_checkpoints, diff_headers
from shardferry.execute.open import open_checkpoint
from shardferry.format.problem import shown
from shardferry.storage.url import redact
from shardferry.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardferry.format.index import CheckpointIndex


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--headers-only", is_flag=True, help="Compare names, dtypes and shapes, and read no tensor.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.option("--no-strict", is_flag=True, help="Go on where only the strict rules of the format are broken.")
def diff(a: str, b: str, *, headers_only: bool, as_json: bool, no_strict: bool) -> None:
    """Compare the tensors of the checkpoints at A and B. Exits with 0 if they are the same, with 1 if not.

    Each may be a file, a folder, an index, or a URL of one. Names, dtypes, shapes and bytes are compared; the files
    that tensors lie in, their order and the metadata are not. Of a tensor whose bytes differ the first differing
    element is shown: how many elements lie before it, row-major, and its position. Tensors are read in pieces, however
    large they are.

    The JSON object has the keys a, b, equal, num_alike and num_bytes (of the tensors of the same dtype and shape),
    only_in_a, only_in_b, and by tensor dtypes and shapes (in A and B) and bytes (offset and position of the first
    differing element).
    """
    indexes = open_checkpoint(a, strict=not no_strict), open_checkpoint(b, strict=not no_strict)
    if headers_only:
        found = diff_headers(*indexes)
    else:
        with progress_bar("comparing") as show:
            found = diff_checkpoints(*indexes, on_progress=show)
    if as_json:
        click.echo(json.dumps({"a": redact(a), "b": redact(b), **_as_json(found, indexes[0])}))
    else:
        for line in _lines(found):
            click.echo(line)
        click.echo(_verdict(found, indexes[0], headers_only=headers_only))
    if not found.equal:
        sys.exit(1)


def _as_json(found: CheckpointDiff, a: CheckpointIndex) -> dict[str, object]:
    return {
        "equal": found.equal,
        "num_alike": len(found.alike),
        "num_bytes": _num_bytes(found, a),
        "only_in_a": found.only_in_a,
        "only_in_b": found.only_in_b,
        "dtypes": found.dtypes,
        "shapes": found.shapes,
        "bytes": {name: element._asdict() for name, element in found.contents.items()},
    }


def _lines(found: CheckpointDiff) -> Iterator[str]:
    """Yield a line for every difference."""
    for where, names in (("A", found.only_in_a), ("B", found.only_in_b)):
        yield from (f"only in {where}: {shown(name)}" for name in names)
    for name, (one, two) in found.dtypes.items():
        yield f"dtype: {shown(name)}: {one} in A, {two} in B"
    for name, shapes in found.shapes.items():
        yield f"shape: {shown(name)}: {list(shapes[0])} in A, {list(shapes[1])} in B"
    for name, (offset, position) in found.contents.items():
        yield f"bytes: {shown(name)}: the first to differ is element {offset}, at {list(position)}"


def _verdict(found: CheckpointDiff, a: CheckpointIndex, *, headers_only: bool) -> str:
    compared = "names, dtypes and shapes" if headers_only else format_bytes(_num_bytes(found, a))
    num_same = len(found.alike) - len(found.contents)
    if found.equal:
        return f"same: {num_same} tensors ({compared})"
    num_differing = len({*found.only_in_a, *found.only_in_b, *found.dtypes, *found.shapes, *found.contents})
    return f"different: {num_differing} tensors; same: {num_same}"


def _num_bytes(found: CheckpointDiff, a: CheckpointIndex) -> int:
    return sum(a.tensors[name].num_bytes for name in found.alike)
