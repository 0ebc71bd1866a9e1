"""`plan_load` says what `load_model` would do, and reads nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardferry.torch as sf
from shardferry.errors import MismatchError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file(nn.Linear(8, 4).state_dict(), tmp_path / "model.safetensors")
    return tmp_path


def test_the_estimate_of_a_model_on_the_meta_device(checkpoint: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 4)
    estimate = sf.plan_load(model, checkpoint)
    assert estimate.egress_bytes == estimate.bytes_wanted == (8 * 4 + 4) * 4
    assert estimate.chosen == "independent"
    assert all(parameter.is_meta for parameter in model.parameters())
    assert json.loads(estimate.to_json())["chosen"] == "independent"
    assert "Leave read_once at auto" in str(estimate)


def test_what_would_not_load_is_refused(checkpoint: Path) -> None:
    with pytest.raises(MismatchError, match="weight: model"):
        sf.plan_load(nn.Linear(8, 5), checkpoint)
