"""What the conversions of a model's family are not for is saved under no wrong name, but refused by its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import shardferry.torch as sf
from shardferry.convert.ops import Stored
from shardferry.convert.tensor import Tensor
from shardferry.errors import InvalidInputError
from shardferry.torch.transformers.family import family_conversions

if TYPE_CHECKING:
    from pathlib import Path

FUSED = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def model() -> MixtralForCausalLM:
    config = MixtralConfig(
        hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=2, vocab_size=16,
    )  # fmt: skip
    return MixtralForCausalLM(config)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        (FUSED, (), rf"^{FUSED}: .*at least a 1-dimensional tensor"),
        (FUSED, (2, 7, 8), rf"^{FUSED} cannot be cut into equal parts: .*\(3, 8\), \(4, 8\)"),
        (FUSED, (12, 8), rf"^{FUSED}: no list of matrices"),
        (f"{FUSED}_scale", (2, 12), rf"^{FUSED}_scale: no rule says"),
        (f"{FUSED}_scale_inv", (2, 3, 2), rf"^{FUSED}_scale_inv: no rule says"),
        (f"{FUSED}_bias", (2, 12), rf"^{FUSED}_bias: no rule says"),
        (f"{FUSED}.weight_scale", (2, 12), rf"^{FUSED}\.weight_scale: no rule says"),
    ],
)
def test_what_a_family_does_not_convert_is_refused_by_name(
    model: MixtralForCausalLM, tmp_path: Path, name: str, shape: tuple[int, ...], words: str
) -> None:
    state = {**model.state_dict(), name: torch.zeros(shape)}
    with pytest.raises(InvalidInputError, match=words):
        sf.save_state_dict(state, tmp_path / "out", model=model, conversions="auto")
    assert list(tmp_path.iterdir()) == []


def test_what_is_spelled_as_in_the_checkpoint_already_stays(model: MixtralForCausalLM) -> None:
    tensors = {
        name: Tensor(name, "F32", Stored(name, tuple(value.shape))) for name, value in model.state_dict().items()
    }
    once = family_conversions(model).to_checkpoint(tensors).tensors
    assert FUSED in tensors
    assert FUSED not in once
    twice = family_conversions(model).to_checkpoint(once).tensors
    assert {name: tensor.source for name, tensor in twice.items()} == {name: one.source for name, one in once.items()}
