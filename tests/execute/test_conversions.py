"""Loads by conversion rules over thread ranks: every rank gets its part of what converting whole tensors gives."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.checkpoints import Tensor, file_of
from tests.convert.oracle import gather

from shardferry.conversions import (
    AddPrefix,
    Chunk,
    Concatenate,
    Convert,
    Custom,
    Dequantize,
    Interleave,
    Pad,
    Rename,
    Rope,
    Rule,
    Stack,
    StripPrefix,
    Transpose,
)
from shardferry.errors import InvalidInputError, MismatchError, RankFailedError, ShardferryError
from shardferry.geometry.sharding import MeshLayout, Split, region_at
from shardferry.plan.match import Rules
from shardferry.testing.groups import rank_outcomes, run_ranks
from shardferry.transport.solo import SoloGroup

from .arrays import ArrayAdapter, load, request, save, target

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from shardferry.execute.report import LoadReport
    from shardferry.transport.base import Group

RANKS = 4


def cut(dim: int, blocks: int = 1) -> MeshLayout:
    return MeshLayout((RANKS,), tuple(range(RANKS)), (Split(0, dim, blocks),))


def rules_of(*rules: Rule) -> Rules:
    return Rules({}, cast=True, ignorable=lambda _: False, conversions=rules)


def check(
    path: Path, rules: Rules, expected: dict[str, NDArray[Any]], layout: MeshLayout, *, stage: bool = False
) -> LoadReport:
    """Load on four ranks and compare each one's part; return the report."""
    adapters = {}
    for rank in range(RANKS):
        regions = {name: region_at(array.shape, layout, rank) for name, array in expected.items()}
        targets = [target(name, array.shape, regions[name].shape, layout) for name, array in expected.items()]
        adapters[rank] = ArrayAdapter(targets, stage=stage)
    reports = run_ranks(RANKS, lambda group: load(group, adapters[group.rank], request(path, rules=rules)))
    for rank, adapter in adapters.items():
        for name, array in expected.items():
            wanted = gather(array, region_at(array.shape, layout, rank))
            assert np.array_equal(adapter.arrays[name], wanted), (name, rank)
    return reports[0]


def numbered(*shape: int, start: int = 1) -> NDArray[np.float32]:
    return np.arange(start, start + int(np.prod(shape)), dtype=np.float32).reshape(shape)


GATE_UP = Convert(
    ("{head*}.experts.{e}.w1.weight", "{head*}.experts.{e}.w3.weight"),
    ("{head*}.experts.gate_up_proj",),
    (Stack(0), Concatenate(1)),
)


def experts(count: int) -> tuple[dict[str, NDArray[np.float32]], NDArray[np.float32]]:
    """Return per-expert tensors and the fused one they make."""
    firsts = {f"l.experts.{e}.{w}.weight": 1000 * e + at for e in range(count) for at, w in ((0, "w1"), (500, "w3"))}
    parts = {name: numbered(8, 3, start=first) for name, first in firsts.items()}
    fused = [np.concatenate([parts[f"l.experts.{e}.{w}.weight"] for w in ("w1", "w3")]) for e in range(count)]
    return parts, np.stack(fused)


@pytest.mark.parametrize("layout", [cut(0), cut(1), cut(1, 2), cut(2)], ids=["experts", "rows", "packed", "columns"])
@pytest.mark.parametrize("stage", [False, True])
def test_experts_are_merged_exactly_under_any_cut(tmp_path: Path, layout: MeshLayout, *, stage: bool) -> None:
    parts, fused = experts(12)
    report = check(save(tmp_path, **parts), rules_of(GATE_UP), {"l.experts.gate_up_proj": fused}, layout, stage=stage)
    assert report.total.bytes_wanted == fused.nbytes


