"""Warming, by one process or by the ranks of a node, on mounts that have a page cache of their own and count."""

from __future__ import annotations

import os
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.checkpoints import entry, raw_file, sharded, tensor, write_files

from shardferry.convert.ops import Stored, concatenate
from shardferry.convert.rules import Convert, Rename
from shardferry.convert.steps import Concatenate
from shardferry.errors import InvalidInputError, MismatchError, RankFailedError, StorageError
from shardferry.execute.open import open_checkpoint
from shardferry.execute.warm import WarmRequest, look_at, page_cached_root, plan_node, warm_node
from shardferry.execute.warm_job import JobRequest, run_warm
from shardferry.execute.warm_report import Tally, make_report
from shardferry.format.index import CheckpointIndex
from shardferry.geometry.sharding import MeshLayout, Split
from shardferry.plan.catalogue import Held
from shardferry.plan.costmodel import PRESETS
from shardferry.plan.match import Rules
from shardferry.plan.target import Target
from shardferry.plan.warm import node_wants
from shardferry.testing.groups import rank_outcomes, run_ranks
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.tools.mounts import MakeMounts, SlowMounts

    from shardferry.convert.ops import Expression
    from shardferry.convert.rules import Rule
    from shardferry.execute.report import Progress
    from shardferry.execute.warm_report import WarmReport
    from shardferry.transport.base import Group

ROWS, ROW_BYTES = 8, MIB
NAMES = ("a.weight", "b.weight", "c.weight")
HALVED = (Split(0, 0),)
HALVES = MeshLayout((2,), (0, 1), HALVED)
QUARTERS = MeshLayout((4,), (0, 1, 2, 3), (Split(0, 0),))
LOCAL, NETWORK = PRESETS["local"], PRESETS["network_mount"]


@pytest.fixture
def mounts(make_mounts: MakeMounts, tmp_path: Path) -> Iterator[SlowMounts]:
    """Two nodes that see a checkpoint of three tensors of 8 MiB, in files of 16 and 8 MiB."""
    tensors = [tensor(name, "U8", (ROWS, ROW_BYTES)) for name in NAMES]
    write_files(tmp_path, sharded({"one.safetensors": tensors[:2], "two.safetensors": tensors[2:]}))
    with make_mounts(tmp_path, nodes=2) as mounts:
        yield mounts


def opened(mounts: SlowMounts, node: int = 0) -> CheckpointIndex:
    index = open_checkpoint(mounts.paths[node])
    for file in index.files:  # the headers, and what the kernel has read behind them
        mounts.drop(file, node)
    mounts.reset()
    return index


def job(layout: MeshLayout, names: tuple[str, ...] = NAMES) -> dict[str, Held]:
    return {name: Held("U8", (ROWS, ROW_BYTES), layout, layout.ranks) for name in names}


def request(**changes: object) -> WarmRequest:
    return WarmRequest(**({"cost": LOCAL, "when_short": "shrink", "on_progress": None} | changes))  # type: ignore[arg-type]


