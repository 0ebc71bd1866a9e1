"""Loading in one process: dtypes, ties, buffers, views, meta tensors, and what is refused."""

from __future__ import annotations

import ctypes
import json
import warnings
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardferry.torch as sf
from shardferry.errors import CheckpointWarning, InvalidInputError, MismatchError, ShardingError
from shardferry.geometry.region import Region
from shardferry.geometry.sharding import Sharding
from shardferry.torch.dtypes import torch_dtype
from shardferry.torch.load import LoadOptions

if TYPE_CHECKING:
    from pathlib import Path


class Model(nn.Module):
    """A linear layer, a persistent and a non-persistent buffer."""

    count: torch.Tensor
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file(
        {
            "linear.weight": torch.arange(12.0).reshape(3, 4),
            "linear.bias": torch.tensor([1.5, -2.5, 3.25]),
            "count": torch.tensor(7),
        },
        tmp_path / "model.safetensors",
    )
    return tmp_path


def on_meta() -> Model:
    with torch.device("meta"):
        model = Model()
    model.cache = torch.ones(2)
    return model


def test_a_meta_model_gets_memory_and_keeps_what_its_parameters_carry(checkpoint: Path) -> None:
    model = on_meta()
    model.linear.weight.requires_grad = False
    vars(model.linear.weight)["weight_loader"] = "mine"
    report = sf.load_model(model, checkpoint)
    assert model.linear.weight.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert isinstance(model.linear.weight, nn.Parameter)
    assert not model.linear.weight.requires_grad
    assert model.linear.bias.requires_grad
    assert vars(model.linear.weight)["weight_loader"] == "mine"
    assert int(model.count) == 7
    assert report.total.num_tensors == 3


class Scaled(nn.Parameter):
    """A parameter class of a user's."""


