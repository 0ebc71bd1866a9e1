"""`shardferry repack`: write a checkpoint anew, in other files, another dtype or under other names."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from shardferry.cli.progress import progress_bar
from shardferry.convert.rulefile import parse_rules
from shardferry.convert.rules import reverse_rules
from shardferry.convert.table import describe_rule
from shardferry.convert.tensor import stored_tensor
from shardferry.errors import InvalidInputError
from shardferry.execute.open import open_checkpoint
from shardferry.execute.repack import RepackAdapter, convert, rename
from shardferry.execute.save_job import SaveRequest, run_save
from shardferry.plan.packing import parse_size
from shardferry.storage.url import redact
from shardferry.transport.solo import SoloGroup
from shardferry.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from shardferry.convert.rules import Rule
    from shardferry.execute.report import SaveReport
    from shardferry.storage.base import Bytes
    from shardferry.transport.base import Group
    from shardferry.transport.bulk import Mover

DTYPES = ("F16", "BF16", "F32", "F64")
BUDGET_BYTES = 256 * MIB
TIMEOUT_S = 600.0


@click.command()
@click.argument("source")
@click.argument("target")
@click.option("--max-shard-size", default="5GB", show_default=True, help="Most bytes of tensors in a file.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Cast floating tensors to this dtype (needs torch).")
@click.option("--rename", "renames", multiple=True, metavar="REGEX=REPL", help="Rename tensors; may be repeated.")
@click.option(
    "--rules", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Convert by a file of rules."
)
@click.option("--reverse", is_flag=True, help="Undo the rules instead: from the model's names and shapes back.")
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Processes that share the work.")
@click.option("--on-existing", type=click.Choice(("refuse", "replace")), default="refuse", show_default=True)
@click.option("--no-strict", is_flag=True, help="Go on where only the strict rules of format and index are broken.")
@click.option("--variant", help="The variant to read, e.g. fp16 for model.fp16.safetensors.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
def repack(  # noqa: PLR0913 - the options of the command line
    *,
    source: str,
    target: str,
    max_shard_size: str,
    dtype: str | None,
    renames: tuple[str, ...],
    rules: Path | None,
    reverse: bool,
    ranks: int,
    on_existing: Literal["refuse", "replace"],
    no_strict: bool,
    variant: str | None,
    as_json: bool,
) -> None:
    """Write the checkpoint at SOURCE anew at TARGET: a standard directory of safetensors files.

    SOURCE may also be what torch's distributed checkpoint writes: rank files, or a folder with .metadata. Memory stays
    within a fixed budget however large the checkpoint is. Configuration and tokenizer files are copied. With --ranks,
    or under torchrun, several processes share the work; the result is the same.
    """
    if ranks > 1 and "RANK" not in os.environ:
        sys.exit(_run_ranks(ranks))
    index = open_checkpoint(source, strict=not no_strict, variant=variant)
    names = rename(list(index.tensors), [_rule(text) for text in renames])
    tensors = {new: stored_tensor(old, index.tensors[old]) for new, old in names.items()}
    converted = convert(tensors, _rules_of(rules, reverse=reverse))
    with _group() as group, progress_bar("repack") as on_progress:
        adapter = RepackAdapter(
            index,
            converted.tensors,
            rank=group.rank,
            world_size=group.world_size,
            cast=_cast() if dtype else None,
            open_mover=_open_mover,
        )
        request = SaveRequest(
            path=os.fspath(target),
            max_shard_bytes=parse_size(max_shard_size),
            on_existing=on_existing,
            dtype=dtype,
            replicas="trust",
            given_names=(),
            conversions=(),
            metadata={"format": "pt"},
            files_like=None,
            hub_limits=False,
            on_progress=on_progress if group.rank == 0 else None,
            budget_bytes=BUDGET_BYTES,
        )
        report = replace(
            run_save(group, adapter, request), unmatched_rules=tuple(map(describe_rule, converted.unmatched))
        )
    if group.rank == 0:
        click.echo(report.to_json() if as_json else _summary(report, target))


def _run_ranks(ranks: int) -> int:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run([*launcher, "-m", "shardferry.cli", *sys.argv[1:]], check=False).returncode  # noqa: S603


def _rule(text: str) -> tuple[str, str]:
    pattern, separator, replacement = text.partition("=")
    if not separator or not pattern:
        raise InvalidInputError(f"--rename {text!r} is not of the form REGEX=REPL")
    return pattern, replacement


def _rules_of(path: Path | None, *, reverse: bool) -> tuple[Rule, ...]:
    if path is None:
        if reverse:
            raise click.UsageError("--reverse undoes --rules, which is not given")
        return ()
    try:
        rules = parse_rules(path.read_text(encoding="utf-8"), is_json=path.suffix == ".json")
    except (InvalidInputError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"--rules {path}: {error}") from error
    return reverse_rules(rules) if reverse else rules


def _cast() -> Callable[[Bytes, str, Bytes, str], None]:
    from shardferry.torch.casting import cast_bytes

    return cast_bytes


def _open_mover(check: Callable[[], None]) -> AbstractContextManager[Mover]:
    from shardferry.torch.mover import open_mover

    return open_mover(check)


@contextmanager
def _group() -> Iterator[Group]:
    """Give the group of the launcher's ranks, or of this process alone."""
    if "RANK" not in os.environ:
        yield SoloGroup()
        return
    from shardferry.torch.group import launched_group

    with launched_group(TIMEOUT_S) as group:
        yield group


def _summary(report: SaveReport, target: str) -> str:
    total = report.total
    seconds = total.seconds["write"] + total.seconds["sync"]
    unmatched = "".join(f"\nno tensor matched: {rule}" for rule in report.unmatched_rules)
    size = format_bytes(total.bytes_written)
    return f"{redact(target)}: {size} in {len(report.files)} files, {seconds:.1f} s{unmatched}"
