"""A failed save is cleared away when the last rank has stopped writing, not before."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from shardferry.errors import RankFailedError
from shardferry.execute.publishing import stage
from shardferry.format.writer import TensorSpec
from shardferry.plan.packing import lay_out_checkpoint
from shardferry.storage.writing import OpenFiles
from shardferry.testing.groups import rank_outcomes
from shardferry.transport.together import together

if TYPE_CHECKING:
    from pathlib import Path

    from shardferry.transport.base import Group


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_learns_late_of_a_failure_finds_its_files_until_then(tmp_path: Path, failing: int) -> None:
    tensors = {"a": TensorSpec("F32", (2,)), "b": TensorSpec("F32", (2,))}
    layout = lay_out_checkpoint(tensors, max_shard_bytes=1, metadata={}, files_like=None, hub_limits=False)

    def work(group: Group) -> None:
        staging = stage(group, str(tmp_path / "out"), layout, "refuse", lambda _: None)

        def write() -> bytes:
            if group.rank == failing:
                raise MemoryError
            with OpenFiles(staging.folder) as files:
                for file in layout.files:
                    time.sleep(0.1 * group.rank)
                    files.get(file.name)
            group.check()
            return b""

        with staging.released():
            together(group, "write tensors", write)

    outcomes = rank_outcomes(3, work)
    assert isinstance(outcomes.pop(failing), MemoryError)
    assert [type(outcome) for outcome in outcomes] == [RankFailedError] * 2
    assert list(tmp_path.iterdir()) == []