def test_an_expert_parallel_rank_wants_its_own_experts_only(tmp_path: Path) -> None:
    """What it reads beside them are holes cheaper than a request: experts lie in the order of text, 10 before 2."""
    parts, fused = experts(12)
    report = check(save(tmp_path, **parts), rules_of(GATE_UP), {"l.experts.gate_up_proj": fused}, cut(0))
    assert [rank.bytes_wanted for rank in report.ranks] == [fused.nbytes // RANKS] * RANKS


@pytest.mark.parametrize("dim", [0, 1])
def test_what_moves_elements_is_exact_under_any_cut(tmp_path: Path, dim: int) -> None:
    w, qkv = numbered(24, 8), numbered(24, 8, start=500)
    rope = np.concatenate([w[h * 8 + t : h * 8 + 8 : 2] for h in range(3) for t in (0, 1)])
    rules = rules_of(
        Convert(("turned",), ("turned",), (Transpose(),)),
        Convert(("qkv",), ("q", "k", "v"), (Chunk(),)),
        Convert(("roped",), ("roped",), (Rope(3),)),
        Convert(("halves",), ("halves",), (Interleave(),)),
        Convert(("padded",), ("padded",), (Pad(0, 30),)),
    )
    path = save(tmp_path, turned=w.T.copy(), qkv=qkv, roped=w, halves=w, padded=w)
    expected = {
        "turned": w,
        **{name: qkv[at * 8 : at * 8 + 8] for at, name in enumerate("qkv")},
        "roped": rope,
        "halves": np.concatenate([w[::2], w[1::2]]),
        "padded": np.concatenate([w, np.zeros((6, 8), np.float32)]),
    }
    check(path, rules, expected, cut(dim))


def test_quantized_experts_are_decoded_block_by_block(tmp_path: Path) -> None:
    """Dequantized, stacked and joined; each rank reads its own codes once."""
    rng = np.random.default_rng(3)
    names = [f"e.{i}.{p}.weight" for p in ("gate", "up") for i in range(4)]
    codes = {name: rng.integers(0, 120, (8, 6)).astype(np.uint8) for name in names}
    scales = {f"{name}_scale_inv": rng.random((2, 2)).astype(np.float32) for name in codes}
    write_fp8(tmp_path, codes, scales)
    table = np.array([0 if not c else decode(c) for c in range(128)], np.float32)

    def plain(name: str) -> NDArray[np.float32]:
        grid = np.repeat(np.repeat(scales[f"{name}_scale_inv"], 4, 0), 4, 1)[:8, :6]
        return np.asarray(table[codes[name]] * grid)

    fused = np.stack([np.concatenate([plain(f"e.{i}.{p}.weight") for p in ("gate", "up")]) for i in range(4)])
    rules = rules_of(
        Convert(("{x*}.weight", "{x*}.weight_scale_inv"), ("{x*}.weight",), (Dequantize("fp8", (4, 4)),), partial=True),
        Convert(("e.{i}.gate.weight", "e.{i}.up.weight"), ("gate_up",), (Stack(), Concatenate(1))),
    )
    for layout in (cut(0), cut(1), cut(1, 2), cut(2)):
        report = check(tmp_path, rules, {"gate_up": fused}, layout)
        assert report.total.bytes_wanted - fused.size <= 4 * 4 * 8 * RANKS, "codes once, and scales of the blocks"


def decode(code: int) -> float:
    return (code & 7) / 8 * 2.0**-6 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7)


def write_fp8(folder: Path, codes: dict[str, NDArray[np.uint8]], scales: dict[str, NDArray[np.float32]]) -> None:
    entries = [Tensor(name, "F8_E4M3", array.shape, array.tobytes()) for name, array in codes.items()]
    entries += [Tensor(name, "F32", array.shape, array.tobytes()) for name, array in scales.items()]
    (folder / "model.safetensors").write_bytes(file_of(entries))


def test_a_function_of_whole_tensors_is_the_way_out(tmp_path: Path) -> None:
    def outer(arrays: list[NDArray[Any]]) -> NDArray[Any]:
        return np.outer(*arrays)

    a, b = numbered(8), numbered(4)
    rules = rules_of(Convert(("a", "b"), ("product",), (Custom(outer, (8, 4), "F32"),)))
    report = check(save(tmp_path, a=a, b=b), rules, {"product": np.outer(a, b)}, cut(0))
    assert report.total.bytes_wanted == RANKS * (a.nbytes + b.nbytes)


def test_a_rule_counts_as_unmatched_only_if_no_rank_wants_what_it_makes(tmp_path: Path) -> None:
    """As with stages of a pipeline, of which each has layers of its own."""
    path = save(tmp_path, **{"begin.w": numbered(8), "end.w": numbered(8)})
    rules = rules_of(Rename("begin", "first"), Rename("end", "last"), Rename("absent", "gone"))

    def work(group: Group) -> LoadReport:
        return load(group, ArrayAdapter([target(f"{names[group.rank]}.w", (8,), (8,))]), request(path, rules=rules))

    names = ("first", "last")
    assert [report.unmatched_rules for report in run_ranks(2, work)] == [("rename absent -> gone",)] * 2


