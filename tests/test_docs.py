"""Runs what the README and the docs show: a reader who copies a block must get what the page says.

Per page, in order, in one new folder and one namespace:

- a `python` block is executed; one with `title="NAME.py"` is written to that file instead;
- a `console` block's lines that start with `$ ` are run, and where lines follow, they must be what is printed
  (spaces do not matter, `...` stands for anything). A command that should fail ends in `# exits with N`.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PROGRAMS = ("shardferry", "torchrun", "python")
BLOCK = re.compile(r"^```(?P<language>python|console)(?P<options>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    """One fenced block of a page."""

    language: str
    title: str | None
    text: str
    line: int


class Command(NamedTuple):
    """One command of a console block, with what the page says it prints."""

    line: str
    exit_code: int
    output: str


def blocks(page: Path) -> tuple[Block, ...]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        title = re.search(r'title="([^"]+)"', match["options"])
        line = text.count("\n", 0, match.start("text"))
        found.append(Block(match["language"], title[1] if title else None, match["text"], line))
    return tuple(found)


def commands(text: str) -> Iterator[Command]:
    for piece in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, output = piece.partition("\n")
        fails = re.search(r"# exits with (\d+)$", line)
        yield Command(line, int(fails[1]) if fails else 0, output)


PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if blocks(page)]


@pytest.fixture
def _one_process_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment that torchrun gives to a job of one process, for blocks that join a process group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    yield
    if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
        sys.modules["torch.distributed"].destroy_process_group()


@pytest.mark.usefixtures("_one_process_job")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_the_page_shows_works(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "console":
            for command in commands(block.text):
                run_command(command)
        elif block.title is not None:
            Path(block.title).write_text(block.text, encoding="utf-8")
        else:
            # Empty lines in front make a traceback show the page's own line number.
            code = compile("\n" * block.line + block.text, str(page), "exec", dont_inherit=True)
            exec(code, namespace)  # noqa: S102 - running the page is the point


def run_command(command: Command) -> None:
    program, *arguments = shlex.split(command.line, comments=True)
    assert program in PROGRAMS, f"{command.line}: pages may only run {', '.join(PROGRAMS)}"
    path = Path(sys.executable).with_name(program)
    # Without it torchrun takes a port that is the same for all, so that no two may run at the same time.
    environment = {**os.environ, "PET_STANDALONE": "1"}
    run = subprocess.run([path, *arguments], capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == command.exit_code, f"$ {command.line}\n{run.stdout}{run.stderr}"
    if command.output.strip():
        # What torchrun and the libraries say on stderr is not the page's matter, unless there is nothing else.
        same = doctest.OutputChecker().check_output(command.output, run.stdout or run.stderr, LOOSE)
        assert same, f"$ {command.line}\nprints\n{run.stdout}{run.stderr}\nand the page says\n{command.output}"
