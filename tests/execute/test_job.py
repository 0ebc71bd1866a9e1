"""A load over thread ranks: what is agreed, what is refused before a byte moves, and that all ranks fail together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardferry.convert.ops import Stored, concatenate, transpose
from shardferry.errors import (
    CheckpointChangedError,
    InvalidInputError,
    MismatchError,
    RankFailedError,
    ShardingError,
    StorageError,
)
from shardferry.execute.report import LoadReport, Progress
from shardferry.geometry.region import Region, box, whole
from shardferry.geometry.sharding import MeshLayout, Sharding, Split, region_at
from shardferry.plan.match import Rules
from shardferry.plan.target import Target
from shardferry.storage.local import LocalStore
from shardferry.testing.groups import rank_outcomes, run_ranks
from shardferry.transport.solo import SoloGroup
from shardferry.units import MIB

from .arrays import ArrayAdapter, ArrayDestination, load, request, save, target

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

    from shardferry.convert.ops import Expression
    from shardferry.execute.meter import Meter
    from shardferry.plan.load import LoadPlan
    from shardferry.transport.base import Group

W = np.arange(60, dtype=np.float32).reshape(12, 5)
ROWS = MeshLayout((4,), (0, 1, 2, 3), (Split(0, 0),))
COLUMNS = MeshLayout((4,), (0, 1, 2, 3), (Split(0, 1),))


def on_ranks(count: int, make: Callable[[int], ArrayAdapter], path: Path, **changes: object) -> list[LoadReport]:
    return run_ranks(count, lambda group: load(group, make(group.rank), request(path, **changes)))


def failures(count: int, make: Callable[[int], ArrayAdapter], path: Path, **changes: object) -> list[BaseException]:
    """Return what every rank raised; fails if one did not."""
    outcomes = rank_outcomes(count, lambda group: load(group, make(group.rank), request(path, **changes)))
    assert all(isinstance(outcome, BaseException) for outcome in outcomes), outcomes
    return [outcome for outcome in outcomes if isinstance(outcome, BaseException)]


def test_every_rank_reads_its_rows_and_reports_them(tmp_path: Path) -> None:
    path = save(tmp_path, w=W)
    adapters = {rank: ArrayAdapter([target("w", (12, 5), (3, 5), ROWS)]) for rank in range(4)}
    reports = on_ranks(4, lambda rank: adapters[rank], path)
    for rank, adapter in adapters.items():
        assert np.array_equal(adapter.arrays["w"], W[rank * 3 : rank * 3 + 3])
        assert adapter.committed
    assert len({report.to_json() for report in reports}) == 1
    report = reports[0]
    assert [mine.bytes_wanted for mine in report.ranks] == [60] * 4
    assert (report.total.bytes_wanted, report.total.bytes_read, report.total.requests) == (240, 240, 4)
    assert set(report.total.seconds) == {"open", "agree", "plan", "allocate", "read"}


@pytest.mark.parametrize("stage", [False, True])
def test_a_transpose_and_a_concatenation_are_exact_under_a_cut(tmp_path: Path, *, stage: bool) -> None:
    """Cutting the stored tensors with the target's placements first would give other elements here."""
    gate, up = W, W + 100
    path = save(tmp_path, gate=gate, up=up)
    fused = concatenate([Stored("gate", (12, 5)), Stored("up", (12, 5))], 0)
    sources: dict[str, Expression] = {"fused": fused, "turned": transpose(Stored("gate", (12, 5)), (1, 0))}
    columns = MeshLayout((4,), (0, 1, 2, 3), (Split(0, 1),))
    adapters = {
        rank: ArrayAdapter(
            [target("fused", (24, 5), (6, 5), ROWS), target("turned", (5, 12), (5, 3), columns)], stage=stage
        )
        for rank in range(4)
    }
    on_ranks(4, lambda rank: adapters[rank], path, rules=Rules(sources, cast=True, ignorable=lambda _: False))
    whole_fused = np.concatenate([gate, up])
    for rank, adapter in adapters.items():
        assert np.array_equal(adapter.arrays["fused"], whole_fused[rank * 6 : rank * 6 + 6])
        assert np.array_equal(adapter.arrays["turned"], gate.T[:, rank * 3 : rank * 3 + 3])


