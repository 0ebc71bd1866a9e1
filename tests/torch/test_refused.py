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
    from collections.abc import Callable, Mapping
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


WRONG_ALWAYS: list[tuple[str, object, str]] = [
    ("path", None, "path is None; it must be a path or a URL"),
    ("path", b"/ckpt", "path is b'/ckpt'; it must be a path or a URL"),
    ("timeout_s", "x", "timeout_s is 'x'; it must be a positive number of seconds"),
    ("timeout_s", 0, "timeout_s is 0; it must be"),
    ("shardings", None, r"shardings is None; it must be a mapping of names to \(mesh, placements\) or a Sharding"),
    ("conversions", 5, "conversions is 5; it must be a sequence of rules of shardferry.conversions, or 'auto'"),
    ("conversions", [5], r"conversions is \[5\]; it must be a sequence of rules"),
    ("on_progress", "bar", "on_progress is 'bar'; it must be a function, or None"),
]
WRONG_TO_LOAD: list[tuple[str, object, str]] = [
    ("strict", "yes", "strict is 'yes'; it must be False or True"),
    ("cast", "integers", "cast is 'integers'; it must be False or True"),
    ("checkpoint_strict", None, "checkpoint_strict is None; it must be False or True"),
    ("ignore_mismatched_sizes", 1.0, "ignore_mismatched_sizes is 1.0; it must be False or True"),
    ("variant", 16, "variant is 16; it must be text, or None"),
    ("node_of_rank", 2, "node_of_rank is 2; it must be a sequence with the number of every rank's node, or None"),
    ("node_of_rank", "01", "node_of_rank is '01'; it must be a sequence"),
    ("read_once", 1, "read_once is 1; it must be 'auto', 'always' or 'never'"),
    ("exchange_bytes", "1GB", r"exchange_bytes is '1GB'; it must be a number of bytes, at least 1048576 \(1.00 MiB\)"),
]
WRONG_TO_SAVE: list[tuple[str, object, str]] = [
    ("dtype", "bf16", "dtype is 'bf16'; it must be a torch.dtype, or None"),
    ("replicas", None, "replicas is None; it must be 'trust' or 'check'"),
    ("metadata", 5, "metadata is 5; it must be a mapping of text to text"),
    ("files_like", 5, "files_like is 5; it must be a path or a URL, or None"),
    ("extras", object, "extras is .*; it must be a sequence of what has save_pretrained"),
    ("stem", None, "stem is None; it must be text"),
    ("hub_limits", "no", "hub_limits is 'no'; it must be False or True"),
    ("on_existing", "keep", "on_existing is 'keep'; it must be 'refuse' or 'replace'"),
    ("max_shard_size", None, "max_shard_size is None; it must be a size in bytes"),
    ("max_shard_size", "5XB", "max_shard_size is '5XB'; it must be a positive number of bytes, or text like '5GB'"),
]
WRONG_TO_WARM: list[tuple[str, object, str]] = [
    ("cost", "local", "cost is 'local'; it must be a CostModel, or None"),
    ("when_short", "wait", "when_short is 'wait'; it must be 'shrink' or 'refuse'"),
]
WRONG_BUDGETS: list[tuple[str, object, str]] = [
    ("budget_bytes", budget, "budget_bytes is .*; it must be a number of bytes, at least 8388608")
    for budget in (0, 1 << 20, "256MiB", 1e9, True)
]


def refuse(call: Callable[..., object], name: str, value: object, words: str, given: Mapping[str, object]) -> None:
    with pytest.raises(InvalidInputError, match=words):
        call(**{**given, name: value})


@pytest.mark.parametrize(("name", "value", "words"), [*WRONG_ALWAYS, *WRONG_TO_LOAD, *WRONG_BUDGETS])
def test_a_load_names_what_it_cannot_be_given(checkpoint: Path, name: str, value: object, words: str) -> None:
    model: dict[str, object] = {"model": nn.Linear(2, 2), "path": checkpoint}
    refuse(sf.load_model, name, value, words, model)
    refuse(sf.plan_load, name, value, words, model)
    refuse(sf.load_state_dict, name, value, words, {"state_dict": {"w": torch.zeros(2, 3)}, "path": checkpoint})


@pytest.mark.parametrize(("name", "value", "words"), [*WRONG_ALWAYS, *WRONG_TO_SAVE, *WRONG_BUDGETS])
def test_a_save_names_what_it_cannot_be_given(tmp_path: Path, name: str, value: object, words: str) -> None:
    path = tmp_path / "out"
    refuse(sf.save_model, name, value, words, {"model": nn.Linear(2, 2), "path": path})
    refuse(sf.save_state_dict, name, value, words, {"state_dict": {"w": torch.ones(2)}, "path": path})
    assert not path.exists()


@pytest.mark.parametrize(("name", "value", "words"), [*WRONG_ALWAYS, *WRONG_TO_WARM])
def test_a_warm_up_names_what_it_cannot_be_given(checkpoint: Path, name: str, value: object, words: str) -> None:
    refuse(sf.warm, name, value, words, {"model": {"w": torch.zeros(2, 3)}, "path": checkpoint})


def test_what_is_to_be_filled_or_saved_must_be_a_model_or_a_state_dict(checkpoint: Path) -> None:
    model = {"path": checkpoint}
    for call in (sf.load_model, sf.plan_load, sf.save_model):
        refuse(call, "model", str(checkpoint), "model is '.*'; it must be a torch.nn.Module$", model)
    refuse(sf.warm, "model", None, "it must be a torch.nn.Module or a mapping of names to tensors", model)
    for other in (sf.load_state_dict, sf.save_state_dict):
        refuse(other, "state_dict", nn.Linear(2, 2), "state_dict is Linear", model)
        refuse(
            other, "model", "it", "model is 'it'; it must be a torch.nn.Module, or None", {"state_dict": {}, **model}
        )


def test_a_layout_that_is_none_is_refused_by_the_tensors_name(checkpoint: Path) -> None:
    layouts: tuple[object, ...] = ([], "rows", (5, []), 5)
    for layout in layouts:
        with pytest.raises(InvalidInputError, match=r"shardings= gives .* for w; it must be \(mesh, placements\)"):
            sf.load_state_dict({"w": torch.zeros(2, 3)}, checkpoint, shardings={"w": cast("sf.Sharding", layout)})
