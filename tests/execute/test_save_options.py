"""Options of a save that its ranks give differently: every rank is told which, before anything is written."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shardferry.conversions import StripPrefix
from shardferry.errors import InvalidInputError
from shardferry.format.oldfiles import Naming
from shardferry.testing.groups import rank_outcomes
from shardferry.units import MIB

from .arrays import ArraySaver, save_arrays, save_request, target
from .movers import Wires

if TYPE_CHECKING:
    from pathlib import Path

    from shardferry.execute.report import SaveReport
    from shardferry.transport.base import Group


def save_with(path: Path, options: list[dict[str, Any]]) -> list[object]:
    """Save one array from as many ranks as there are options; return what came of it on each."""
    wires = Wires()

    def work(group: Group) -> SaveReport:
        saver = ArraySaver(group, wires, [target("w", (4, 2), (4, 2))], {"w": np.ones((4, 2), np.float32)})
        return save_arrays(group, saver, replace(save_request(path), **options[group.rank]))

    return list(rank_outcomes(len(options), work))


@pytest.mark.parametrize(
    ("option", "field", "one", "other"),
    [
        ("max_shard_size", "max_shard_bytes", 1000, 2000),
        ("on_existing", "on_existing", "refuse", "replace"),
        ("dtype", "dtype", None, "BF16"),
        ("replicas", "replicas", "trust", "check"),
        ("metadata", "metadata", {"a": "1"}, {"a": "2"}),
        ("conversions", "conversions", (), (StripPrefix("a."),)),
        ("files_like", "files_like", {"w": "a.safetensors"}, {"w": "b.safetensors"}),
        ("files_like", "files_like", None, {"w": "b.safetensors"}),
        ("hub_limits", "hub_limits", False, True),
        ("stem", "naming", Naming("model"), Naming("other")),
        ("budget_bytes", "budget_bytes", 8 * MIB, 16 * MIB),
    ],
)
def test_every_rank_is_told_which_option_ranks_give_differently(
    tmp_path: Path, option: str, field: str, one: object, other: object
) -> None:
    outcomes = save_with(tmp_path / "saved", [{field: one}, {field: other}])
    assert all(isinstance(outcome, InvalidInputError) for outcome in outcomes), outcomes
    assert all(f"ranks 0 and 1 call this save with different {option}" in str(outcome) for outcome in outcomes)
    assert not (tmp_path / "saved").exists()


def test_budgets_that_make_no_difference_may_differ(tmp_path: Path) -> None:
    outcomes = save_with(tmp_path / "saved", [{"budget_bytes": 128 * MIB}, {"budget_bytes": 1024 * MIB}])
    assert not any(isinstance(outcome, BaseException) for outcome in outcomes), outcomes
