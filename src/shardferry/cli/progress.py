"""A progress bar on a terminal, and nothing elsewhere."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardferry.execute.report import Progress


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[Progress], None] | None]:
    """Give a callback that draws how far a load or a save is; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (
        f"{title} [progress.percentage]{{task.percentage:>3.0f}}%",
        BarColumn(),
        DownloadColumn(binary_units=True),
    )
    with Bar(*columns, TransferSpeedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def show(step: Progress) -> None:
            bar.update(task, total=step.bytes_total, completed=step.bytes_done)

        yield show
