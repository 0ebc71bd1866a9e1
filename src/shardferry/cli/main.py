"""The console script: finds the verb, turns errors into exit codes, shows warnings.

Exit codes: 0 it worked, 1 one of our errors or something wrong was found, 2 the command line itself is wrong. A verb's
module is imported only when the verb is used, so that `--help` is quick and no verb needs another's dependencies.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING

import click

import shardferry
from shardferry.errors import CheckpointWarning, ShardferryError

if TYPE_CHECKING:
    from collections.abc import Sequence

# One module per verb, holding a click command of the same name, and the line that `--help` shows.
VERBS = {
    "demo": "Load a real model three ways over 4 processes, and check what it computes.",
    "diff": "Compare two checkpoints: names, dtypes, shapes and bytes.",
    "inspect": "Show what is in a checkpoint: tensors, dtypes, shapes, bytes, files.",
    "plan": "Show how a job would read a checkpoint, what each way costs, and which one wins.",
    "probe": "Measure what the storage of a path costs, for loads to reckon with.",
    "repack": "Write a checkpoint anew: in other files, another dtype, or under other names.",
    "verify": "Check a checkpoint and print everything that is wrong with it.",
    "warm": "Bring what the ranks of this node will read into its page cache.",
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names of all verbs."""
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """Return the command of a verb, None if there is none of this name."""
        if cmd_name not in VERBS:
            return None
        command: click.Command = getattr(importlib.import_module(f"shardferry.cli.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - as above
        """Write the list of verbs without importing one."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(VERBS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(shardferry.__version__)
def commands() -> None:
    """Move models between Hugging Face safetensors checkpoints and the memory of many processes."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        arguments: Words after the program's name; None takes those of the process.

    Raises:
        SystemExit: Always, with the exit code.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", CheckpointWarning)
        warnings.showwarning = _show_warning
        try:
            code = commands.main(arguments, prog_name="shardferry", standalone_mode=False) or 0  # a verb returns None
        except click.ClickException as error:
            error.show()
            code = error.exit_code
        except click.Abort:
            click.echo("aborted", err=True)
            code = 1
        except ShardferryError as error:
            click.echo(f"{type(error).__name__}: {error}", err=True)
            code = 1
    sys.exit(code)


def _show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    label = "warning" if issubclass(category, CheckpointWarning) else category.__name__
    click.echo(f"{label}: {message}", err=True)
