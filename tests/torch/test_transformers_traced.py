"""transformers' own operations on tensors without values say where each element comes from: ids are the proof."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.convert.oracle import evaluate
from transformers import core_model_loading as ops

from shardferry.convert.ops import Stored
from shardferry.errors import InvalidInputError
from shardferry.torch.transformers.traced import Traced

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CONFIG: Any = SimpleNamespace(
    num_attention_heads=2, vocab_size=10, unpadded_vocab_size=7, get_text_config=lambda: CONFIG, parts=3
)
PARAMETER = torch.empty(4, 3, 2)
MODEL = SimpleNamespace(get_parameter=lambda _: PARAMETER)
# Operation, shapes of the tensors of every source, targets.
CASES: list[tuple[Any, Sequence[Sequence[tuple[int, ...]]], Sequence[str]]] = [
    (ops.MergeModulelist(0), [[(3, 4)] * 12], ["t"]),
    (ops.MergeModulelist(1), [[(3, 4)] * 3], ["t"]),
    (ops.SplitModulelist(0), [[(3, 4, 5)]], ["t.*"]),
    (ops.Concatenate(1), [[(2, 3, 4)], [(2, 5, 4)]], ["t"]),
    (ops.Concatenate(0, "parts"), [[(2, 3)] * 3], ["t"]),
    (ops.Chunk(0), [[(6, 2)]], ["q", "k", "v"]),
    (ops.Chunk(0), [[(7, 2)]], ["q", "k", "v"]),
    (ops.Chunk(1, "parts"), [[(2, 6)]], ["t.*"]),
    (ops.Split(1), [[(2, 6)]], ["a", "b"]),
    (ops.Interleave(0), [[(6, 4)]], ["t"]),
    (ops.Interleave(1, inverse=True), [[(3, 6)]], ["t"]),
    (ops.Transpose(0, 1), [[(6, 4)]], ["t"]),
    (ops.Transpose(1, 2, check_dims=True), [[(4, 2, 3)]], ["t"]),
    (ops.Transpose(1, 2, check_dims=True), [[(4, 3, 2)]], ["t"]),
    (ops.Conv3dToLinear(3, (2, 2, 2)), [[(4, 3, 2, 2, 2)]], ["t"]),
    (ops.LinearToConv3d(3, (2, 2, 2)), [[(4, 24)]], ["t"]),
    (ops.PermuteForRope(), [[(8, 3)]], ["t"]),
    (ops.PermuteForRope(inverse=True), [[(8,)]], ["t"]),
    (ops.VisionFuseAndPermuteForRope(permute_layer_names=["s0"]), [[(8, 3)], [(8, 3)]], ["t"]),
    (ops.ErnieFuseAndSplitTextVisionExperts(), [[(3, 4)] * 4, [(3, 4)] * 4], ["t", "v"]),
    (ops.ErnieSplitAndDecoupleTextVisionExperts(), [[(2, 6, 4)], [(2, 6, 4)]], ["g.*", "u.*"]),
    (ops.Inkling2LoopMergeMessageQueries(), [[(4, 3)], [(4, 3)]], ["t"]),
    (ops.Inkling2LoopMergeMessageQueries(inverse=True), [[(2, 4, 3)]], ["t", "v"]),
    (ops.Inkling2UnpadVocab(), [[(10, 2)]], ["t"]),
    (ops.Inkling2UnpadVocab(inverse=True), [[(7, 2)]], ["t"]),
]


def run(operation: Any, sources: Mapping[str, list[torch.Tensor]], targets: Sequence[str]) -> dict[str, torch.Tensor]:  # noqa: ANN401
    with torch.no_grad():
        made = operation.convert(
            dict(sources),
            source_patterns=list(sources),
            target_patterns=list(targets),
            config=CONFIG,
            model=MODEL,
            full_layer_name=targets[0],
        )
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{type(case[0]).__name__} {case[1][0][0]}")
def test_an_operation_of_transformers_is_followed_element_by_element(
    case: tuple[Any, Sequence[Sequence[tuple[int, ...]]], Sequence[str]],
) -> None:
    operation, shapes, targets = case
    arrays: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}
    real: dict[str, list[torch.Tensor]] = {}
    traced: dict[str, list[torch.Tensor]] = {}
    for source, several in enumerate(shapes):
        for shape in several:
            key = f"stored {len(arrays)}"
            start = 1 + sum(array.size for array in arrays.values())
            arrays[key] = np.arange(start, start + np.prod(shape)).reshape(shape)
            real.setdefault(f"s{source}", []).append(torch.from_numpy(arrays[key]).to(torch.float32))
            traced.setdefault(f"s{source}", []).append(Traced(Stored(key, shape), "F32"))
    expected, followed = run(operation, real, targets), run(operation, traced, targets)
    assert list(followed) == list(expected)
    for name, value in expected.items():
        one = followed[name]
        assert isinstance(one, Traced)
        assert one.shape == value.shape
        assert (evaluate(one.source, arrays) == value.numpy()).all(), name


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t + 1,
        lambda t: t.to(torch.int64),
        lambda t: t[t > 0],
        lambda t: torch.cat([t, torch.zeros(1, 3)]),
        lambda t: t[[0, 1], [0, 1]],
    ],
)
def test_what_changes_values_is_refused(change: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidInputError), torch.no_grad():
        change(Traced(Stored("w", (2, 3)), "F32"))


def test_dims_counted_from_the_end_and_steps_are_followed() -> None:
    array = np.arange(24).reshape(2, 3, 4)
    traced, real = Traced(Stored("w", (2, 3, 4)), "F32"), torch.from_numpy(array)
    changes: tuple[Any, ...] = (
        lambda t: t.permute(-1, 0, 1),
        lambda t: t.unsqueeze(-1).squeeze(-1),
        lambda t: t[..., ::2],
        lambda t: t[1, :, -1],
        lambda t: t[:, 1:1],
        lambda t: t.unbind(-2)[1],
        lambda t: t.flatten(),
        lambda t: t[:, [2, 0]],
    )
    for change in changes:
        with torch.no_grad():
            made = change(traced)
        assert isinstance(made, Traced)
        assert (evaluate(made.source, {"w": array}) == change(real).numpy()).all()
