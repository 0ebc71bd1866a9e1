"""Any sequence of saves, crashes, recoveries and files of others: readers see what they may, nothing foreign goes."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.checkpoints import INDEX
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

from shardferry.errors import CheckpointExistsError
from shardferry.storage.recover import recover
from shardferry.storage.target import survey_target

SETS = [
    (SINGLE,),
    ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    ("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"),
    ("part/a.safetensors", "b.safetensors"),
]
if TYPE_CHECKING:
    from shardferry.plan.publish import OnExisting

View = dict[str, bytes] | None
# Everything a save does in these tests takes fewer steps than this.
MOST_STEPS = 80


class Saves(RuleBasedStateMachine):
    """One target, saved to by one process after the other."""

    def __init__(self) -> None:
        super().__init__()
        memory = Path("/dev/shm")  # noqa: S108 - the folder below it has a random name
        self.root = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
        self.target = self.root / "out"
        self.lacks: frozenset[str] = frozenset()
        self.count = 0
        self.views: list[View] = [None]  # what a reader may see now
        self.foreign: dict[str, int] = {}
        self.crashed = False

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @initialize(protocol=st.sampled_from([name for name in LACKS if name != "in place"]))
    def choose(self, protocol: str) -> None:
        self.lacks = LACKS[protocol]

    @rule(files=st.sampled_from(SETS), on_existing=st.sampled_from(["refuse", "replace"]))
    def save(self, files: tuple[str, ...], on_existing: OnExisting) -> None:
        contents = self._new(files)
        try:
            save(limited(self.lacks), self.target, contents, number=self.count, on_existing=on_existing)
        except CheckpointExistsError:
            assert on_existing == "refuse"
            assert seen_by_others(self.target) is not None
            self.views = [view for view in self.views if view is not None]
        else:
            self.views = [_weights(contents)]
        self.crashed = False
        assert leftovers(self.target) == []

    @rule(
        files=st.sampled_from(SETS), at=st.integers(0, MOST_STEPS), on_existing=st.sampled_from(["refuse", "replace"])
    )
    def crash(self, files: tuple[str, ...], at: int, on_existing: OnExisting) -> None:
        contents = self._new(files)
        with contextlib.suppress(Killed, CheckpointExistsError):
            save(limited(self.lacks, DiesAt(at)), self.target, contents, number=self.count, on_existing=on_existing)
        gap: list[View] = [] if "exchange" not in self.lacks else [None]
        self.views = [*self.views, _weights(contents), *gap]
        self.crashed = True

    @rule(forward=st.booleans(), at=st.integers(0, MOST_STEPS))
    def recover_and_crash(self, at: int, *, forward: bool) -> None:
        with contextlib.suppress(Killed):
            recover(limited(self.lacks, DiesAt(at)), survey_target(str(self.target), NAMING), forward=forward)

    @rule(forward=st.booleans())
    def recover(self, *, forward: bool) -> None:
        assert recover(limited(self.lacks), survey_target(str(self.target), NAMING), forward=forward) == ()
        (self.root / ".out.shardferry.lock").unlink(missing_ok=True)
        assert leftovers(self.target) == []
        self.views = [seen_by_others(self.target)]
        self.crashed = False

    @rule(name=st.sampled_from(["log", "runs/a/events", "notes.txt", "part/notes"]))
    def add_foreign(self, name: str) -> None:
        """Somebody else adds a file, which works as long as there is a directory."""
        if self.crashed or not self.target.exists() or name in self.foreign:
            return
        (self.target / name).parent.mkdir(parents=True, exist_ok=True)
        (self.target / name).write_bytes(name.encode())
        self.foreign[name] = (self.target / name).stat().st_ino

    @invariant()
    def a_reader_sees_what_it_may(self) -> None:
        assert seen_by_others(self.target) in self.views
        assert seen_by_us(self.target) in [*self.views, *([None] if self.crashed else [])]

    @invariant()
    def nothing_foreign_is_lost(self) -> None:
        if not self.crashed:
            for name, inode in self.foreign.items():
                assert (self.target / name).stat().st_ino == inode

    def _new(self, files: tuple[str, ...]) -> dict[str, bytes]:
        self.count += 1
        return checkpoint(*files, seed=self.count)


def _weights(contents: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in contents.items() if name != INDEX}


TestSaves = Saves.TestCase
TestSaves.settings = settings(stateful_step_count=12)
