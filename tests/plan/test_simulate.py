"""A job in words becomes what a real one of that mesh would hold."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardferry.errors import InvalidInputError
from shardferry.format.index import CheckpointIndex, FileInfo, TensorInfo
from shardferry.plan.simulate import (
    MAX_RANKS,
    Mesh,
    consecutive_nodes,
    parse_mesh,
    parse_rule,
    simulate_job,
)
from shardferry.plan.target import region_of

SHAPES = {"mlp.up.weight": (8, 6), "mlp.down.weight": (6, 8), "norm.weight": (5,), "scale": ()}


def index_of(shapes: dict[str, tuple[int, ...]]) -> CheckpointIndex:
    """Return an index of one file that holds the tensors as U8, one after another."""
    infos, at = {}, 8
    for name, shape in shapes.items():
        size = int(np.prod(shape, dtype=np.int64))
        infos[name] = TensorInfo("U8", shape, "f", (at, at + size))
        at += size
    return CheckpointIndex("/", infos, {"f": FileInfo(at, 8, "")}, {})


def local_of(name: str, rank: int, mesh: str, *rules: str) -> list[int]:
    """Return the elements, by flat index, that a rank would hold."""
    axes = parse_mesh(mesh)
    held = simulate_job(index_of(SHAPES), axes, [parse_rule(rule, axes) for rule in rules])[name]
    region = region_of(held.layout, held.shape, rank)
    assert region is not None
    rows = [[i for start, stop in intervals for i in range(start, stop)] for intervals in region.dims]
    everything = np.arange(int(np.prod(held.shape, dtype=np.int64))).reshape(held.shape)
    return everything[np.ix_(*rows)].ravel().tolist() if rows else everything.ravel().tolist()


def cut(array: np.ndarray, dim: int, pieces: int, index: int) -> np.ndarray:
    """Return one of the pieces `torch.chunk` makes, empty where it makes fewer."""
    width = -(-array.shape[dim] // pieces)
    return array.take(range(min(array.shape[dim], index * width), min(array.shape[dim], (index + 1) * width)), axis=dim)


def test_axes_are_named_outermost_first() -> None:
    assert parse_mesh("fsdp=8, tp=4") == Mesh(("fsdp", "tp"), (8, 4))
    assert parse_mesh("a=3").world_size == 3


@pytest.mark.parametrize("text", ["", "tp", "tp=", "tp=0", "=4", "tp=-1", "tp=4,", "tp=4;dp=2", "tp=1e9", "1p=4"])
def test_what_is_no_mesh_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidInputError, match="fsdp=8,tp=4"):
        parse_mesh(text)


def test_a_mesh_names_an_axis_once_and_has_a_bound() -> None:
    with pytest.raises(InvalidInputError, match="twice"):
        parse_mesh("tp=2,tp=2")
    with pytest.raises(InvalidInputError, match=f"more than the {MAX_RANKS}"):
        parse_mesh("a=999999999,b=999999999")


@pytest.mark.parametrize("text", ["", "x", "=0@tp", "x=tp", "x=0@", "x=@tp", "x=0.5@tp", "x=0tp"])
def test_what_is_no_rule_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidInputError, match="REGEX=dim@axis"):
        parse_rule(text, parse_mesh("tp=2"))


def test_a_rule_needs_an_axis_of_the_mesh_and_a_regular_expression() -> None:
    with pytest.raises(InvalidInputError, match="has axes fsdp, tp, not ep"):
        parse_rule(".*=0@ep", parse_mesh("fsdp=2,tp=2"))
    with pytest.raises(InvalidInputError, match="no regular expression"):
        parse_rule("(=0@tp", parse_mesh("tp=2"))


def test_an_expression_may_hold_an_equals_sign() -> None:
    assert parse_rule("(?=a)a=b=1@tp", parse_mesh("tp=2")).pattern.pattern == "(?=a)a=b"


def test_the_last_axis_varies_fastest() -> None:
    held = [local_of("norm.weight", rank, "fsdp=2,tp=2", ".*=0@tp") for rank in range(4)]
    assert held == [[0, 1, 2], [3, 4], [0, 1, 2], [3, 4]]


@given(st.permutations([("fsdp", 0), ("tp", 0), ("ep", 1)]), st.integers(0, 11))
def test_cuts_act_in_the_order_given(cuts: list[tuple[str, int]], rank: int) -> None:
    sizes = {"fsdp": 2, "tp": 3, "ep": 2}
    position = dict(zip(sizes, list(itertools.product(range(2), range(3), range(2)))[rank], strict=True))
    expected = np.arange(48).reshape(8, 6)
    for axis, dim in cuts:
        expected = cut(expected, dim, sizes[axis], position[axis])
    rules = [f".*up.*={dim}@{axis}" for axis, dim in cuts]
    assert local_of("mlp.up.weight", rank, "fsdp=2,tp=3,ep=2", *rules) == expected.ravel().tolist()


def test_the_first_rule_that_matches_says_how_an_axis_cuts() -> None:
    rules = (".*down.*=-1@tp", ".*weight=0@tp")
    assert local_of("mlp.down.weight", 0, "tp=4", *rules) == [0, 1, 8, 9, 16, 17, 24, 25, 32, 33, 40, 41]
    assert local_of("mlp.up.weight", 3, "tp=4", *rules) == list(range(36, 48))


def test_what_no_rule_can_cut_is_whole_on_every_rank() -> None:
    assert local_of("scale", 1, "tp=2", ".*=0@tp") == [0]
    assert local_of("norm.weight", 1, "tp=2", "mlp.*=0@tp") == [0, 1, 2, 3, 4]
    assert local_of("norm.weight", 1, "tp=2", ".*weight=1@tp") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        (["mlp=0@tp"], "whole name of the checkpoint, such as 'mlp.up.weight'"),
        ([".*weight=2@tp"], r"has a dim 2; mlp.up.weight has shape \[8, 6\]"),
        ([".*=0@tp", "mlp.*=0@tp"], "such as '.*=0@tp', have cut all"),
    ],
)
def test_a_rule_that_cuts_nothing_is_refused_and_says_why(rules: list[str], reason: str) -> None:
    mesh = parse_mesh("tp=2")
    with pytest.raises(InvalidInputError, match="cuts no tensor") as refused:
        simulate_job(index_of(SHAPES), mesh, [parse_rule(rule, mesh) for rule in rules])
    assert refused.match(reason)


def test_ranks_fill_one_node_after_another() -> None:
    assert consecutive_nodes(6, 4) == (0, 0, 0, 0, 1, 1)
    with pytest.raises(InvalidInputError, match="at least one rank"):
        consecutive_nodes(6, 0)
