"""Loaders called in turns: each in processes of its own, which stay, with memory that exists for whoever is called.

Answers no question itself. A call has two halves: every rank prepares it, off the clock; then memory is freed for it
and the ranks go. A script has its loaders called by `take_turns`; each of their processes takes its calls from `Calls`.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

import torch.distributed as dist
from benchmarks.awake import AwakeMemory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NUM_RANKS = 4
MAX_CALL_S = 300
LOOK_S = 0.5


class Workers:
    """The processes of one loader, under torch's launcher; they wait until they are called."""

    def __init__(self, module: str, arguments: Sequence[str], memory: AwakeMemory) -> None:
        """Start them.

        Args:
            module: What each of them runs.
            arguments: What that is told, before the paths of the two pipes that it hands to `Calls`.
            memory: Gives every call memory that exists.
        """
        self._name = " ".join((module, *arguments))
        self._memory = memory
        self._folder = tempfile.TemporaryDirectory()
        orders, answers = (Path(self._folder.name) / name for name in ("orders", "answers"))
        for pipe in (orders, answers):
            os.mkfifo(pipe)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
        command += ["-m", module, *arguments, str(orders), str(answers)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._launcher = subprocess.Popen(command, env=environment)
        # Opened for both, so that nobody waits for the other end here.
        self._orders, self._answers = (os.open(pipe, os.O_RDWR) for pipe in (orders, answers))

    def __enter__(self) -> Self:
        return self

    def call(self, order: str, free_bytes: int) -> None:
        """Have them called once with so much memory that exists; returns when all ranks are done."""
        os.write(self._orders, f"{order}\n".encode())
        self._wait()
        self._memory.free(free_bytes)
        os.write(self._orders, b"go\n")
        self._wait()
        self._memory.hold()

    def __exit__(self, *_: object) -> None:
        os.write(self._orders, b"\n")  # nothing to do any more
        try:
            self._launcher.wait(30)
        except subprocess.TimeoutExpired:
            self._launcher.terminate()
        for pipe in (self._orders, self._answers):
            os.close(pipe)
        self._folder.cleanup()

    def _wait(self) -> None:
        deadline = time.monotonic() + MAX_CALL_S
        while not select.select([self._answers], [], [], LOOK_S)[0]:
            if self._launcher.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self._name} has failed, see above, or did not end within {MAX_CALL_S} s")
        os.read(self._answers, 100)


def take_turns(
    module: str, starts: Sequence[Sequence[str]], schedule: Sequence[str], *, rounds: int, free_bytes: int
) -> None:
    """Call every loader as `schedule` says in each round, in an order that rotates.

    Args:
        module: What the processes run.
        starts: What those of each loader are told when they start.
        schedule: How each is called in a round: a word, which it is told with the round. Before all it is called with
            `first -1`, which pays for imports and a cold allocator.
        rounds: How many.
        free_bytes: Bytes of memory that exist for a call.
    """
    memory = AwakeMemory()
    with ExitStack() as stack:
        workers = [stack.enter_context(Workers(module, arguments, memory)) for arguments in starts]
        for each in workers:
            each.call("first -1", free_bytes)
        for round_ in range(rounds):
            turn = round_ % len(workers)
            for each in (*workers[turn:], *workers[:turn]):
                for word in schedule:
                    each.call(f"{word} {round_}", free_bytes)
            print(f"round {round_} done", flush=True)


class Calls:
    """What one rank of the workers is told; collective. Needs the default process group."""

    def __init__(self, orders: Path, answers: Path) -> None:
        """Listen on rank 0, who tells the others."""
        self._orders: IO[str] | None = orders.open() if dist.get_rank() == 0 else None
        self._answers = answers

    def __iter__(self) -> Iterator[list[str]]:
        """Yield the words of every call until there are no more."""
        while words := self._next():
            yield words
            self._answer()

    def go(self) -> None:
        """Say that everything is prepared, and return, on all ranks at once, when it is time to load."""
        self._answer()
        self._next()
        dist.barrier()

    def _answer(self) -> None:
        dist.barrier()
        if self._orders is not None:
            self._answers.write_text("done\n")

    def _next(self) -> list[str]:
        told = [self._orders.readline().split() if self._orders is not None else None]
        dist.broadcast_object_list(told)
        return told[0] or []
