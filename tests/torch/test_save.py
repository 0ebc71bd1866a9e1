"""Saving in one process: exact bytes of every dtype and view, ties, sizes, file assignment, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import tokenizers
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import shardferry
import shardferry.torch as sf
from shardferry.conversions import AddPrefix, Convert, Custom, Transpose
from shardferry.errors import CheckpointExistsError, CheckpointWarning, InvalidInputError
from shardferry.geometry.region import whole
from shardferry.geometry.sharding import Sharding
from shardferry.torch.dtypes import torch_dtype

from .test_load import EVERY, Model, pair, raw

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


@pytest.mark.parametrize("name", EVERY)
def test_every_dtype_is_saved_bit_for_bit(tmp_path: Path, name: str) -> None:
    dtype = torch_dtype(name)
    data = bytes([0, 1] * 12) if name == "BOOL" else bytes(range(1, 24 * dtype.itemsize + 1))
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(4, 6)
    sf.save_state_dict({"t": tensor, "s": torch.tensor(3.5)}, tmp_path / "out")
    index = shardferry.open_checkpoint(tmp_path / "out")
    start, stop = index.tensors["t"].span
    assert (tmp_path / "out/model.safetensors").read_bytes()[start:stop] == data
    assert index.tensors["t"].shape == ((4, 12) if name == "F4" else (4, 6))
    again = torch.zeros_like(tensor.view(torch.uint8)).view(dtype)
    sf.load_state_dict({"t": again}, tmp_path / "out", strict=False)
    assert raw(again) == data


def test_what_bitsandbytes_stores_is_moved_whole(tmp_path: Path) -> None:
    """A weight of 24 rows of 16, flattened: two codes to a byte, and a scale for 64 of them."""
    state = {
        "w.weight": torch.randint(256, (192, 1), dtype=torch.uint8),
        "w.weight.absmax": torch.randint(256, (6,), dtype=torch.uint8),
        "w.weight.quant_map": torch.rand(16),
        "w.weight.nested_absmax": torch.rand(1),
        "w.weight.nested_quant_map": torch.rand(256),
        "w.weight.quant_state.bitsandbytes__nf4": torch.randint(256, (96,), dtype=torch.uint8),
    }
    sf.save_state_dict(state, tmp_path / "out")
    again = {name: torch.zeros_like(value) for name, value in state.items()}
    sf.load_state_dict(again, tmp_path / "out")
    assert all(torch.equal(again[name], value) for name, value in state.items())


def test_views_are_saved_in_logical_order(tmp_path: Path) -> None:
    base = torch.arange(120.0).reshape(2, 3, 4, 5)
    views = {
        "transposed": base.permute(3, 2, 1, 0),
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "narrowed": base[:, 1:, :, 2:4],
        "conjugated": (base * (1 + 2j)).conj(),
        "expanded": torch.ones(1, 3).expand(4, 3),
    }
    sf.save_state_dict(views, tmp_path / "out")
    saved = load_file(tmp_path / "out/model.safetensors")
    for name, view in views.items():
        assert torch.equal(saved[name], view.resolve_conj()), name


def test_a_model_writes_a_tied_weight_once_and_a_state_dict_every_name(tmp_path: Path) -> None:
    model = pair(tied=True)
    sf.save_model(model, tmp_path / "model")
    assert set(load_file(tmp_path / "model/model.safetensors")) == {"a.weight"}
    sf.save_state_dict(model.state_dict(), tmp_path / "state")
    assert set(load_file(tmp_path / "state/model.safetensors")) == {"a.weight", "b.weight"}


def test_a_name_the_model_declares_tied_is_not_written(tmp_path: Path) -> None:
    model = pair()
    model.all_tied_weights_keys = {"a.weight": "b.weight"}  # type: ignore[assignment]
    sf.save_model(model, tmp_path / "out")
    assert set(load_file(tmp_path / "out/model.safetensors")) == {"b.weight"}
    tied = pair(tied=True)
    tied.all_tied_weights_keys = {"a.weight": "b.weight"}  # type: ignore[assignment]
    sf.save_model(tied, tmp_path / "tied")
    assert set(load_file(tmp_path / "tied/model.safetensors")) == {"b.weight"}


def test_equal_addresses_mean_nothing(tmp_path: Path) -> None:
    """Two halves of one storage, and two tensors that were freed and made at one address, are their own tensors."""
    whole = torch.arange(8.0)
    sf.save_state_dict({"first": whole[:4], "second": whole[4:], "all": whole}, tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors")["second"].tolist() == [4, 5, 6, 7]


def test_non_persistent_buffers_are_not_saved(tmp_path: Path) -> None:
    sf.save_model(Model(), tmp_path / "out")
    assert set(load_file(tmp_path / "out/model.safetensors")) == {"linear.weight", "linear.bias", "count"}


def test_metadata_has_the_format_and_what_is_given(tmp_path: Path) -> None:
    sf.save_state_dict({"w": torch.ones(2)}, tmp_path / "out", metadata={"step": "12"})
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "12"}
    with pytest.raises(InvalidInputError, match="step"):
        sf.save_state_dict({"w": torch.ones(2)}, tmp_path / "no", metadata={"step": 12})  # type: ignore[dict-item]
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("size", ["0", 0, -5, "5 apples", "-1GB", ""])
def test_a_size_that_is_none_is_refused_before_anything_is_made(tmp_path: Path, size: int | str) -> None:
    with pytest.raises(InvalidInputError):
        sf.save_state_dict({"w": torch.ones(2)}, tmp_path / "out", max_shard_size=size)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_above_the_limit_has_a_file_of_its_own(tmp_path: Path) -> None:
    state = {"a": torch.zeros(500), "b": torch.zeros(10), "c": torch.zeros(10)}
    report = sf.save_state_dict(state, tmp_path / "out", max_shard_size=100)
    files = [set(load_file(tmp_path / "out" / name)) for name in report.files]
    assert files == [{"a"}, {"b", "c"}]


def test_a_source_checkpoints_own_file_assignment_can_be_kept(tmp_path: Path) -> None:
    state = {f"layer{i}.w": torch.full((4,), float(i)) for i in range(4)}
    sf.save_state_dict(state, tmp_path / "first", max_shard_size=32)
    placed = json.loads((tmp_path / "first/model.safetensors.index.json").read_text())["weight_map"]
    sf.save_state_dict({**state, "layer1.x": torch.ones(2)}, tmp_path / "second", files_like=tmp_path / "first")
    again = json.loads((tmp_path / "second/model.safetensors.index.json").read_text())["weight_map"]
    assert {name: again[name] for name in placed} == placed
    assert again["layer1.x"] == placed["layer1.w"]


def test_floats_are_cast_and_sizes_follow(tmp_path: Path) -> None:
    state = {"w": torch.ones(64), "i": torch.arange(4), "q": torch.zeros(8, dtype=torch.float8_e4m3fn)}
    report = sf.save_state_dict(state, tmp_path / "out", dtype=torch.bfloat16)
    index = shardferry.open_checkpoint(tmp_path / "out")
    assert {name: info.dtype for name, info in index.tensors.items()} == {"w": "BF16", "i": "I64", "q": "F8_E4M3"}
    assert report.total.bytes_written == 128 + 32 + 8


def test_what_wrappers_put_into_names_is_not_saved_or_can_be_left_out(tmp_path: Path) -> None:
    model = nn.Sequential(cast("nn.Module", torch.compile(nn.Linear(2, 2), backend="eager")))
    assert set(model.state_dict()) == {"0._orig_mod.weight", "0._orig_mod.bias"}
    sf.save_model(model, tmp_path / "model")
    assert set(load_file(tmp_path / "model/model.safetensors")) == {"0.weight", "0.bias"}
    wrapped = {f"module.{name}": value for name, value in nn.Linear(2, 2).state_dict().items()}
    sf.save_state_dict(wrapped, tmp_path / "state", conversions=[AddPrefix("module.")])
    assert set(load_file(tmp_path / "state/model.safetensors")) == {"weight", "bias"}


def test_what_a_function_computes_is_saved_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    def half(arrays: list[NDArray[Any]]) -> NDArray[Any]:
        return np.asarray(arrays[0] / 2)

    def double(arrays: list[NDArray[Any]]) -> NDArray[Any]:
        return np.asarray(arrays[0] * 2)

    back = Convert(("x",), ("w",), (Custom(half, (3, 2), "F32"), Transpose()))
    rule = Convert(("w",), ("x",), (Transpose(), Custom(double, (3, 2), "F32")), back=back)
    x = torch.arange(6.0).reshape(2, 3).t()
    sf.save_state_dict({"x": x}, tmp_path / "out", conversions=[rule], dtype=torch.bfloat16)
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["w"], (x.t() / 2).bfloat16())


def test_a_meta_tensor_has_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="w is on the meta device"):
        sf.save_state_dict({"w": torch.zeros(2, device="meta")}, tmp_path / "out")


def test_a_sharding_for_a_name_nobody_has_is_refused(tmp_path: Path) -> None:
    given = Sharding((2,), (whole((2,)),))
    sf.save_state_dict({"w": torch.zeros(2)}, tmp_path / "right", shardings={"w": given})
    with pytest.raises(InvalidInputError, match="shardings= names v, which no rank has"):
        sf.save_state_dict({"w": torch.zeros(2)}, tmp_path / "out", shardings={"v": given})
    assert not (tmp_path / "out").exists()


def test_complex128_is_refused_before_any_file_is_made(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"w: .*complex128"):
        sf.save_state_dict({"w": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_refused_and_other_files_do_not_block(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    sf.save_state_dict({"w": torch.ones(2)}, out)
    with pytest.raises(CheckpointExistsError, match="already holds a checkpoint"):
        sf.save_state_dict({"w": torch.zeros(2)}, out)
    assert load_file(out / "model.safetensors")["w"].tolist() == [1, 1]
    assert (out / "config.json").read_text() == "{}"


def test_saving_over_the_files_the_tensors_are_mapped_from_is_right_on_disk_and_in_memory(tmp_path: Path) -> None:
    save_file({"w": torch.arange(1000.0), "v": torch.ones(5)}, tmp_path / "model.safetensors")
    mapped = load_file(tmp_path / "model.safetensors")
    sf.save_state_dict({"w": mapped["w"], "z": mapped["v"]}, tmp_path, on_existing="replace")
    assert torch.equal(mapped["w"], torch.arange(1000.0))
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == {"w", "z"}
    assert torch.equal(saved["w"], torch.arange(1000.0))


def test_fewer_files_leave_no_stale_shard_and_no_stale_index(tmp_path: Path) -> None:
    out = tmp_path / "out"
    sf.save_state_dict({f"w{i}": torch.zeros(100) for i in range(5)}, out, max_shard_size=400)
    (out / "model.fp16.safetensors").write_bytes(b"a variant")
    (out / "logs").mkdir()
    (out / "logs/log.txt").write_text("kept")
    sf.save_state_dict({"w": torch.ones(2)}, out, on_existing="replace")
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "model.fp16.safetensors", "logs"}
    assert (out / "logs/log.txt").read_text() == "kept"


def test_a_transformers_model_saves_its_configuration_and_opens_again(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=50,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    sf.save_model(model, tmp_path / "out", max_shard_size="20KB")
    assert {"config.json", "generation_config.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(7)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def tiny_llama() -> LlamaForCausalLM:
    config = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    return LlamaForCausalLM(config)


def test_the_configuration_names_the_class_and_the_dtype_that_is_written(tmp_path: Path) -> None:
    model = tiny_llama()
    sf.save_model(model, tmp_path / "out", dtype=torch.bfloat16)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["architectures"], written["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    assert model.config.architectures is None, "the model's own is left alone"
    sf.save_model(model, tmp_path / "same")
    model.save_pretrained(tmp_path / "theirs")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "same" / name).read_text() == (tmp_path / "theirs" / name).read_text()


def test_a_tokenizer_given_is_a_part_of_the_checkpoint(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    out = tmp_path / "out"
    out.mkdir()
    (out / "tokenizer.json").write_text("an old one")
    sf.save_model(tiny_llama(), out, extras=[tokenizer])
    assert AutoTokenizer.from_pretrained(out)("a").input_ids == tokenizer("a").input_ids
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_model_is_nothing_to_put_beside_the_weights(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="weights of its own: "):
        sf.save_state_dict({"w": torch.zeros(2)}, tmp_path / "out", extras=[tiny_llama()])
    assert list(tmp_path.iterdir()) == []


def test_the_budget_bounds_what_is_staged(tmp_path: Path) -> None:
    tensor = torch.arange(4_000_000, dtype=torch.float64).reshape(2000, 2000).t()
    report = sf.save_state_dict({"t": tensor}, tmp_path / "out", budget_bytes=8 << 20, dtype=torch.float32)
    assert 0 < report.total.peak_extra_bytes <= 8 << 20
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["t"], tensor.float())


def test_progress_ends_at_the_bytes_written(tmp_path: Path) -> None:
    seen: list[sf.Progress] = []
    sf.save_state_dict({"t": torch.zeros(100, 100)}, tmp_path / "out", on_progress=seen.append)
    assert seen[-1].bytes_done == seen[-1].bytes_total == 40_000


def test_what_may_become_a_header_too_large_for_the_hub_is_warned_of_or_refused(tmp_path: Path) -> None:
    state = {f"{'x' * 2000}{i}": torch.zeros(1) for i in range(6_000)}
    with pytest.raises(InvalidInputError, match="10485760"):
        sf.save_state_dict(state, tmp_path / "out", max_shard_size="10KB", hub_limits=True)
    with pytest.warns(CheckpointWarning, match="10485760"):
        sf.save_state_dict(state, tmp_path / "out", max_shard_size="10KB")
    assert len(cast("dict[str, object]", shardferry.open_checkpoint(tmp_path / "out").tensors)) == 6_000


class Nothing(nn.Module):
    """A model without tensors."""


def test_a_model_without_tensors_saves_an_empty_checkpoint(tmp_path: Path) -> None:
    sf.save_model(Nothing(), tmp_path / "out")
    assert shardferry.open_checkpoint(tmp_path / "out").tensors == {}