def test_a_rule_without_a_match_is_reported_once(tmp_path: Path) -> None:
    rules = rules_of(StripPrefix("module."), Rename("absent", "gone"))
    report = check(save(tmp_path, **{"module.w": numbered(8, 2)}), rules, {"w": numbered(8, 2)}, cut(0))
    assert report.unmatched_rules == ("rename absent -> gone",)


@pytest.mark.parametrize(
    ("rule", "error", "words"),
    [
        (Convert(("w", "absent"), ("x",), (Concatenate(),)), InvalidInputError, "absent is missing"),
        (Convert(("w",), ("x", "y"), (Chunk(1),)), InvalidInputError, "3, which is not divisible"),
        (Rename("^w$", "other"), MismatchError, "unexpected"),
    ],
)
def test_a_rule_that_does_not_fit_fails_every_rank_before_data_is_read(
    tmp_path: Path, rule: Rule, error: type[ShardferryError], words: str
) -> None:
    path = save(tmp_path, w=numbered(8, 3))

    def work(group: Group) -> object:
        return load(group, ArrayAdapter([target("x", (8, 3), (8, 3))]), request(path, rules=rules_of(rule)))

    outcomes = rank_outcomes(2, work)
    assert all(isinstance(outcome, BaseException) and words in str(outcome) for outcome in outcomes), outcomes
    assert any(isinstance(outcome, error) for outcome in outcomes)


def test_a_function_may_lie_at_another_address_on_every_rank(tmp_path: Path) -> None:
    path = save(tmp_path, w=numbered(8, 3))

    def work(group: Group) -> object:
        def twice(arrays: list[NDArray[Any]]) -> NDArray[Any]:
            return 2 * arrays[0]

        rules = rules_of(Convert(("w",), ("twice",), (Custom(twice, (8, 3), "F32"),)))
        return load(group, ArrayAdapter([target("twice", (8, 3), (8, 3))]), request(path, rules=rules))

    run_ranks(2, work)


def test_a_function_that_fails_on_one_rank_is_named_by_all(tmp_path: Path) -> None:
    path = save(tmp_path, w=numbered(8, 3))

    def work(group: Group) -> object:
        def copied(arrays: list[NDArray[Any]]) -> NDArray[Any]:
            if group.rank == 1:
                raise RuntimeError  # without a message: it is the error that counts, not its text
            return arrays[0]

        rules = rules_of(Convert(("w",), ("x",), (Custom(copied, (8, 3), "F32"),)))
        return load(group, ArrayAdapter([target("x", (8, 3), (8, 3))]), request(path, rules=rules))

    outcomes = rank_outcomes(3, work)
    assert [type(outcome) for outcome in outcomes] == [RankFailedError, RuntimeError, RankFailedError]
    assert all("read tensors failed on rank 1 of 3" in str(outcomes[rank]) for rank in (0, 2))


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "_fsdp_wrapped_module."])
def test_a_wrapper_in_the_names_is_pointed_out(tmp_path: Path, wrapper: str) -> None:
    """What the error suggests is what helps."""
    path = save(tmp_path, **{f"{wrapper}a.{wrapper}w": numbered(8, 3)})
    adapter = ArrayAdapter([target("a.w", (8, 3), (8, 3))])
    with pytest.raises(MismatchError) as caught:
        load(SoloGroup(), adapter, request(path))
    suggested = Rename(re.escape(wrapper), "")
    assert f"Rename({re.escape(wrapper)!r}, '')" in str(caught.value)
    load(SoloGroup(), adapter, request(path, rules=rules_of(suggested)))
    assert np.array_equal(adapter.arrays["a.w"], numbered(8, 3))


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod."])
def test_a_wrapper_in_the_models_names_is_pointed_out(tmp_path: Path, wrapper: str) -> None:
    """What the error suggests is what helps."""
    path = save(tmp_path, **{"a.w": numbered(8, 3)})
    adapter = ArrayAdapter([target(f"{wrapper}a.w", (8, 3), (8, 3))])
    with pytest.raises(MismatchError) as caught:
        load(SoloGroup(), adapter, request(path))
    assert f"conversions=[AddPrefix({wrapper!r})]" in str(caught.value)
    load(SoloGroup(), adapter, request(path, rules=rules_of(AddPrefix(wrapper))))
    assert np.array_equal(adapter.arrays[f"{wrapper}a.w"], numbered(8, 3))
