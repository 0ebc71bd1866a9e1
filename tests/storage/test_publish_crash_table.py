"""A save is ended between any two changes it makes, in every protocol, over every kind of target."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.checkpoints import INDEX, write_files
from tests.storage.saving import (
    LACKS,
    NAMING,
    SINGLE,
    DiesAt,
    Killed,
    checkpoint,
    leftovers,
    limited,
    save,
    seen_by_others,
    seen_by_us,
)

from shardferry.format.oldfiles import is_checkpoint_file
from shardferry.storage.recover import recover
from shardferry.storage.target import survey_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOCK = ".out.shardferry.lock"
ONE, TWO, THREE = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))
CONFIG = {"config.json": b'{"new": true}'}
NEW_SHARDED = checkpoint("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", seed=7) | CONFIG
NEW_SINGLE = checkpoint(SINGLE, seed=8) | CONFIG
LATER = checkpoint(ONE, TWO, THREE, seed=9) | CONFIG

FOREIGN = {
    "README.md": b"foreign",
    "adapter_model.safetensors": checkpoint("adapter", seed=1)["adapter"],
    "model.fp16.safetensors": checkpoint("variant", seed=2)["variant"],
    "logs/run/events.log": b"foreign",
}


def absent(_: Path) -> None:
    """Nothing is there."""


def empty(target: Path) -> None:
    target.mkdir()


def config_only(target: Path) -> None:
    write_files(target, {"config.json": b"{}"})


def single(target: Path) -> None:
    write_files(target, checkpoint(SINGLE, seed=3) | FOREIGN)


def more_files(target: Path) -> None:
    write_files(target, checkpoint(ONE, TWO, THREE, seed=4) | FOREIGN | {"config.json": b"{}"})


def other_names(target: Path) -> None:
    write_files(target, checkpoint("weights-a.safetensors", "parts/weights-b.safetensors", seed=5) | FOREIGN)
    write_files(target, {"parts/notes.txt": b"foreign"})


def cache_links(target: Path) -> None:
    """The files are links into a cache that is shared."""
    target.mkdir()
    for number, (name, data) in enumerate(checkpoint("model-00001-of-00002.safetensors", ONE, seed=6).items()):
        write_files(target.parent / "blobs", {f"{number}": data})
        (target / name).symlink_to(f"../blobs/{number}")
    (target / "tokenizer.json").symlink_to("../blobs/0")


TARGETS = [absent, empty, config_only, single, more_files, other_names, cache_links]
WITHOUT_CHECKPOINT = {absent, empty, config_only}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where there is one: the tests sync thousands of times."""
    memory = Path("/dev/shm")  # noqa: S108 - the folder below it has a random name
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


def foreign_of(target: Path) -> dict[str, tuple[int, bytes]]:
    """Return inode and bytes of everything foreign."""
    names = [*FOREIGN, "parts/notes.txt", "tokenizer.json"]
    return {
        name: (os.lstat(target / name).st_ino, (target / name).read_bytes())
        for name in names
        if os.path.lexists(target / name)
    }


def kill_at_every_step(root: Path, run: Callable[[Path, DiesAt], None]) -> Iterator[tuple[Path, DiesAt]]:
    """Yield the target after `run` was ended at its first step, at its second, and so on to the last."""
    at = 0
    while True:
        target = root / str(at) / "out"
        target.parent.mkdir(parents=True)
        step = DiesAt(at)
        try:
            run(target, step)
        except Killed:
            yield target, step
        else:
            return
        at += 1


# In place nothing is replaced; what it refuses is tested elsewhere.
TABLE = [
    (protocol, make, new)
    for protocol in LACKS
    for make in TARGETS
    for new in ((NEW_SHARDED, NEW_SINGLE) if make in (absent, more_files) else (NEW_SHARDED,))
    if protocol != "in place" or make in WITHOUT_CHECKPOINT
]


@pytest.mark.parametrize(("protocol", "make", "new"), TABLE)
def test_a_reader_sees_old_or_new_whenever_a_save_is_killed_and_the_path_can_be_saved_to_again(
    folder: Path, protocol: str, make: Callable[[Path], None], new: dict[str, bytes]
) -> None:
    views = Views(folder / "views", protocol, make, new)
    for target, step in kill_at_every_step(folder / "killed", views.save):
        views.check(target, step.where)
        published = seen_by_others(target) is not None
        if protocol == "in place" and published:
            assert recovered(target, protocol) == []
            (target.parent / LOCK).unlink()  # as the next save does when it ends
        else:
            save(limited(LACKS[protocol]), target, LATER, number=2)
            assert seen_by_others(target) == {name: LATER[name] for name in (ONE, TWO, THREE)}, step.where
            assert {entry.name for entry in target.iterdir() if is_checkpoint_file(entry.name, NAMING)} == {
                INDEX,
                ONE,
                TWO,
                THREE,
            }
        assert leftovers(target) == [], step.where
        assert foreign_of(target) == views.foreign, step.where


@pytest.mark.parametrize(
    ("protocol", "make"),
    [("exchange", more_files), ("swap", more_files), ("files", more_files), ("in place", config_only)],
)
@pytest.mark.parametrize("forward", [True, False])
def test_recovering_can_be_killed_anywhere_too(
    folder: Path, protocol: str, make: Callable[[Path], None], *, forward: bool
) -> None:
    views = Views(folder / "views", protocol, make, NEW_SHARDED)

    def save_then_recover(target: Path, step: DiesAt) -> None:
        with contextlib.suppress(Killed):
            views.save(target, DiesAt(first))
        recover(limited(LACKS[protocol], step), survey_target(str(target), NAMING), forward=forward)

    for first in range(0, num_steps(folder / "whole", views.save), 4):
        for target, step in kill_at_every_step(folder / f"killed-{first}", save_then_recover):
            views.check(target, f"{first}: {step.where}")
            assert recovered(target, protocol, forward=forward) == []
            assert leftovers(target) in ([], [LOCK])
            assert foreign_of(target) == views.foreign
            assert seen_by_others(target) in (views.theirs, views.new_theirs)


class Views:
    """What readers see before and after one save, and what they may see in between."""

    def __init__(self, root: Path, protocol: str, make: Callable[[Path], None], new: dict[str, bytes]) -> None:
        self.protocol, self.make, self.new = protocol, make, new
        root.mkdir()
        make(root / "old")
        write_files(root / "new", new)
        self.ours, self.theirs = seen_by_us(root / "old"), seen_by_others(root / "old")
        self.new_ours, self.new_theirs = seen_by_us(root / "new"), seen_by_others(root / "new")
        self.foreign: dict[str, tuple[int, bytes]] = {}

    def save(self, target: Path, step: DiesAt) -> None:
        self.make(target)
        self.foreign = foreign_of(target)
        save(limited(LACKS[self.protocol], step), target, self.new)

    def check(self, target: Path, where: str) -> None:
        gap: list[None] = [] if self.protocol == "exchange" else [None]
        assert seen_by_others(target) in [self.theirs, self.new_theirs, *gap], where
        assert seen_by_us(target) in [self.ours, self.new_ours, *gap], where


def recovered(target: Path, protocol: str, *, forward: bool = True) -> list[str]:
    """Recover as the next save does, and return what is said."""
    return list(recover(limited(LACKS[protocol]), survey_target(str(target), NAMING), forward=forward))


def num_steps(root: Path, run: Callable[[Path, DiesAt], None]) -> int:
    root.mkdir()
    step = DiesAt(sys.maxsize)
    run(root / "out", step)
    return step.count