def test_a_load_of_one_process_needs_no_group(tmp_path: Path) -> None:
    adapter = ArrayAdapter([target("w", (12, 5), (12, 5))])
    report = load(SoloGroup(), adapter, request(save(tmp_path, w=W)))
    assert np.array_equal(adapter.arrays["w"], W)
    assert report.ranks[0].num_tensors == 1


def test_everything_that_does_not_fit_is_one_error_by_class_over_all_ranks(tmp_path: Path) -> None:
    path = save(tmp_path, w=W, extra=W, layer2=W, layer10=W, i=np.arange(3))

    def make(rank: int) -> ArrayAdapter:
        wrong = [target("absent", (2,), (2,)), target("w", (12, 6), (12, 6))] if rank else [target("i", (3,), (3,))]
        return ArrayAdapter(wrong, unfilled=["cache"] if rank else [])

    errors = failures(2, make, path)
    assert all(isinstance(error, MismatchError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    text = str(errors[0])
    assert "missing (1; " in text
    assert "unexpected (3; " in text
    assert text.index("layer2") < text.index("layer10"), "natural order"
    assert "w: model [12, 6], checkpoint [12, 5]" in text
    assert "i: model F32, checkpoint I64" in text
    assert "unfilled (1; " in text
    assert "initialize_buffers" in text


def test_not_strict_returns_the_lists_and_leaves_missing_tensors_alone(tmp_path: Path) -> None:
    adapter = ArrayAdapter([target("w", (12, 5), (12, 5)), target("absent", (2,), (2,))])
    report = load(SoloGroup(), adapter, request(save(tmp_path, w=W, extra=W), strict=False))
    assert (report.missing, report.unexpected) == (("absent",), ("extra",))
    assert set(adapter.arrays) == {"w"}


def test_not_strict_still_refuses_other_shapes(tmp_path: Path) -> None:
    adapter = ArrayAdapter([target("w", (12, 6), (12, 6))])
    with pytest.raises(MismatchError, match="shape"):
        load(SoloGroup(), adapter, request(save(tmp_path, w=W), strict=False))


def test_a_name_the_model_ignores_on_purpose_is_reported_and_no_error(tmp_path: Path) -> None:
    rules = Rules({}, cast=True, ignorable=lambda name: name == "position_ids")
    adapter = ArrayAdapter([target("w", (12, 5), (12, 5))])
    report = load(SoloGroup(), adapter, request(save(tmp_path, w=W, position_ids=W), rules=rules))
    assert report.ignored == ("position_ids",)


def test_a_tied_tensor_takes_the_name_that_is_there_and_ignores_the_other(tmp_path: Path) -> None:
    adapter = ArrayAdapter([Target(("head", "embed"), "F32", (12, 5), (12, 5))])
    load(SoloGroup(), adapter, request(save(tmp_path / "one", embed=W)))
    assert np.array_equal(adapter.arrays["head"], W)
    report = load(SoloGroup(), adapter, request(save(tmp_path / "two", embed=W + 1, head=W)))
    assert np.array_equal(adapter.arrays["head"], W)
    assert report.ignored == ("embed",)


def test_floats_are_not_cast_when_the_caller_forbids_it(tmp_path: Path) -> None:
    rules = Rules({}, cast=False, ignorable=lambda _: False)
    adapter = ArrayAdapter([target("w", (12, 5), (12, 5), dtype="F16")])
    with pytest.raises(MismatchError, match="w: model F16, checkpoint F32"):
        load(SoloGroup(), adapter, request(save(tmp_path, w=W), rules=rules))


def test_a_rank_that_cuts_a_tensor_otherwise_is_named_on_every_rank(tmp_path: Path) -> None:
    def make(rank: int) -> ArrayAdapter:
        return ArrayAdapter(
            [target("w", (12, 5), (12, 2), COLUMNS) if rank == 3 else target("w", (12, 5), (3, 5), ROWS)]
        )

    errors = failures(4, make, save(tmp_path, w=W))
    assert {type(error) for error in errors} == {ShardingError}
    assert len({str(error) for error in errors}) == 1
    assert "ranks disagree about w: ranks 0-2 have" in str(errors[0])


def test_a_rank_may_lack_a_tensor_that_its_mesh_would_give_it(tmp_path: Path) -> None:
    """Frameworks give each rank only its experts, as tensors replicated over the whole mesh."""
    everywhere = MeshLayout((4,), (0, 1, 2, 3), ())
    path = save(tmp_path, e0=W, e1=W + 1, e2=W + 2, e3=W + 3, shared=W)
    adapters = {
        rank: ArrayAdapter([target(name, (12, 5), (12, 5), everywhere) for name in (f"e{rank}", "shared")])
        for rank in range(4)
    }
    on_ranks(4, lambda rank: adapters[rank], path)
    assert all(np.array_equal(adapters[rank].arrays[f"e{rank}"], W + rank) for rank in range(4))


def test_plain_tensors_of_other_dtypes_on_some_ranks_are_a_disagreement(tmp_path: Path) -> None:
    def make(rank: int) -> ArrayAdapter:
        return ArrayAdapter([target("w", (12, 5), (12, 5), dtype="F16" if rank else "F32")])

    errors = failures(2, make, save(tmp_path, w=W))
    assert "ranks 0 have F32 [12, 5] as a plain tensor; ranks 1 have F16 [12, 5]" in str(errors[0])


def test_stages_may_have_different_names(tmp_path: Path) -> None:
    path = save(tmp_path, a=W, b=W + 1)
    adapters = {rank: ArrayAdapter([target("ab"[rank // 2], (12, 5), (12, 5))]) for rank in range(4)}
    reports = on_ranks(4, lambda rank: adapters[rank], path)
    assert np.array_equal(adapters[3].arrays["b"], W + 1)
    assert reports[0].unexpected == ()


def two_orders(axes: tuple[int, int]) -> tuple[MeshLayout, MeshLayout]:
    """Return both meanings of FSDP2-over-TP placements."""
    ranks = tuple(range(axes[0] * axes[1]))
    in_order = MeshLayout(axes, ranks, (Split(0, 0, axes[1]), Split(1, 0)))
    return in_order, MeshLayout(axes, ranks, (Split(1, 0), Split(0, 0)))


@pytest.mark.parametrize("truth", [0, 1])
def test_local_sizes_of_all_ranks_tell_which_of_two_layouts_is_meant(tmp_path: Path, truth: int) -> None:
    rows, axes = 9, (4, 2)
    layouts = two_orders(axes)
    path = save(tmp_path, v=np.arange(rows, dtype=np.float32))
    adapters = {}
    for rank in range(8):
        adapters[rank] = ArrayAdapter([target("v", (rows,), region_at((rows,), layouts[truth], rank).shape, *layouts)])
    on_ranks(8, lambda rank: adapters[rank], path)
    got = np.concatenate([adapters[rank].arrays["v"] for rank in range(8)])
    assert sorted(got.tolist()) == list(range(rows))


def test_equal_local_sizes_that_tell_nothing_are_refused_naming_the_remedy(tmp_path: Path) -> None:
    """No two-axis mesh up to 8 x 8 has such a size below 200; two layouts that differ in the order of ranks do."""
    layouts = (MeshLayout((2,), (0, 1), (Split(0, 0),)), MeshLayout((2,), (1, 0), (Split(0, 0),)))
    errors = failures(2, lambda _: ArrayAdapter([target("w", (12, 5), (6, 5), *layouts)]), save(tmp_path, w=W))
    assert {type(error) for error in errors} <= {ShardingError, RankFailedError}
    assert all("w: its placements can mean two layouts" in str(error) for error in errors)
    assert all("model=" in str(error) for error in errors)


def test_a_local_tensor_that_its_layout_does_not_give_is_refused(tmp_path: Path) -> None:
    def make(rank: int) -> ArrayAdapter:
        return ArrayAdapter([target("w", (12, 5), (4 if rank == 1 else 3, 5), ROWS)])

    errors = failures(4, make, save(tmp_path, w=W))
    assert all("w: rank " in str(error) and "shardings=" in str(error) for error in errors)


def test_a_sharding_by_regions_may_be_anything(tmp_path: Path) -> None:
    odd = Sharding((12, 5), (Region((((0, 1), (5, 7)), ((1, 5),))), None, whole((12, 5)), box((11, 0), (1, 5))))
    path = save(tmp_path, w=W)
    adapters = {
        rank: ArrayAdapter([target("w", (12, 5), region.shape, odd)] if region else [])
        for rank, region in enumerate(odd.regions)
    }
    on_ranks(4, lambda rank: adapters[rank], path)
    assert np.array_equal(adapters[0].arrays["w"], W[[0, 5, 6], 1:])
    assert np.array_equal(adapters[3].arrays["w"], W[11:])
    assert adapters[1].arrays == {}


def test_another_revision_on_another_node_is_found_before_anything_is_read(tmp_path: Path) -> None:
    here, there = save(tmp_path / "here", w=W), save(tmp_path / "there", w=W.reshape(5, 12))
    adapters = {rank: ArrayAdapter([target("w", (12, 5), (12, 5))]) for rank in range(4)}

    def work(group: Group) -> LoadReport:
        path = here if group.rank < 2 else there
        return load(group, adapters[group.rank], request(path, node_of_rank=[0, 0, 1, 1]))

    outcomes = rank_outcomes(4, work)
    assert isinstance(outcomes[2], CheckpointChangedError), "the first rank of the other node finds it"
    assert all(
        isinstance(outcomes[rank], RankFailedError) and "rank 2 of 4" in str(outcomes[rank]) for rank in (0, 1, 3)
    )
    assert all(adapter.arrays == {} for adapter in adapters.values())


def test_the_same_revision_on_another_node_loads(tmp_path: Path) -> None:
    here = save(tmp_path / "here", w=W)
    there = Path(shutil.copytree(here, tmp_path / "there"))

    def work(group: Group) -> LoadReport:
        adapter = ArrayAdapter([target("w", (12, 5), (12, 5))])
        return load(group, adapter, request(here if group.rank == 0 else there, node_of_rank=[0, 1]))

    assert [mine.node for mine in run_ranks(2, work)[1].ranks] == [0, 1]


def test_a_file_that_shrank_since_it_was_opened_is_found(tmp_path: Path) -> None:
    """Every rank looks at the size again when it opens a file for its data."""
    path = save(tmp_path, w=W)

    class Shrinking(ArrayAdapter):
        def allocate(self, plan: LoadPlan, meter: Meter) -> Mapping[str, ArrayDestination]:
            file = path / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-8])
            return super().allocate(plan, meter)

    with pytest.raises(CheckpointChangedError, match=r"model\.safetensors has \d+ bytes here, but \d+ when"):
        load(SoloGroup(), Shrinking([target("w", (12, 5), (12, 5))]), request(path))


def test_one_ranks_failing_read_stops_all(tmp_path: Path) -> None:
    path = save(tmp_path, w=W)

    class Failing(ArrayAdapter):
        def allocate(self, plan: LoadPlan, meter: Meter) -> Mapping[str, ArrayDestination]:
            raise StorageError(f"no memory for {len(plan.tensors)} tensors beside {meter.peak_bytes}")

    errors = failures(3, lambda rank: (Failing if rank == 1 else ArrayAdapter)([target("w", (12, 5), (12, 5))]), path)
    assert isinstance(errors[1], StorageError)
    for rank in (0, 2):
        assert isinstance(errors[rank], RankFailedError)
        assert "read tensors failed on rank 1 of 3" in str(errors[rank])
        assert "no memory for 1 tensors" in str(errors[rank])


def test_nothing_is_committed_on_any_rank_when_one_fails(tmp_path: Path) -> None:
    path = save(tmp_path, w=W)
    adapters = [ArrayAdapter([target("w", (12, 5), (12, 5))]) for _ in range(2)]

    def progress(step: Progress) -> None:
        if step.rank == 1 and step.bytes_done:
            raise KeyboardInterrupt

    outcomes = rank_outcomes(2, lambda group: load(group, adapters[group.rank], request(path, on_progress=progress)))
    assert isinstance(outcomes[1], KeyboardInterrupt)
    assert isinstance(outcomes[0], RankFailedError)
    assert not any(adapter.committed for adapter in adapters)


def test_progress_ends_at_the_bytes_wanted(tmp_path: Path) -> None:
    seen: list[Progress] = []
    load(
        SoloGroup(),
        ArrayAdapter([target("w", (12, 5), (12, 5))]),
        request(save(tmp_path, w=W), on_progress=seen.append),
    )
    assert seen[-1] == Progress(0, 240, 240)
    assert [step.bytes_done for step in seen] == sorted(step.bytes_done for step in seen)


def test_a_missing_checkpoint_is_raised_on_every_rank(tmp_path: Path) -> None:
    errors = failures(2, lambda _: ArrayAdapter([]), tmp_path / "absent")
    assert all("absent" in str(error) for error in errors)


def test_nodes_that_are_not_one_per_rank_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, w=W)
    for error in failures(2, lambda _: ArrayAdapter([target("w", (12, 5), (12, 5))]), path, node_of_rank=[0]):
        assert isinstance(error, InvalidInputError | RankFailedError)


def test_staging_stays_within_the_budget_and_is_waited_for(tmp_path: Path) -> None:
    big = np.arange(6_000_000, dtype=np.float32).reshape(-1, 4)
    adapter = ArrayAdapter([target("w", big.shape, big.shape)], stage=True)
    budget = 8 * 1024 * 1024
    report = load(SoloGroup(), adapter, request(save(tmp_path, w=big), budget_bytes=budget))
    assert np.array_equal(adapter.arrays["w"], big)
    assert 0 < report.ranks[0].peak_extra_bytes <= budget
    assert all(staging.waits for staging in adapter.stagings)


@pytest.mark.parametrize("stage", [False, True])
def test_many_small_neighbours_are_read_by_few_requests(tmp_path: Path, *, stage: bool) -> None:
    """A request is as large as many tensors, not as the largest of them."""
    small = {f"w{i:04}": np.full(1024, i, np.float32) for i in range(2000)}
    adapter = ArrayAdapter([target(name, (1024,), (1024,)) for name in small], stage=stage)
    report = load(SoloGroup(), adapter, request(save(tmp_path, **small)))
    assert all(np.array_equal(adapter.arrays[name], array) for name, array in small.items())
    assert report.total.bytes_read == 2000 * 4096
    assert report.total.requests <= 8, "two calls for each of four threads at most"
    assert report.total.peak_extra_bytes <= 64 * MIB


def test_files_of_which_one_node_wants_all_are_known_to_the_store(tmp_path: Path) -> None:
    """Of two files the ranks together hold one whole; over two nodes neither of them does."""
    save_file({"w": W, "unused": W}, tmp_path / "a.safetensors")
    save_file({"v": W}, tmp_path / "b.safetensors")
    index = {"metadata": {"total_size": 3 * W.nbytes}}
    index["weight_map"] = {"w": "a.safetensors", "unused": "a.safetensors", "v": "b.safetensors"}  # type: ignore[dict-item]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    rules = Rules(sources={}, cast=True, ignorable=lambda name: name == "unused")
    for nodes, wanted in (((0, 0, 0, 0), {"b.safetensors"}), ((0, 0, 1, 1), set())):
        seen: list[Container[str]] = []

        def opened(root: str, whole: Container[str], seen: list[Container[str]] = seen) -> LocalStore:
            seen.append(whole)
            return LocalStore(root, whole)

        with patch("shardferry.storage.local.LocalStore", opened):
            on_ranks(
                4,
                lambda _: ArrayAdapter([target(name, (12, 5), (3, 5), ROWS) for name in ("w", "v")]),
                tmp_path,
                node_of_rank=nodes,
                rules=rules,
            )
        assert seen == [wanted] * 4
