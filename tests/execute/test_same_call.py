"""Ranks that ask for different things: every rank is told which and what, before a tensor is read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.tools.slow_http import slow_web

from shardferry.conversions import StripPrefix
from shardferry.errors import CheckpointChangedError, CheckpointNotFoundError, InvalidInputError, ShardferryError
from shardferry.execute.job import estimate_load
from shardferry.execute.reading import Sharing
from shardferry.execute.warm import WarmRequest
from shardferry.execute.warm_job import JobRequest, run_warm
from shardferry.plan.match import Rules
from shardferry.testing.groups import rank_outcomes
from shardferry.units import MIB

from .arrays import ArrayAdapter, ArraySaver, load, request, save, save_arrays, save_request, target
from .movers import Wires

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardferry.execute.job import Request
    from shardferry.transport.base import Group

W = np.arange(60_000, dtype=np.float32).reshape(12, 5000)


def adapter() -> ArrayAdapter:
    return ArrayAdapter([target("w", W.shape, W.shape)])


def load_each(requests: Sequence[Request]) -> tuple[list[object], list[ArrayAdapter]]:
    """Load on as many ranks as there are requests; return what came of it on each, and what was filled."""
    adapters = [adapter() for _ in requests]
    outcomes = rank_outcomes(len(requests), lambda group: load(group, adapters[group.rank], requests[group.rank]))
    return list(outcomes), adapters


def warm(group: Group, path: Path, when_short: str = "shrink") -> object:
    asked = JobRequest(
        path=str(path),
        checkpoint_strict=True,
        variant=None,
        rules=Rules({}, cast=True, ignorable=lambda _: False),
        given_names=(),
        node_of_rank=None,
        warm=WarmRequest(cost=None, when_short=when_short, on_progress=None),  # type: ignore[arg-type]
    )
    with group:
        return run_warm(group, lambda: adapter().targets, asked)


def assert_all_name(outcomes: Sequence[object], *words: str) -> None:
    """Assert that every rank failed and was told all of the words."""
    for outcome in outcomes:
        assert isinstance(outcome, ShardferryError), outcome
        assert all(word in str(outcome) for word in words), outcome


def test_two_checkpoints_of_one_layout_are_told_apart_on_one_node(tmp_path: Path) -> None:
    """Two steps of a training have the same names, shapes, sizes and headers."""
    early, late = save(tmp_path / "step-1", w=W), save(tmp_path / "step-2", w=W + 1)
    outcomes, adapters = load_each([request(early), request(early), request(late)])
    assert isinstance(outcomes[2], CheckpointChangedError)
    assert_all_name(outcomes, "rank 2", str(early), str(late), "model.safetensors")
    assert not any(adapter.arrays for adapter in adapters)


def test_two_checkpoints_of_one_layout_are_told_apart_on_two_nodes(tmp_path: Path) -> None:
    early, late = save(tmp_path / "step-1", w=W), save(tmp_path / "step-2", w=W + 1)
    outcomes, adapters = load_each([request(path, node_of_rank=[0, 1]) for path in (early, late)])
    assert_all_name(outcomes, "rank 1", str(early), str(late), "model.safetensors")
    assert not any(adapter.arrays for adapter in adapters)


def test_other_files_on_the_same_node_are_found_by_their_size(tmp_path: Path) -> None:
    one, other = save(tmp_path / "one", w=W), save(tmp_path / "other", w=W, more=W)
    outcomes, adapters = load_each([request(one), request(other)])
    assert_all_name(outcomes, "rank 1", str(one), str(other), "model.safetensors", "bytes")
    assert not any(adapter.arrays for adapter in adapters)


def test_equal_copies_and_links_may_be_loaded_by_other_paths(tmp_path: Path) -> None:
    one, copy, link = save(tmp_path / "one", w=W), save(tmp_path / "copy", w=W), tmp_path / "link"
    link.symlink_to(one)
    outcomes, adapters = load_each([request(one), request(copy), request(link)])
    assert not any(isinstance(outcome, BaseException) for outcome in outcomes), outcomes
    assert all(np.array_equal(adapter.arrays["w"], W) for adapter in adapters)


def test_two_files_of_one_folder_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (save(tmp_path, w=W) / "model.safetensors").rename(tmp_path / f"{name}.safetensors")
    outcomes, _ = load_each([request(tmp_path / "a.safetensors"), request(tmp_path / "b.safetensors")])
    assert_all_name(outcomes, "ranks 0 and 1", "a.safetensors", "b.safetensors")


def test_a_path_that_one_rank_lacks_is_named_as_that_rank_gave_it(tmp_path: Path) -> None:
    path = save(tmp_path / "there", w=W)
    outcomes, _ = load_each([request(path), request(tmp_path / "not" / "there")])
    assert isinstance(outcomes[1], CheckpointNotFoundError)
    assert_all_name(outcomes, str(tmp_path / "not" / "there"))
    assert "rank 1" in str(outcomes[0])


def test_urls_that_differ_are_told_apart_by_what_they_give(tmp_path: Path) -> None:
    for name, values in (("step-1", W), ("copy", W), ("step-2", W + 1)):
        save(tmp_path / name, w=values)
    with slow_web(tmp_path, latency_ms=0, rate_mb=1000) as url:
        outcomes, _ = load_each([replace(request(tmp_path), path=f"{url}/{name}") for name in ("step-1", "copy")])
        assert not any(isinstance(outcome, BaseException) for outcome in outcomes), outcomes
        outcomes, adapters = load_each(
            [replace(request(tmp_path), path=f"{url}/{name}") for name in ("step-1", "step-2")]
        )
    assert_all_name(outcomes, "rank 1", f"{url}/step-1", f"{url}/step-2", "model.safetensors")
    assert not any(adapter.arrays for adapter in adapters)


def shared(read_once: str, exchange_bytes: int = MIB) -> Sharing:
    return Sharing(read_once, exchange_bytes, lambda _: Wires().open(0, lambda: None))  # type: ignore[arg-type]


RULES = Rules({}, cast=True, ignorable=lambda _: False)


@pytest.mark.parametrize(
    ("words", "field", "one", "other"),
    [
        ("strict: True and False", "strict", True, False),
        ("checkpoint_strict: True and False", "checkpoint_strict", True, False),
        ("variant: None and 'fp16'", "variant", None, "fp16"),
        ("node_of_rank: [0, 0] and [0, 1]", "node_of_rank", None, [0, 1]),
        ("read_once: 'auto' and 'always'", "sharing", shared("auto"), shared("always")),
        ("budget_bytes): 1048576 and 2097152", "sharing", shared("auto"), shared("auto", 2 * MIB)),
        ("cast: True and False", "rules", RULES, RULES._replace(cast=False)),
        ("ignore_mismatched_sizes: False and True", "rules", RULES, RULES._replace(skip_mismatched=True)),
        ("conversions", "rules", RULES, RULES._replace(conversions=(StripPrefix("a."),))),
    ],
)
def test_an_option_that_differs_by_rank_is_named_with_both_values(
    tmp_path: Path, words: str, field: str, one: object, other: object
) -> None:
    path = save(tmp_path, w=W)
    outcomes, _ = load_each([request(path, **{field: one}), request(path, **{field: other})])
    assert all(isinstance(outcome, InvalidInputError) for outcome in outcomes), outcomes
    assert_all_name(outcomes, "ranks 0 and 1 call this load with different ", words)


def test_memory_for_an_exchange_that_is_forbidden_may_differ(tmp_path: Path) -> None:
    path = save(tmp_path, w=W)
    outcomes, _ = load_each([request(path, sharing=shared("never", size)) for size in (MIB, 2 * MIB)])
    assert not any(isinstance(outcome, BaseException) for outcome in outcomes), outcomes


def test_nodes_of_many_ranks_are_compared_whole_and_shortened_in_the_error(tmp_path: Path) -> None:
    path = save(tmp_path, w=W)
    nodes = [list(range(17)), [*range(16), 15]]
    outcomes, _ = load_each([request(path, node_of_rank=nodes[rank == 16]) for rank in range(17)])
    assert_all_name(outcomes, "ranks 0 and 16 call this load with different node_of_rank: [0, 1, ", "15, 'hash ")


def test_a_warm_up_names_an_option_that_differs(tmp_path: Path) -> None:
    path = save(tmp_path, w=W)
    outcomes = rank_outcomes(2, lambda group: warm(group, path, when_short=("shrink", "refuse")[group.rank]))
    assert_all_name(outcomes, "ranks 0 and 1 call this warm-up with different when_short: 'shrink' and 'refuse'")


def test_a_warm_up_tells_two_checkpoints_of_one_layout_apart(tmp_path: Path) -> None:
    paths = [save(tmp_path / "step-1", w=W), save(tmp_path / "step-2", w=W + 1)]
    outcomes = rank_outcomes(2, lambda group: warm(group, paths[group.rank]))
    assert_all_name(outcomes, "rank 1", *map(str, paths), "model.safetensors")


def save_from(group: Group, path: Path) -> object:
    saver = ArraySaver(group, Wires(), adapter().targets, {"w": W})
    return save_arrays(group, saver, save_request(path))


def plan_from(group: Group, path: Path) -> object:
    with group:
        return estimate_load(group, adapter(), request(path), shared("auto"))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (warm, "rank 0 calls a load, rank 1 a warm-up"),
        (plan_from, "rank 0 calls a load, rank 1 a plan of a load"),
        (save_from, '"open checkpoint"'),
    ],
)
def test_ranks_that_make_different_calls_are_told_so(tmp_path: Path, other: object, words: str) -> None:
    """As after a rank has left a call out, and is one behind."""
    path = save(tmp_path, w=W)

    def work(group: Group) -> object:
        return other(group, path) if group.rank else load(group, adapter(), request(path))  # type: ignore[operator]

    outcomes = rank_outcomes(2, work)
    assert_all_name(outcomes, words, "the same calls in the same order")