@contextmanager
def rss_growth() -> Iterator[list[int]]:
    """Give a list that holds, after the block, by how many bytes the process's anonymous memory has grown at most."""
    growth = [0]
    before, ended = anonymous_bytes(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            growth[0] = max(growth[0], anonymous_bytes() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield growth
    finally:
        ended.set()
        thread.join()


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def test_only_what_the_nodes_ranks_read_is_fetched_and_then_it_is_there(mounts: SlowMounts) -> None:
    index = opened(mounts)
    report = warm_node(index, job(QUARTERS), [1, 2], request())
    assert report.bytes_wanted == report.bytes_planned == report.bytes_read == 3 * 4 * MIB
    assert (report.bytes_resident, report.bytes_absent, report.bytes_left_out) == (0, 0, 0)
    assert report.useful
    # Spans begin behind the header, so a page at either end is fetched in full.
    assert 12 * MIB <= mounts.counts()["read_bytes"] <= 12 * MIB + 6 * os.sysconf("SC_PAGE_SIZE")
    mounts.reset()
    for name in NAMES:
        info = index.tensors[name]
        with (mounts.paths[0] / info.file).open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            os.pread(file.fileno(), 4 * MIB, info.span[0] + 2 * MIB)
    assert mounts.counts()["read_bytes"] == 0


def test_what_is_there_is_not_fetched_again(mounts: SlowMounts) -> None:
    index = opened(mounts)
    warm_node(index, job(QUARTERS), [1], request())
    mounts.reset()
    report = warm_node(index, job(QUARTERS), [1], request())
    assert (report.bytes_read, report.bytes_resident, report.useful) == (0, report.bytes_planned, False)
    assert report.why == "useless: all of it is in the page cache already"
    assert warm_node(index, job(QUARTERS), [0, 1], request()).bytes_read == pytest.approx(6 * MIB, abs=20_000)
    assert mounts.counts()["read_bytes"] == pytest.approx(6 * MIB, abs=50_000)


def test_a_dear_seek_reads_whole_files(mounts: SlowMounts) -> None:
    report = warm_node(opened(mounts), job(QUARTERS), [0, 1, 2], request(cost=NETWORK))
    assert {file.strategy for file in report.files} == {"whole"}
    assert "12.0 MiB a seek" in report.files[0].why
    assert mounts.counts()["read_bytes"] == sum(path.stat().st_size for path in mounts.paths[0].glob("*.safetensors"))


def test_one_file_is_read_whole_and_another_as_spans(mounts: SlowMounts) -> None:
    held = job(HALVES, NAMES[:2]) | {NAMES[2]: Held("U8", (ROWS, ROW_BYTES), None, (0, 1))}
    report = warm_node(opened(mounts), held, [0], request())
    assert {file.file: file.strategy for file in report.files} == {
        "one.safetensors": "spans",
        "two.safetensors": "whole",
    }


def test_names_of_the_same_bytes_are_read_once(mounts: SlowMounts, tmp_path: Path) -> None:
    """As links of a cache whose files are named by their content; `d` is made up, no writer stores bytes twice."""
    index = opened(mounts)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("one", "two"):
        (snapshot / f"{name}.safetensors").symlink_to(mounts.paths[0] / "two.safetensors")
    info, file = index.tensors[NAMES[2]], index.files["two.safetensors"]
    tensors = {"c": info._replace(file="one.safetensors"), "d": info}
    linked = CheckpointIndex(str(snapshot), tensors, {"one.safetensors": file, "two.safetensors": file}, {})
    report = warm_node(
        linked, job(HALVES, ("c",)) | job(MeshLayout((2,), (1, 0), (Split(0, 0),)), ("d",)), [0], request()
    )
    assert [(done.file, done.bytes_wanted) for done in report.files] == [("one.safetensors", 8 * MIB)]
    assert mounts.counts()["read_bytes"] == pytest.approx(8 * MIB, abs=20_000)


def test_a_mount_without_a_page_cache_is_found_out_at_once(make_mounts: MakeMounts, tmp_path: Path) -> None:
    write_files(tmp_path, sharded({"x.safetensors": [tensor("a", "U8", (64, MIB))]}))
    with make_mounts(tmp_path, direct_io=True) as mounts:
        report = warm_node(opened(mounts), {"a": Held("U8", (64, MIB), None, (0,))}, [0], request())
        assert not report.useful
        assert report.why == "useless: this mount (fuse.slow_fs) keeps nothing that was read in the page cache"
        assert mounts.counts()["read_bytes"] <= MIB


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs here")  # noqa: S108 - what is asked about
def test_files_in_memory_need_no_warming() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        write_files(Path(folder), sharded({"x.safetensors": [tensor("a", "U8", (4, MIB))]}))
        report = warm_node(open_checkpoint(folder), {"a": Held("U8", (4, MIB), None, (0,))}, [0], request())
    assert (report.useful, report.bytes_read) == (False, 0)
    assert report.why == "useless: the files lie in memory (tmpfs)"


def test_a_read_error_names_the_file(mounts: SlowMounts) -> None:
    index = opened(mounts)
    mounts.break_bytes("two.safetensors", 4 * MIB, 4 * MIB + 1)
    with pytest.raises(StorageError, match=r"two\.safetensors' from offset .* failed: Input/output error"):
        warm_node(index, job(HALVES), [0, 1], request())


def test_progress_ends_at_all_that_was_missing(mounts: SlowMounts) -> None:
    steps: list[Progress] = []
    warm_node(opened(mounts), job(QUARTERS), [0], request(on_progress=steps.append))
    assert steps[-1].bytes_done == steps[-1].bytes_total == 6 * MIB
    assert [step.bytes_done for step in steps] == sorted(step.bytes_done for step in steps)


def test_memory_does_not_grow_with_what_is_read(make_mounts: MakeMounts, tmp_path: Path) -> None:
    size = 192 * MIB
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(raw_file({"a": entry("U8", [size], 0, size)}))
        file.truncate(file.tell() + size)  # a hole takes no disk
    with make_mounts(tmp_path) as mounts, rss_growth() as growth:
        report = warm_node(opened(mounts), {"a": Held("U8", (size,), None, (0,))}, [0], request(cost=NETWORK))
    assert report.bytes_read >= size
    assert growth[0] < 64 * MIB


# What a look has seen is data, so that what follows from it can be tested without a machine that is short of memory.


def test_where_room_is_short_the_first_files_are_read(mounts: SlowMounts) -> None:
    index = opened(mounts)
    wanted = tuple(node_wants(job(HALVES), {}, [0]))
    look = look_at(index, wanted, LOCAL.seek_bytes, "shrink")
    node = plan_node(index, wanted, look._replace(room_bytes=9 * MIB))
    assert [file.file for file in node.files] == ["one.safetensors", "two.safetensors"]
    assert (sum(file.num_bytes for file in node.files), node.left_out_bytes) == (9 * MIB, 3 * MIB)
    report = make_report([0], node, [Tally(9 * MIB, 1, kept=True)], absent=0, seconds=1, cost_source="")
    assert report.why.startswith("3.00 MiB left out: the ")
    assert report.useful


# Within a job: every rank of a group calls.


def target(name: str, layout: MeshLayout) -> Target:
    local = (ROWS // len(layout.ranks), ROW_BYTES)
    return Target((name,), "U8", (ROWS, ROW_BYTES), local, (layout,))


def warm_job(
    group: Group,
    mounts: SlowMounts,
    targets: list[Target],
    sources: Mapping[str, Expression] | None = None,
    conversions: tuple[Rule, ...] = (),
    *,
    nodes: tuple[int, ...] | None = (0, 0, 1, 1),
    **changes: object,
) -> WarmReport:
    """Warm on 4 ranks, two on each node; a node sees the checkpoint under its own mount."""
    path = str(mounts.paths[group.rank // 2])
    rules = Rules(sources or {}, cast=True, ignorable=lambda _: False, conversions=conversions)
    asked = JobRequest(
        path=path,
        checkpoint_strict=True,
        variant=None,
        rules=rules,
        given_names=(),
        node_of_rank=nodes,
        warm=request(**changes),
    )
    return run_warm(group, lambda: targets, asked)


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), None])
def test_the_ranks_of_a_node_share_what_it_needs(mounts: SlowMounts, nodes: tuple[int, ...] | None) -> None:
    """Two mounts share no pages, and so are two nodes, also on one machine without being told."""
    for node in range(2):
        opened(mounts, node)
    done: dict[int, int] = {}

    def run(group: Group) -> WarmReport:
        def on_progress(step: Progress) -> None:
            done[step.rank] = step.bytes_done

        wanted = [target(name, QUARTERS) for name in NAMES]
        return warm_job(group, mounts, wanted, nodes=nodes, on_progress=on_progress)

    reports = run_ranks(4, run)
    assert [report.ranks for report in reports] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert {report.bytes_planned for report in reports} == {3 * 4 * MIB}
    assert done == pytest.approx(dict.fromkeys(range(4), 6 * MIB), abs=100_000)
    for node in range(2):
        assert mounts.counts(node)["read_bytes"] == pytest.approx(12 * MIB, rel=0.1)  # and the headers, on one


def test_ranks_with_other_tensors_are_warmed_for_too(mounts: SlowMounts) -> None:
    """Pipeline stages: each node's two ranks have other names, and a name tied to one that is not stored."""

    def run(group: Group) -> WarmReport:
        names = ("a.weight", "tied.weight") if group.rank in {0, 2} else ("b.weight",)
        layout = MeshLayout((2,), (0, 2), ()) if group.rank in {0, 2} else MeshLayout((2,), (1, 3), ())
        mine = Target(names[::-1], "U8", (ROWS, ROW_BYTES), (ROWS, ROW_BYTES), (layout,))
        return warm_job(group, mounts, [mine])

    for report in run_ranks(4, run):
        assert (report.bytes_wanted, [file.file for file in report.files]) == (16 * MIB, ["one.safetensors"])


def test_conversions_decide_what_a_rank_reads(mounts: SlowMounts) -> None:
    index = opened(mounts)
    shape = (2 * ROWS, ROW_BYTES)
    sources = {"fused": concatenate([Stored(name, index.tensors[name].shape) for name in NAMES[:2]], 0)}
    fused = Target(("fused",), "U8", shape, (ROWS, ROW_BYTES), (MeshLayout((2, 2), (0, 1, 2, 3), (Split(0, 0),)),))
    reports = run_ranks(4, lambda group: warm_job(group, mounts, [fused], sources))
    assert [report.bytes_wanted for report in reports] == [8 * MIB] * 4
    assert mounts.counts(0)["read_bytes"] == pytest.approx(8 * MIB, rel=0.1)


def test_rules_tell_what_other_ranks_of_the_node_read(mounts: SlowMounts) -> None:
    """Of each node one rank holds half of `a.weight`, which is stored as `b.weight`, and the other half of `fused`."""
    rules = (
        Rename("^a", "t"),
        Rename("^b", "a"),
        Rename("^t", "b"),
        Convert(("b.weight", "c.weight"), ("fused",), (Concatenate(0),)),
    )

    def run(group: Group) -> WarmReport:
        fused = Target(("fused",), "U8", (2 * ROWS, ROW_BYTES), (ROWS, ROW_BYTES), (MeshLayout((2,), (1, 3), HALVED),))
        renamed = target("a.weight", MeshLayout((2,), (0, 2), HALVED))
        return warm_job(group, mounts, [fused if group.rank % 2 else renamed], conversions=rules)

    for node in range(2):
        opened(mounts, node)
    reports = run_ranks(4, run)
    assert [report.bytes_wanted for report in reports] == [12 * MIB] * 4
    assert [file.file for file in reports[0].files] == ["one.safetensors"]
    assert [file.file for file in reports[2].files] == ["one.safetensors", "two.safetensors"]
    assert mounts.counts(1)["read_bytes:two.safetensors"] == pytest.approx(8 * MIB, rel=0.1)
    assert mounts.counts(0).get("read_bytes:two.safetensors", 0) < MIB  # a header


def test_one_ranks_read_error_is_everyones(mounts: SlowMounts) -> None:
    for node in range(2):
        opened(mounts, node)
    mounts.break_bytes("two.safetensors", 7 * MIB, 7 * MIB + 1)
    outcomes = rank_outcomes(4, lambda group: warm_job(group, mounts, [target(NAMES[2], QUARTERS)]))
    own = [outcome for outcome in outcomes if isinstance(outcome, StorageError)]
    assert len(own) == 1
    assert all(
        isinstance(outcome, RankFailedError) and "two.safetensors" in outcome.cause
        for outcome in outcomes
        if outcome not in own
    )


def test_a_model_with_other_names_is_refused(mounts: SlowMounts) -> None:
    with pytest.raises(MismatchError, match="has none of the names of the model, such as x"):
        run_ranks(4, lambda group: warm_job(group, mounts, [target("x", QUARTERS)]))


def test_a_server_has_no_page_cache() -> None:
    with pytest.raises(InvalidInputError, match="goes through no page cache"):
        page_cached_root("https://example.com/model.safetensors")
