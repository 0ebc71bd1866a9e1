"""What cannot be filled in place is refused by name, before anything is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shardferry.torch as sf
from shardferry.errors import InvalidInputError, MismatchError
from shardferry.geometry.region import whole

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "model.safetensors")
    return tmp_path


def fake() -> torch.Tensor:
    """Return a tensor of a subclass that has no memory of its own, as quantized weights have none."""
    with FakeTensorMode():
        return torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (fake(), "w is a FakeTensor, a tensor subclass"),
        (torch.zeros(2, 3).to_sparse(), r"w has layout torch\.sparse_coo"),
        (torch.zeros(1, 3).expand(2, 3), r"w is an expanded view.*clone\(\) it"),
        (cast("torch.Tensor", [1.0]), "w is no tensor but a list"),
    ],
    ids=["fake", "sparse", "expanded", "list"],
)
def test_what_has_no_plain_memory_of_its_own_is_refused(checkpoint: Path, value: torch.Tensor, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        sf.load_state_dict({"w": value}, checkpoint)


def test_a_parameter_without_a_shape_is_refused(checkpoint: Path) -> None:
    with pytest.raises(InvalidInputError, match="weight has no shape yet: run one forward"):
        sf.load_model(nn.LazyLinear(2), checkpoint)


def test_a_parameter_on_meta_that_a_hook_takes_out_of_the_state_dict_is_named(checkpoint: Path) -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2, 3))
    model.adapter = nn.Parameter(torch.zeros(2, device="meta"))

    def take_out(_module: nn.Module, state: dict[str, torch.Tensor], _prefix: str, _metadata: object) -> None:
        del state["adapter"]

    model.register_state_dict_post_hook(take_out)
    with pytest.raises(MismatchError, match=r"unfilled \(1; [\s\S]*adapter"):
        sf.load_model(model, checkpoint)


def test_a_name_that_only_ends_like_extra_state_is_filled(tmp_path: Path) -> None:
    save_file({"my_extra_state": torch.ones(2)}, tmp_path / "model.safetensors")
    model = nn.Module()
    model.my_extra_state = nn.Parameter(torch.zeros(2))
    sf.load_model(model, tmp_path)
    assert model.my_extra_state.tolist() == [1, 1]


def test_extra_state_of_any_kind_is_left_alone(checkpoint: Path) -> None:
    state = cast("dict[str, torch.Tensor]", {"w": torch.zeros(2, 3), "_extra_state": {"steps": 3}})
    sf.load_state_dict(state, checkpoint)
    assert state["w"][1, 2] == 5
    assert cast("object", state["_extra_state"]) == {"steps": 3}


def test_a_sharding_for_a_name_that_nobody_has_is_refused(checkpoint: Path) -> None:
    given = {"W": sf.Sharding((2, 3), (whole((2, 3)),))}
    with pytest.raises(InvalidInputError, match="shardings= names W, which neither"):
        sf.load_state_dict({"w": torch.zeros(2, 3)}, checkpoint, shardings=given)


@pytest.mark.parametrize("budget", [0, -1, 1 << 20, "256MiB", 1e9])
def test_a_budget_that_is_too_small_or_no_number_is_refused_by_name(tmp_path: Path, budget: object) -> None:
    sf.save_state_dict({"w": torch.ones(2)}, tmp_path / "there")
    with pytest.raises(InvalidInputError, match="budget_bytes is"):
        sf.load_state_dict({"w": torch.zeros(2)}, tmp_path / "there", budget_bytes=cast("int", budget))
    with pytest.raises(InvalidInputError, match="budget_bytes is"):
        sf.save_state_dict({"w": torch.ones(2)}, tmp_path / "out", budget_bytes=cast("int", budget))
    assert not (tmp_path / "out").exists()
