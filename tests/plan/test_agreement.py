"""Ranks tell each other little, and that is enough to find a name on which they differ."""

from __future__ import annotations

import json

import pytest

from shardferry.errors import ShardingError
from shardferry.format.index import CheckpointIndex, FileInfo, TensorInfo
from shardferry.geometry.sharding import MeshLayout, Split
from shardferry.plan.agreement import (
    MAX_HASHES_ALONG,
    Table,
    contradicted,
    disputed,
    explain,
    hashes_along,
    make_table,
    name_hashes,
    names_in,
    raise_contradiction,
    table_from_bytes,
    table_to_bytes,
)
from shardferry.plan.match import Rules, match_targets
from shardferry.plan.target import Target

BOTH = MeshLayout((2,), (0, 1), (Split(0, 0),))
OTHER = MeshLayout((2,), (0, 1), (Split(0, 1),))


def index_of(count: int) -> CheckpointIndex:
    infos = {f"t{i}": TensorInfo("F32", (4, 4), "f", (8 + 64 * i, 72 + 64 * i)) for i in range(count)}
    return CheckpointIndex("/", infos, {"f": FileInfo(8 + 64 * count, 8, "")}, {})


def targets_of(names: list[str], layout: MeshLayout = BOTH) -> list[Target]:
    local = (2, 4) if layout is BOTH else (4, 2)
    return [Target((name,), "F32", (4, 4), local, (layout,)) for name in names]


def tell(index: CheckpointIndex, rank: int, targets: list[Target], world_size: int = 2) -> Table:
    matching = match_targets(index, targets, Rules({}, cast=True, ignorable=lambda name: name == "t3"))
    return table_from_bytes(table_to_bytes(make_table(index, matching, rank, world_size)))


def test_equal_tables_dispute_nothing() -> None:
    index = index_of(4)
    tables = [tell(index, rank, targets_of(["t0", "t2"])) for rank in range(2)]
    assert disputed(tables) == frozenset()
    assert names_in(index, [tables[0].used]) == ["t0", "t2"]
    assert names_in(index, [table.ignored for table in tables]) == ["t3"]


def test_a_name_under_two_layouts_is_found_among_thousands_and_named() -> None:
    count = MAX_HASHES_ALONG // 2 + 1
    index = index_of(count)
    names = list(index.tensors)
    mine = [targets_of(names), targets_of(names[:700]) + targets_of(["t700"], OTHER) + targets_of(names[701:])]
    tables = [tell(index, rank, targets) for rank, targets in enumerate(mine)]
    patterns = disputed(tables)
    assert patterns
    assert hashes_along(tables) is None, "too many names to send their hashes unasked"
    hashes = contradicted([name_hashes(targets, patterns) for targets in mine])
    assert len(hashes) == 1
    told = [explain(targets, hashes) for targets in mine]
    assert [[name for name, _ in json.loads(data)] for data in told] == [["t700"], ["t700"]]
    with pytest.raises(
        ShardingError, match=r"about t700: ranks 0 have .*dim 0 over axis 0.*; ranks 1 have .*dim 1 over"
    ):
        raise_contradiction(told)


def test_names_that_only_some_ranks_have_contradict_nothing() -> None:
    index = index_of(4)
    mine = [targets_of(["t0", "t1"]), targets_of(["t0", "t2"])]
    tables = [tell(index, rank, targets) for rank, targets in enumerate(mine)]
    assert disputed(tables)
    told = hashes_along(tables)
    assert told is not None
    assert contradicted(told) == frozenset()


def test_a_table_stays_small() -> None:
    """A rank of a large job tells kilobytes, however many names it has."""
    index = index_of(20_000)
    matching = match_targets(index, targets_of(list(index.tensors)), Rules({}, cast=True, ignorable=lambda _: False))
    assert len(table_to_bytes(make_table(index, matching, 0, 1024))) < 2_000