def test_a_meta_tensor_stays_of_its_class(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    model = nn.Module()
    model.w = Scaled(torch.zeros(2, device="meta"))
    model.b = nn.Buffer(torch.zeros(2, device="meta"))
    sf.load_model(model, tmp_path)
    assert type(model.w) is Scaled
    assert isinstance(model.b, nn.Buffer)
    assert [model.w.tolist(), model.b.tolist()] == [[1, 1], [1, 1]]


def test_tensors_made_in_inference_mode_are_filled_there_and_outside(tmp_path: Path) -> None:
    save_file({"w": torch.arange(4.0)}, tmp_path / "model.safetensors")
    with torch.inference_mode():
        state = {"w": torch.zeros(4, dtype=torch.float64)}
        sf.load_state_dict(state, tmp_path)
    assert state["w"].tolist() == [0, 1, 2, 3]
    with torch.inference_mode():
        state["w"] = torch.zeros(4, dtype=torch.float64)
    sf.load_state_dict(state, tmp_path)
    assert state["w"].tolist() == [0, 1, 2, 3]


def test_a_materialised_model_is_filled_in_place(checkpoint: Path) -> None:
    model = Model()
    before = model.linear.weight
    address = before.data_ptr()
    sf.load_model(model, checkpoint)
    assert model.linear.weight is before
    assert before.data_ptr() == address
    assert before[2, 3] == 11


def test_a_non_persistent_buffer_on_meta_is_an_error_with_the_remedy(checkpoint: Path) -> None:
    with torch.device("meta"):
        model = Model()
    with pytest.raises(MismatchError, match=r"unfilled \(1; .*initialize_buffers[\s\S]*cache"):
        sf.load_model(model, checkpoint)
    assert model.linear.weight.is_meta


def test_a_stored_non_persistent_buffer_is_ignored_and_never_read(tmp_path: Path) -> None:
    tensors = {"linear.weight": torch.ones(3, 4), "linear.bias": torch.ones(3), "count": torch.tensor(1)}
    save_file(tensors | {"cache": torch.full((2,), 9.0)}, tmp_path / "model.safetensors")
    model = on_meta()
    report = sf.load_model(model, tmp_path)
    assert report.ignored == ("cache",)
    assert model.cache.tolist() == [1, 1]


def test_names_the_models_own_patterns_exclude_are_ignored(checkpoint: Path) -> None:
    save_file({"extra.x": torch.ones(1)}, checkpoint / "other.safetensors")
    index = dict.fromkeys(("linear.weight", "linear.bias", "count"), "model.safetensors")
    (checkpoint / "model.safetensors").rename(checkpoint / "model-1.safetensors")
    index = dict.fromkeys(index, "model-1.safetensors") | {"extra.x": "other.safetensors"}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    model = on_meta()
    with pytest.raises(MismatchError, match=r"unexpected \(1"):
        sf.load_model(model, checkpoint)
    model._keys_to_ignore_on_load_unexpected = [r"^extra\."]  # type: ignore[assignment]  # noqa: SLF001
    assert sf.load_model(model, checkpoint).ignored == ("extra.x",)


def test_missing_tensors_stay_and_are_listed_when_not_strict(tmp_path: Path) -> None:
    save_file({"linear.weight": torch.ones(3, 4), "other": torch.ones(1)}, tmp_path / "model.safetensors")
    model = Model()
    report = sf.load_model(model, tmp_path, strict=False)
    assert report.missing == ("count", "linear.bias")
    assert report.unexpected == ("other",)
    assert model.linear.weight.sum() == 12


def pair(*, tied: bool = False) -> nn.ModuleDict:
    a, b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    if tied:
        b.weight = a.weight
    return nn.ModuleDict({"a": a, "b": b})


def test_tied_parameters_are_read_once_and_stay_one(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(3, 3)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = pair(tied=True)
    report = sf.load_model(model, tmp_path)
    assert model["a"].weight is model["b"].weight
    assert report.total.bytes_read == 36


def test_a_tie_the_model_declares_holds_though_wrapping_has_untied_it(tmp_path: Path) -> None:
    save_file({"a.weight": torch.full((3, 3), 5.0)}, tmp_path / "model.safetensors")
    model = pair()
    model.all_tied_weights_keys = {"b.weight": "a.weight"}  # type: ignore[assignment]
    sf.load_model(model, tmp_path)
    assert model.state_dict()["b.weight"].tolist() == [[5.0] * 3] * 3


def test_a_tied_state_dict_needs_the_model_to_tell(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(3, 3)}, tmp_path / "model.safetensors")
    model = pair(tied=True)
    with pytest.raises(MismatchError, match=r"missing \(1[\s\S]*b\.weight"):
        sf.load_state_dict(model.state_dict(), tmp_path)
    sf.load_state_dict(model.state_dict(), tmp_path, model=model)
    assert float(model.state_dict()["b.weight"].sum()) == 9


def test_a_compiled_models_names_are_those_of_its_module(checkpoint: Path) -> None:
    model = Model()
    sf.load_model(cast("nn.Module", torch.compile(model, backend="eager")), checkpoint)
    assert model.linear.weight[2, 3] == 11


def test_meta_entries_of_a_state_dict_are_replaced(checkpoint: Path) -> None:
    state: dict[str, torch.Tensor] = dict(on_meta().state_dict())
    sf.load_state_dict(state, checkpoint)
    assert state["linear.weight"][2, 3] == 11


EVERY = ["BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "F16", "BF16", "F32", "F64", "C64"]
REFUSED = [("I32", "I64"), ("F8_E4M3", "BF16"), ("BF16", "F8_E4M3"), ("BOOL", "U8"), ("U8", "F4")]
EVERY += ["F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "F4"]


def raw(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def write_raw(path: Path, dtype: str, shape: list[int], data: bytes) -> None:
    header = json.dumps({"t": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("name", EVERY)
def test_every_dtype_arrives_bit_for_bit(tmp_path: Path, name: str, *, contiguous: bool) -> None:
    dtype = torch_dtype(name)
    data = bytes(range(1, 4 * 6 * dtype.itemsize + 1)) if name != "BOOL" else bytes([0, 1] * 12)
    shape = [4, 12] if name == "F4" else [4, 6]
    write_raw(tmp_path / "model.safetensors", name, shape, data)
    target = torch.zeros(4 * 6 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(4, 6)
    if not contiguous:
        wide = torch.zeros(8 * 6 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(8, 6)
        target = wide[::2]
    sf.load_state_dict({"t": target}, tmp_path)
    rows = b"".join(raw(row) for row in target)
    assert rows == data


@pytest.mark.parametrize(("start", "legal"), [(2, True), (8, True), (3, False)])
def test_a_part_of_packed_elements_begins_on_a_byte(tmp_path: Path, start: int, *, legal: bool) -> None:
    write_raw(tmp_path / "model.safetensors", "F4", [4, 12], bytes(range(24)))
    part = torch.zeros(4, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    given = {"t": Sharding((4, 12), (Region((((0, 4),), ((start, start + 4),))),))}
    if not legal:
        with pytest.raises(ShardingError, match=r"^t: .* does not start and end on a byte boundary"):
            sf.load_state_dict({"t": part}, tmp_path, shardings=given)
        return
    sf.load_state_dict({"t": part}, tmp_path, shardings=given)
    assert raw(part) == bytes(row * 6 + start // 2 + at for row in range(4) for at in range(2))


@pytest.mark.parametrize("name", ["F6_E2M3", "F6_E3M2"])
def test_what_torch_has_no_dtype_for_is_refused_by_name(tmp_path: Path, name: str) -> None:
    write_raw(tmp_path / "model.safetensors", name, [4, 8], bytes(24))
    with pytest.raises(MismatchError, match=f"t: model U8, checkpoint {name}"):
        sf.load_state_dict({"t": torch.zeros(4, 8, dtype=torch.uint8)}, tmp_path)


@pytest.mark.parametrize(("stored", "wanted"), [(a, b) for a in EVERY[9:13] for b in EVERY[9:13] if a != b])
def test_floats_are_cast_as_torch_casts_them_and_counted(tmp_path: Path, stored: str, wanted: str) -> None:
    source = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(torch_dtype(stored))
    save_file({"t": source, "s": torch.ones(2)}, tmp_path / "model.safetensors")
    state = {"t": torch.zeros(5, 7, dtype=torch_dtype(wanted)), "s": torch.zeros(2)}
    report = sf.load_state_dict(state, tmp_path)
    assert torch.equal(state["t"], source.to(torch_dtype(wanted)))
    assert (report.total.num_cast, report.total.num_overflowed) == (1, 0)
    with pytest.raises(MismatchError, match=f"t: model {wanted}, checkpoint {stored}"):
        sf.load_state_dict(state, tmp_path, cast=False)


@pytest.mark.parametrize(("stored", "wanted"), REFUSED)
def test_nothing_else_is_ever_cast(tmp_path: Path, stored: str, wanted: str) -> None:
    shape = [2, 8] if stored != "F4" else [2, 16]
    write_raw(tmp_path / "model.safetensors", stored, shape, bytes(16 * torch_dtype(stored).itemsize))
    target = torch.zeros(16 * torch_dtype(wanted).itemsize, dtype=torch.uint8).view(torch_dtype(wanted))
    target = target.view(2, 8) if wanted != "F4" else target[:8].view(2, 4)
    with pytest.raises(MismatchError, match=f"t: model {wanted}, checkpoint {stored}"):
        sf.load_state_dict({"t": target}, tmp_path)


def test_the_smallest_value_of_bf16_that_overflows_f16_is_counted(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([65536.0, -65280.0], dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    with pytest.warns(CheckpointWarning, match="1 finite values became infinite"):
        report = sf.load_state_dict({"w": torch.zeros(2, dtype=torch.float16)}, tmp_path)
    assert report.total.num_overflowed == 1


def test_finite_values_that_overflow_are_counted_and_warned_of(tmp_path: Path) -> None:
    save_file({"t": torch.tensor([1.0, 1e30, -1e30, float("inf")])}, tmp_path / "model.safetensors")
    state = {"t": torch.zeros(4, dtype=torch.float16)}
    with pytest.warns(CheckpointWarning, match="2 finite values became infinite"):
        report = sf.load_state_dict(state, tmp_path)
    assert report.total.num_overflowed == 2


def test_a_dtype_the_format_cannot_hold_is_refused_by_name(checkpoint: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"t: safetensors files cannot hold torch\.complex128"):
        sf.load_state_dict({"t": torch.zeros(2, dtype=torch.complex128)}, checkpoint)


@pytest.mark.parametrize("view", ["transposed", "channels_last", "narrowed", "conjugated"])
def test_a_view_is_filled_in_its_own_order(tmp_path: Path, view: str) -> None:
    stored = torch.arange(120.0).reshape(2, 3, 4, 5)
    views: dict[str, Any] = {
        "transposed": torch.zeros(5, 4, 3, 2).permute(3, 2, 1, 0),
        "channels_last": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "narrowed": torch.zeros(4, 3, 4, 9)[1:3, :, :, 2:7],
        "conjugated": torch.zeros(2, 3, 4, 5, dtype=torch.complex64).conj(),
    }
    target = views[view]
    stored = stored.to(target.dtype) * (1 + 2j) if target.is_complex() else stored
    save_file({"t": stored}, tmp_path / "model.safetensors")
    sf.load_state_dict({"t": target}, tmp_path)
    assert torch.equal(target.resolve_conj(), stored)


def test_rank_files_of_torchs_own_writer_are_put_together(tmp_path: Path) -> None:
    half = [torch.arange(6.0).reshape(2, 3), torch.arange(6.0, 12.0).reshape(2, 3)]
    for rank, offset in ((1, [0, 0]), (2, [2, 0])):
        info = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": offset}}), "DCP_VERSION": "1.0", "format": "pt"}
        save_file({"w": half[rank - 1]}, tmp_path / f"shard-0000{rank}-model-00001-of-00001.safetensors", info)
    state = {"w": torch.zeros(4, 3)}
    sf.load_state_dict(state, tmp_path)
    assert state["w"].flatten().tolist() == list(range(12))


def test_a_large_tensor_comes_in_many_pieces(tmp_path: Path) -> None:
    """Larger than a piece and a read call, cast through staging within a small budget."""
    stored = torch.arange(5_000_003, dtype=torch.float64)
    save_file({"t": stored}, tmp_path / "model.safetensors")
    state = {"t": torch.zeros(5_000_003)}
    seen: list[sf.Progress] = []
    report = sf.load_state_dict(state, tmp_path, budget_bytes=8 << 20, on_progress=seen.append)
    assert torch.equal(state["t"], stored.float())
    assert 0 < report.total.peak_extra_bytes <= 8 << 20
    assert seen[-1].bytes_done == seen[-1].bytes_total == 40_000_024


def test_an_unknown_option_is_refused(checkpoint: Path) -> None:
    with pytest.raises(TypeError, match="unknown option stric; a load takes"):
        sf.load_model(Model(), checkpoint, stric=True)  # type: ignore[call-arg]
    assert "timeout_s" in LoadOptions.__optional_keys__


def test_a_tensor_only_the_state_dict_makes_is_refused(checkpoint: Path) -> None:
    model = Model()
    model.register_state_dict_post_hook(  # type: ignore[no-untyped-call]  # torch has no types for it
        lambda _module, state, _prefix, _meta: state.update(packed=torch.zeros(2))
    )
    with pytest.raises(InvalidInputError, match="packed is neither a parameter nor a buffer"):
        sf.load_model(model, checkpoint)


def test_a_load_says_nothing_of_a_sound_checkpoint(checkpoint: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sf.load_model(Model(), checkpoint)
