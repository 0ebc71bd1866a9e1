"""Saves by conversion rules over thread ranks: the files are those of converting whole tensors in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.convert.oracle import gather

from shardferry.conversions import (
    Chunk,
    Concatenate,
    Convert,
    Custom,
    Dequantize,
    Interleave,
    Rename,
    Rope,
    Rule,
    Split,
    Stack,
    StripPrefix,
    Transpose,
    Unpad,
)
from shardferry.errors import RankFailedError
from shardferry.geometry.sharding import MeshLayout, region_at
from shardferry.geometry.sharding import Split as Cut
from shardferry.plan import exchange
from shardferry.testing.groups import rank_outcomes, run_ranks

from .arrays import ArraySaver, save_arrays, save_request, target
from .movers import Wires

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from shardferry.execute.report import SaveReport
    from shardferry.transport.base import Group

    Arrays = dict[str, NDArray[Any]]

RANKS = 4
ALL = tuple(range(RANKS))
LAYOUTS = {
    "rows": MeshLayout((RANKS,), ALL, (Cut(0, 0),)),
    "columns": MeshLayout((RANKS,), ALL, (Cut(0, 1),)),
    "packed": MeshLayout((RANKS,), ALL, (Cut(0, 1, 2),)),
    "last": MeshLayout((RANKS,), ALL, (Cut(0, -1),)),
    "replicated rows": MeshLayout((2, 2), ALL, (Cut(1, 0),)),
    "both": MeshLayout((2, 2), ALL, (Cut(0, 0), Cut(1, 1))),
}
GATE_UP = Convert(
    ("{head*}.experts.{e}.w1.weight", "{head*}.experts.{e}.w3.weight"),
    ("{head*}.experts.gate_up_proj",),
    (Stack(0), Concatenate(1)),
)


def numbered(*shape: int, start: int = 1) -> NDArray[np.float32]:
    return np.arange(start, start + int(np.prod(shape)), dtype=np.float32).reshape(shape)


def save_model(path: Path, model: Arrays, layout: MeshLayout, rules: tuple[Rule, ...]) -> SaveReport:
    """Save a model that is cut alike everywhere from four ranks."""
    wires = Wires()

    def work(group: Group) -> SaveReport:
        regions = {name: region_at(array.shape, fitted(layout, array), group.rank) for name, array in model.items()}
        targets = [
            target(name, array.shape, regions[name].shape, fitted(layout, array)) for name, array in model.items()
        ]
        arrays = {name: gather(array, regions[name]) for name, array in model.items()}
        return save_arrays(group, ArraySaver(group, wires, targets, arrays), save_request(path, conversions=rules))

    return run_ranks(RANKS, work)[0]


def fitted(layout: MeshLayout, array: NDArray[Any]) -> MeshLayout:
    """Return the layout for a tensor that may have fewer dims."""
    splits = tuple(cut._replace(dim=cut.dim % array.ndim) for cut in layout.splits if cut.dim < array.ndim)
    return MeshLayout(layout.mesh_shape, layout.ranks, splits)


def check(folder: Path, model: Arrays, hub: Arrays, layout: MeshLayout, rules: tuple[Rule, ...]) -> SaveReport:
    """Save, and compare the file byte by byte with what one process would write."""
    report = save_model(folder / "saved", model, layout, rules)
    save_file(hub, folder / "plain.safetensors", metadata={"format": "pt"})
    assert (folder / "saved/model.safetensors").read_bytes() == (folder / "plain.safetensors").read_bytes()
    return report


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_fused_model_is_saved_as_experts(tmp_path: Path, layout: MeshLayout) -> None:
    fused, norm = numbered(12, 16, 4), numbered(8, start=9000)
    hub = {
        f"module.l.experts.{e}.{w}.weight": part.copy()
        for e in range(12)
        for w, part in zip(("w1", "w3"), np.split(fused[e], 2), strict=True)
    }
    report = check(
        tmp_path,
        {"l.experts.gate_up_proj": fused, "norm": norm},
        {**hub, "module.norm": norm},
        layout,
        (StripPrefix("module."), GATE_UP, Rename("absent", "gone")),
    )
    assert report.unmatched_rules == ("rename gone -> absent",)
    assert report.total.bytes_written == fused.nbytes + norm.nbytes


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("exchanged", [False, True])
def test_what_moves_elements_is_undone_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: MeshLayout, *, exchanged: bool
) -> None:
    """Parts are written by their holders, or travel to one that writes them as one; the files are the same."""
    if exchanged:
        monkeypatch.setattr(exchange, "EXCHANGE_MIN_ROWS", 1)
    w = numbered(24, 8)
    roped = np.concatenate([w[h * 8 + t : h * 8 + 8 : 2] for h in range(3) for t in (0, 1)])
    model: Arrays = {
        "turned": w.T.copy(),
        "q": w[:16],
        "k": w[16:20],
        "v": w[20:],
        "roped": roped,
        "halves": np.concatenate([w[::2], w[1::2]]),
        "short": w[:22],
        "expert": np.stack([w, w + 1000]),
    }
    hub: Arrays = {
        "turned": w,
        "qkv": w,
        "roped": w,
        "halves": w,
        "short": np.concatenate([w[:22], np.zeros((2, 8), np.float32)]),
        "expert.0": w.T.copy(),
        "expert.1": (w + 1000).T.copy(),
    }
    rules = (
        Convert(("turned",), ("turned",), (Transpose(),)),
        Convert(("qkv",), ("q", "k", "v"), (Split(0, (16, 4, 4)),)),
        Convert(("roped",), ("roped",), (Rope(3),)),
        Convert(("halves",), ("halves",), (Interleave(),)),
        Convert(("short",), ("short",), (Unpad(0, 22, 24),)),
        Convert(("expert.{e}",), ("expert",), (Transpose(), Stack())),
    )
    check(tmp_path, model, hub, layout, rules)


def test_a_rule_counts_as_unmatched_only_if_no_rank_has_what_it_is_for(tmp_path: Path) -> None:
    """As with stages of a pipeline, of which each has layers of its own."""
    rules = (Rename("begin", "first"), Rename("end", "last"), Rename("absent", "gone"))
    wires, names = Wires(), ("first", "last")

    def work(group: Group) -> SaveReport:
        arrays = {f"{names[group.rank]}.w": numbered(8)}
        targets = [target(name, (8,), (8,)) for name in arrays]
        request = save_request(tmp_path / "saved", conversions=rules)
        return save_arrays(group, ArraySaver(group, wires, targets, arrays), request)

    assert [report.unmatched_rules for report in run_ranks(2, work)] == [("rename gone -> absent",)] * 2
    assert load_file(tmp_path / "saved/model.safetensors").keys() == {"begin.w", "end.w"}


def test_equal_plain_copies_are_written_once_and_others_refused(tmp_path: Path) -> None:
    rules = (Convert(("qkv",), ("q", "k", "v"), (Chunk(),)),)
    wires = Wires()

    def work(group: Group) -> SaveReport:
        arrays = {name: numbered(4, 2, start=at + drift * group.rank) for at, name in enumerate("qkv")}
        targets = [target(name, (4, 2), (4, 2)) for name in arrays]
        return save_arrays(
            group, ArraySaver(group, wires, targets, arrays), save_request(tmp_path / "saved", conversions=rules)
        )

    drift = 0
    assert run_ranks(2, work)[0].total.bytes_written == 96
    drift = 1
    assert all("hold different bytes" in str(outcome) for outcome in rank_outcomes(2, work))


@pytest.mark.parametrize(
    ("model", "rules", "words"),
    [
        ({"a.gate_up": (2, 7, 3)}, (Convert(("a.{e}.g", "a.{e}.u"), ("a.gate_up",), (Stack(), Concatenate(1))),), "7"),
        ({"a.gate_up": ()}, (Convert(("a.{e}.g", "a.{e}.u"), ("a.gate_up",), (Stack(), Concatenate(1))),), "a.gate_up"),
        (
            {"l.experts.gate_up_proj": (2, 4, 3), "l.experts.gate_up_proj_scale": (2, 4)},
            (GATE_UP,),
            "l.experts.gate_up_proj_scale: no rule says",
        ),
        ({"w": (2,)}, (Rename("^model[.]", ""),), "give back="),
        ({"w": (2,)}, (Convert(("{x*}", "{x*}_s"), ("{x*}",), (Dequantize("fp8"),)),), "cannot be undone"),
        ({"x.w": (2,)}, (Rename("y", "x", back=("x", "z")),), "x.w would be saved under a name from which"),
        ({"b": (2,), "a": (2,)}, (Rename("a", "b"),), "would both become a"),
    ],
)
def test_what_could_not_be_loaded_again_is_refused_before_anything_is_written(
    tmp_path: Path, model: dict[str, tuple[int, ...]], rules: tuple[Rule, ...], words: str
) -> None:
    wires = Wires()

    def work(group: Group) -> SaveReport:
        arrays = {name: numbered(*shape) if shape else np.float32(1) for name, shape in model.items()}
        targets = [target(name, shape, shape) for name, shape in model.items()]
        request = save_request(tmp_path / "saved", conversions=rules)
        return save_arrays(group, ArraySaver(group, wires, targets, arrays), request)  # type: ignore[arg-type]

    outcomes = rank_outcomes(2, work)
    assert all(words in str(outcome) for outcome in outcomes), outcomes
    assert list(tmp_path.iterdir()) == []


def scaled(sources: tuple[str, ...], targets: tuple[str, ...], by: float, calls: list[float]) -> Convert:
    """Return a rule that multiplies a tensor of 24 rows of 8 with a function, and goes back with another."""

    def times(factor: float) -> Custom:
        def function(arrays: list[NDArray[Any]]) -> NDArray[Any]:
            calls.append(factor)
            return np.asarray(arrays[0] * np.float32(factor))

        return Custom(function, (24, 8), "F32")

    back = Convert(targets, sources, (times(1 / by), *[Chunk()] * (len(sources) > 1)))
    return Convert(sources, targets, (Concatenate(), times(by)), back=back)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_what_a_function_computes_is_computed_once_and_written(tmp_path: Path, layout: MeshLayout) -> None:
    """Also a part of it, and what one function makes of the result of another."""
    calls: list[float] = []
    rules = (
        scaled(("a", "b"), ("x",), 2, calls),
        scaled(("first",), ("second",), 4, calls),
        scaled(("second",), ("y",), 8, calls),
    )
    w = numbered(24, 8)
    hub = {"a": w[:12] / 2, "b": w[12:] / 2, "first": w / 32, "norm": w[0]}
    report = check(tmp_path, {"x": w, "y": w, "norm": w[0]}, hub, layout, rules)
    assert sorted(calls) == [1 / 8, 1 / 4, 1 / 2]
    assert report.total.bytes_written == sum(array.nbytes for array in hub.values())


def test_a_function_that_fails_on_one_rank_is_named_by_all_and_nothing_is_published(tmp_path: Path) -> None:
    wires = Wires()

    def work(group: Group) -> SaveReport:
        def copied(arrays: list[NDArray[Any]]) -> NDArray[Any]:
            if group.rank == 1:
                raise RuntimeError  # without a message: it is the error that counts, not its text
            return arrays[0]

        step = Custom(copied, (8, 3), "F32")
        rule = Convert(("{n}.hub",), ("{n}",), (step,), back=Convert(("{n}",), ("{n}.hub",), (step,)))
        targets = [target(name, (8, 3), (8, 3)) for name in "abc"]
        arrays = {name: numbered(8, 3) for name in "abc"}
        request = save_request(tmp_path / "saved", conversions=(rule,))
        return save_arrays(group, ArraySaver(group, wires, targets, arrays), request)

    outcomes = rank_outcomes(3, work)
    assert [type(outcome) for outcome in outcomes] == [RankFailedError, RuntimeError, RankFailedError]
    assert all("compute tensors failed on rank 1 of 3" in str(outcomes[rank]) for rank in (0, 2))
    assert list(tmp_path.iterdir()) == []
