"""Reading for each other: over thread ranks, the same arrays as reading alone, and every byte from storage once."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import pytest

from shardferry.convert.ops import Stored, concatenate, transpose
from shardferry.errors import CheckpointChangedError, RankFailedError, ShardingError
from shardferry.execute.costs import mount_below, remember
from shardferry.execute.job import estimate_load
from shardferry.execute.reading import Sharing, check_plans
from shardferry.geometry.region import Region, box, whole
from shardferry.geometry.sharding import MeshLayout, Sharding, Split
from shardferry.plan.costmodel import PRESETS
from shardferry.plan.match import Rules
from shardferry.storage.local import LocalStore
from shardferry.testing.groups import rank_outcomes, run_ranks
from shardferry.units import GIB, MIB

from .arrays import ArrayAdapter, load, request, save, target
from .movers import Wires

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from shardferry.convert.ops import Expression
    from shardferry.execute.report import LoadReport, Progress
    from shardferry.plan.estimate import Estimate
    from shardferry.storage.base import OnRead
    from shardferry.storage.local import LocalFile
    from shardferry.transport.base import Group

    from .movers import QueueMover

W = np.arange(12 * 10, dtype=np.float32).reshape(12, 10)
FLAT = W.reshape(-1)
ROWS = MeshLayout((4,), (0, 1, 2, 3), (Split(0, 0),))
COLUMNS = MeshLayout((2,), (0, 1), (Split(0, 1),))
NODES = (0, 0, 1, 1)


def load_once(
    path: Path,
    make: Callable[[int], ArrayAdapter],
    *,
    count: int = 4,
    exchange_bytes: int = MIB,
    **changes: object,
) -> list[LoadReport]:
    """Load on thread ranks that read for each other; a small `exchange_bytes` makes many rounds."""
    wires = Wires()

    def run(group: Group) -> LoadReport:
        sharing = Sharing("always", exchange_bytes, partial(wires.open, group.rank))
        return load(group, make(group.rank), request(path, sharing=sharing, node_of_rank=NODES[:count], **changes))

    return run_ranks(count, run)


@pytest.mark.parametrize("stage", [False, True])
@pytest.mark.parametrize("exchange_bytes", [200, MIB])
def test_rows_columns_and_copies_arrive_in_any_number_of_rounds(
    tmp_path: Path, exchange_bytes: int, *, stage: bool
) -> None:
    path = save(tmp_path, rows=W, columns=W + 200, copies=W + 400, scalar=np.array(7, np.float32), odd=W[0, :7])
    halves = Sharding((12, 10), (box((0, 0), (12, 5)), box((0, 5), (12, 5)), None, whole((12, 10))))

    def make(rank: int) -> ArrayAdapter:
        targets = [
            target("rows", (12, 10), (3, 10), ROWS),
            target("copies", (12, 10), (12, 10)),
            target("scalar", (), ()),
            target("odd", (7,), (7,)),
        ]
        if rank != 2:
            targets.append(target("columns", (12, 10), (12, 10 if rank == 3 else 5), halves))
        adapters[rank] = ArrayAdapter(targets, stage=stage)
        return adapters[rank]

    adapters: dict[int, ArrayAdapter] = {}
    reports = load_once(path, make, exchange_bytes=exchange_bytes)
    for rank, adapter in adapters.items():
        assert np.array_equal(adapter.arrays["rows"], W[3 * rank : 3 * rank + 3])
        assert np.array_equal(adapter.arrays["copies"], W + 400)
        assert adapter.arrays["scalar"] == 7
        assert np.array_equal(adapter.arrays["odd"], W[0, :7])
    assert np.array_equal(adapters[0].arrays["columns"], W[:, :5] + 200)
    assert np.array_equal(adapters[1].arrays["columns"], W[:, 5:] + 200)
    assert np.array_equal(adapters[3].arrays["columns"], W + 200)
    total = reports[0].total
    assert total.bytes_sent == total.bytes_received > 0
    assert total.bytes_wanted == sum(array.nbytes for adapter in adapters.values() for array in adapter.arrays.values())
    if reports[0].strategy.startswith("read-once per job"):
        assert total.bytes_read == 3 * W.nbytes + 4 + 28
    assert "storage" in reports[0].strategy


def test_files_faster_than_the_links_are_read_by_each_rank_without_asking_what_others_want(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An estimate names the same way, though to read once costs fewer seeks: of a column, with holes that are read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wide = np.arange(8 * 106, dtype=np.float32).reshape(8, 106)
    path = save(tmp_path, w=wide)
    remember(mount_below(path), replace(PRESETS["memory"], seek_bytes=400, rank_bandwidth=100 * GIB))
    column = Sharding(wide.shape, (box((0, 0), (8, 1)),) * 4)
    adapters = [ArrayAdapter([target("w", wide.shape, (8, 1), column)]) for _ in NODES]

    def run(group: Group) -> tuple[LoadReport, Estimate]:
        sharing = Sharing("auto", MIB, partial(Wires().open, group.rank))
        asked = request(path, sharing=sharing, node_of_rank=NODES)
        estimate = estimate_load(group, adapters[group.rank], asked, sharing)
        return load(group, adapters[group.rank], asked), estimate

    ((report, estimate), *_) = run_ranks(4, run)
    assert report.strategy.endswith("storage gives a node ten times what other nodes can send it")
    assert estimate.price("read-once per job").seconds < estimate.price("independent").seconds
    assert estimate.chosen == "independent"
    assert all(np.array_equal(adapter.arrays["w"], wide[:, :1]) for adapter in adapters)


def test_copies_of_a_checkpoint_on_one_machine_share_no_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So what both ranks want is read from slow storage once, as if they were on two machines."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copies = [save(tmp_path / str(rank), w=W) for rank in range(2)]
    slow = replace(PRESETS["local"], seek_bytes=1, node_bandwidth=1e3, shared_bandwidth=1e3, stream_bandwidth=1e3)
    remember(mount_below(copies[0]), slow)
    adapters = [ArrayAdapter([target("w", (12, 10), (12, 10))]) for _ in copies]
    wires = Wires()

    def run(group: Group) -> LoadReport:
        sharing = Sharing("auto", MIB, partial(wires.open, group.rank))
        return load(group, adapters[group.rank], request(copies[group.rank], sharing=sharing))

    (report, _) = run_ranks(2, run)
    assert report.strategy.startswith("read-once per job")
    assert report.total.bytes_read == W.nbytes
    assert [mine.node for mine in report.ranks] == [0, 1]
    assert all(np.array_equal(adapter.arrays["w"], W) for adapter in adapters)


class Reads(LocalStore):
    """Files of which all ranks together count the reads that are asked for."""

    asked = 0
    changed = threading.Condition()

    @contextmanager
    def open(self, name: str) -> Iterator[LocalFile]:
        with super().open(name) as file:
            plain = file.read_into

            def read_into(out: np.ndarray, start: int, on_read: OnRead) -> None:
                with Reads.changed:
                    Reads.asked += 1
                    Reads.changed.notify_all()
                plain(out, start, on_read)

            file.read_into = read_into  # type: ignore[method-assign]
            yield file


class LateMover:
    """Exchanges a round only once the next one is being read: never, if that waits for the exchange."""

    def __init__(self, mover: QueueMover, num_reads: int) -> None:
        self._mover, self._num_reads = mover, num_reads
        self._needed = 2

    def all_gather(
        self, ranks: Sequence[int], send: np.ndarray, receive: np.ndarray, receive_sizes: Sequence[int]
    ) -> None:
        self._needed = min(self._needed + 2, self._num_reads)  # one of each of two ranks
        with Reads.changed:
            assert Reads.changed.wait_for(lambda: Reads.asked >= self._needed, timeout=30), "no read of the next round"
        self._mover.all_gather(ranks, send, receive, receive_sizes)

    def all_to_all(self, *_: object) -> NoReturn:
        raise AssertionError


def test_the_next_round_is_read_while_one_is_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, flat=FLAT)  # of which what a rank reads in a round is one run, and one read
    adapters = [ArrayAdapter([target("flat", FLAT.shape, FLAT.shape)]) for _ in range(2)]
    monkeypatch.setattr("shardferry.storage.local.LocalStore", Reads)
    monkeypatch.setattr(Reads, "asked", 0)
    load_once(path, lambda rank: adapters[rank], count=2, exchange_bytes=200)
    num_reads = Reads.asked
    assert num_reads > 4  # of two ranks in more than two rounds
    Reads.asked = 0
    wires = Wires()

    @contextmanager
    def open_late(rank: int, check: Callable[[], None]) -> Iterator[LateMover]:
        with wires.open(rank, check) as mover:
            yield LateMover(mover, num_reads)

    def run(group: Group) -> LoadReport:
        sharing = Sharing("always", 200, partial(open_late, group.rank))
        return load(group, adapters[group.rank], request(path, sharing=sharing, node_of_rank=(0, 1)))

    assert run_ranks(2, run)[0].total.bytes_read == FLAT.nbytes
    assert Reads.asked == num_reads
    assert all(np.array_equal(adapter.arrays["flat"], FLAT) for adapter in adapters)


def test_transposes_and_parts_of_several_tensors_arrive(tmp_path: Path) -> None:
    """Rank 0 turns a tensor of which rank 1 holds columns; both put another together from two."""
    path = save(tmp_path, gate=W, up=W + 200)
    fused = concatenate([Stored("gate", (12, 10)), Stored("up", (12, 10))], 0)
    sources: dict[str, Expression] = {"fused": fused, "turned": transpose(Stored("gate", (12, 10)), (1, 0))}
    adapters = {
        rank: ArrayAdapter([target("fused", (24, 10), (24, 5), COLUMNS), target("turned", (10, 12), (10, 6), COLUMNS)])
        for rank in range(2)
    }
    rules = Rules(sources, cast=True, ignorable=lambda _: False)
    (report, _) = load_once(path, lambda rank: adapters[rank], count=2, rules=rules)
    for rank, adapter in adapters.items():
        assert np.array_equal(adapter.arrays["fused"], np.concatenate([W, W + 200])[:, 5 * rank : 5 * rank + 5])
        assert np.array_equal(adapter.arrays["turned"], W.T[:, 6 * rank : 6 * rank + 6])
    assert report.total.bytes_read == 2 * W.nbytes


def test_a_strided_piece_of_one_rank_is_part_of_anothers_run(tmp_path: Path) -> None:
    path = save(tmp_path, w=W)
    strided = Region((((0, 2), (5, 6), (9, 12)), ((0, 3), (7, 9))))
    layout = Sharding((12, 10), (strided, whole((12, 10))))
    adapters = {
        0: ArrayAdapter([target("w", (12, 10), (6, 5), layout)]),
        1: ArrayAdapter([target("w", (12, 10), (12, 10), layout)]),
    }
    (report, _) = load_once(path, lambda rank: adapters[rank], count=2, exchange_bytes=300)
    assert np.array_equal(adapters[0].arrays["w"], W[[0, 1, 5, 9, 10, 11]][:, [0, 1, 2, 7, 8]])
    assert np.array_equal(adapters[1].arrays["w"], W)
    assert report.total.bytes_read == W.nbytes


def test_a_cast_happens_after_the_exchange(tmp_path: Path) -> None:
    path = save(tmp_path, w=W)
    adapters = {rank: ArrayAdapter([target("w", (12, 10), (12, 10), dtype="F16")]) for rank in range(2)}
    load_once(path, lambda rank: adapters[rank], count=2)
    assert all(np.array_equal(adapter.arrays["w"], W.astype(np.float16)) for adapter in adapters.values())


def test_a_rank_without_tensors_takes_part(tmp_path: Path) -> None:
    path = save(tmp_path, w=W)
    halves = Sharding((12, 10), (whole((12, 10)), whole((12, 10)), None))
    adapters = {rank: ArrayAdapter([target("w", (12, 10), (12, 10), halves)] if rank < 2 else []) for rank in range(3)}
    reports = load_once(path, lambda rank: adapters[rank], count=3)
    assert np.array_equal(adapters[1].arrays["w"], W)
    assert (reports[2].ranks[2].bytes_read, reports[2].ranks[2].bytes_received) == (0, 0)


def test_no_mover_is_opened_if_no_two_ranks_want_the_same(tmp_path: Path) -> None:
    rows = np.zeros((4, 1 << 16), np.float32)
    path = save(tmp_path, rows=rows)
    wires = Wires()

    def run(group: Group) -> LoadReport:
        sharing = Sharing("always", MIB, partial(wires.open, group.rank))
        adapter = ArrayAdapter([target("rows", rows.shape, (1, 1 << 16), ROWS)])
        return load(group, adapter, request(path, sharing=sharing, node_of_rank=NODES))

    report = run_ranks(4, run)[0]
    assert (report.total.bytes_received, wires.num_opened) == (0, 0)


def test_a_file_that_ends_early_for_one_reader_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """Each rank has its own copy; rank 1's loses its end after it was opened, when the first bytes have landed."""
    copies = [save(tmp_path / str(rank), w=W, v=W + 1) for rank in range(2)]
    wires = Wires()

    def run(group: Group) -> LoadReport:
        sharing = Sharing("always", 200, partial(wires.open, group.rank))
        mine = copies[group.rank]

        def cut_off(_: Progress) -> None:
            if group.rank == 1:
                with (mine / "model.safetensors").open("r+b") as file:
                    file.truncate(400)

        adapter = ArrayAdapter([target(name, (12, 10), (12, 10)) for name in ("w", "v")])
        wanted = request(mine, sharing=sharing, node_of_rank=(0, 1), on_progress=cut_off)
        return load(group, adapter, wanted)

    first, second = rank_outcomes(2, run)
    assert isinstance(second, CheckpointChangedError)
    assert isinstance(first, RankFailedError)
    assert first.rank == 1
    assert str(second) in str(first)


def rows_of(plans: Mapping[int, tuple[int, int, int]]) -> list[bytes]:
    return [json.dumps([plans[rank]]).encode() for rank in sorted(plans)]


def test_plans_that_differ_name_the_ranks() -> None:
    same = dict.fromkeys(range(3), (7, 3, 1))
    assert check_plans(rows_of(same))
    with pytest.raises(ShardingError, match=r"ranks \[0, 1\] plan another exchange than ranks \[2\] of a group of 3"):
        check_plans(rows_of(same | {2: (7, 3, 2)}))
    with pytest.raises(ShardingError, match=r"only ranks \[0, 1\] plan of a group of 3"):
        check_plans([*rows_of({0: (7, 3, 1), 1: (7, 3, 1)}), b"[]"])
    assert not check_plans([b"[]", json.dumps([(7, 1, 1)]).encode()])
