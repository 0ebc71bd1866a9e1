"""`shardferry verify`: everything that is wrong with a checkpoint, from its headers and its index alone."""

from __future__ import annotations

import json
import sys

import click

from shardferry.execute.open import survey_checkpoint, survey_surroundings
from shardferry.storage.url import redact

# What a severity is called in the output; only a warning leaves the check passed.
_LABELS = {"missing": "missing", "fatal": "error", "strict": "error", "verify": "error", "warning": "warning"}


@click.command()
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.option("--variant", help="The variant to check, e.g. fp16 for model.fp16.safetensors.")
def verify(path: str, *, as_json: bool, variant: str | None) -> None:
    """Check the checkpoint at PATH and print everything that is wrong with it. Exits with 1 if anything is.

    Stricter than loading: leftover shard files that the index does not name, and what an interrupted save has left,
    fail the check. Only headers and the index are read, so changed tensor bytes are not noticed. The JSON object has
    the keys path, ok, num_tensors, num_files and problems (severity: missing, fatal, strict, verify or warning; file;
    message). What has severity strict still loads with strict=False, what has severity verify loads as it is.
    """
    index, problems = survey_checkpoint(path, variant=variant)
    problems += survey_surroundings(path)
    wrong = sum(problem.severity != "warning" for problem in problems)
    if as_json:
        result = {
            "path": redact(path),
            "ok": wrong == 0,
            "num_tensors": len(index.tensors),
            "num_files": len(index.files),
            "problems": [problem._asdict() for problem in problems],
        }
        click.echo(json.dumps(result))
    else:
        for problem in problems:
            click.echo(f"{_LABELS[problem.severity]}: {problem.message}")
        verdict = f"{wrong} wrong" if wrong else "ok"
        click.echo(f"{verdict} (files read: {len(index.files)}, tensors found: {len(index.tensors)})")
    if wrong:
        sys.exit(1)
