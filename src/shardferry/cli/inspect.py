"""`shardferry inspect`: what is in a checkpoint, from its headers alone."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardferry.execute.open import open_checkpoint
from shardferry.format.problem import shown
from shardferry.storage.url import redact
from shardferry.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardferry.format.index import CheckpointIndex, TensorInfo

_NUMBER = re.compile(r"\d+")


class _Kind(NamedTuple):
    """What tensors of a repeated layer have in common; `pattern` is the name with `*` for every number."""

    pattern: str
    dtype: str
    shape: tuple[int, ...]


@click.command()
@click.argument("path")
@click.option("--tensors", "every_tensor", is_flag=True, help="List every tensor instead of a summary by layer.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
@click.option("--variant", help="The variant to open, e.g. fp16 for model.fp16.safetensors.")
@click.option("--no-strict", is_flag=True, help="Go on where only the strict rules of the format are broken.")
def inspect(path: str, *, every_tensor: bool, as_json: bool, variant: str | None, no_strict: bool) -> None:
    """Show what is in the checkpoint at PATH: a file, a folder, an index, or a URL. Only headers are read.

    The summary has one line per layer pattern: every number in a name becomes *, and tensors of the same pattern, dtype
    and shape are counted together. The JSON object has the keys path, num_tensors, num_bytes, tensors (dtype, shape,
    num_bytes, file, span, and parts for a tensor stored in several boxes), files (size, header_bytes, header_sha256),
    metadata and warnings; spans are [start, stop) in bytes of the file.
    """
    index = open_checkpoint(path, strict=not no_strict, variant=variant)
    if as_json:
        click.echo(json.dumps(_as_json(index, path)))
        return
    # A pipe gets whole lines however long, for grep; a terminal gets what fits.
    console = Console() if Console().is_terminal else Console(width=10_000)
    console.print(_tensor_table(index) if every_tensor else _summary_table(index))
    dtypes = Counter[str]()
    for info in index.tensors.values():
        dtypes[info.dtype] += info.num_bytes
    by_dtype = ", ".join(f"{dtype} {format_bytes(held)}" for dtype, held in dtypes.most_common())
    count = _counted(len(index.tensors), "tensor")
    click.echo(f"{count}, {format_bytes(index.num_bytes)} ({by_dtype or 'nothing'})")
    headers = sum(file.header_bytes for file in index.files.values())
    size = sum(file.size for file in index.files.values())
    click.echo(f"{_counted(len(index.files), 'file')}, {format_bytes(size)}, of it headers {format_bytes(headers)}")


def _as_json(index: CheckpointIndex, path: str) -> dict[str, object]:
    return {
        "path": redact(path),
        "num_tensors": len(index.tensors),
        "num_bytes": index.num_bytes,
        "tensors": {name: _tensor_as_json(info) for name, info in index.tensors.items()},
        "files": {
            name: {"size": file.size, "header_bytes": file.header_bytes, "header_sha256": file.header_sha256}
            for name, file in index.files.items()
        },
        "metadata": index.metadata,
        "warnings": index.warnings,
    }


def _tensor_as_json(info: TensorInfo) -> dict[str, object]:
    entry: dict[str, object] = {
        "dtype": info.dtype,
        "shape": info.shape,
        "num_bytes": info.num_bytes,
        "file": info.file,
        "span": info.span,
    }
    if info.parts:
        entry["parts"] = [
            {"file": part.file, "span": part.span, "offsets": part.offsets, "shape": part.shape} for part in info.parts
        ]
    return entry


def _summary_table(index: CheckpointIndex) -> Table:
    counts = Counter(_Kind(_NUMBER.sub("*", name), info.dtype, info.shape) for name, info in index.tensors.items())
    held = {_Kind(_NUMBER.sub("*", n), info.dtype, info.shape): info.num_bytes for n, info in index.tensors.items()}
    table = _empty_table("name", "count", "dtype", "shape", "bytes")
    for kind, count in counts.items():
        _add_row(table, kind.pattern, str(count), kind.dtype, _shape(kind.shape), format_bytes(count * held[kind]))
    return table


def _tensor_table(index: CheckpointIndex) -> Table:
    table = _empty_table("name", "dtype", "shape", "bytes", "file")
    for name, info in index.tensors.items():
        files: Sequence[str] = [part.file for part in info.parts] or [info.file]
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        _add_row(table, name, info.dtype, _shape(info.shape), format_bytes(info.num_bytes), shown(files[0]) + more)
    return table


def _empty_table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(
            heading, overflow="fold", justify="right" if heading in ("count", "shape", "bytes") else "left"
        )
    return table


def _add_row(table: Table, name: str, *cells: str) -> None:
    """Add a row; names are text, never markup, and cannot control the terminal."""
    table.add_row(Text(shown(name)), *(Text(cell) for cell in cells))


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
