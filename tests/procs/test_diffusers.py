"""Models of diffusers under tensor parallelism: their true parts, and files that do not tell how they were cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from diffusers import Flux2Transformer2DModel, FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardferry.torch.diffusers as sfd
from shardferry.errors import InvalidInputError, MismatchError, ShardingError
from shardferry.torch.shardings import local_part

if TYPE_CHECKING:
    from pathlib import Path

    from .pool import RankPool

MODELS: dict[str, Any] = {"flux": FluxTransformer2DModel, "flux2": Flux2Transformer2DModel}
STEM = "diffusion_pytorch_model"


def new_model(kind: str) -> Any:  # noqa: ANN401 - diffusers types little
    torch.manual_seed(0)
    common: dict[str, Any] = {
        "in_channels": 8,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "joint_attention_dim": 8,
    }
    if kind == "flux":
        return MODELS[kind](**common, pooled_projection_dim=8, axes_dims_rope=(4, 2, 2), guidance_embeds=False)
    return MODELS[kind](**common, timestep_guidance_channels=8, axes_dims_rope=(2, 2, 2, 2))


def inputs(kind: str) -> dict[str, torch.Tensor]:
    num_axes = 3 if kind == "flux" else 4
    made = {
        "hidden_states": torch.linspace(-1, 1, 32).reshape(1, 4, 8),
        "encoder_hidden_states": torch.linspace(-1, 1, 16).reshape(1, 2, 8),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.ones(4, num_axes) if kind == "flux" else torch.ones(1, 4, num_axes),
        "txt_ids": torch.zeros(2, num_axes) if kind == "flux" else torch.zeros(1, 2, num_axes),
    }
    if kind == "flux":
        made["pooled_projections"] = torch.linspace(-1, 1, 8).reshape(1, 8)
    else:
        made["guidance"] = torch.ones(1)
    return made


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("diffusers")
    for kind in MODELS:
        new_model(kind).save_pretrained(root / kind, max_shard_size="20KB" if kind == "flux" else "10GB")
    return str(root)


def load_compute_save(kind: str, folder: str, out: str) -> list[str]:
    from diffusers.hooks import tensor_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    alone = MODELS[kind].from_pretrained(folder, low_cpu_mem_usage=False).eval()
    model = sfd.from_pretrained(MODELS[kind], folder, mesh=mesh)
    library: Any = tensor_parallel
    specs = library.resolve_tp_shard_specs(alone, alone._tp_plan, mesh.size())  # noqa: SLF001 - where diffusers keeps it
    wrong = []
    for name, parameter in model.named_parameters():
        expected = alone.get_parameter(name).detach()
        held = parameter.detach()
        if isinstance(parameter, DTensor) != (name in specs):
            wrong.append(f"{name} is {type(parameter).__name__}")
        if isinstance(held, DTensor):
            spec = specs[name]
            if held.placements != ((Replicate() if spec.dim is None else Shard(spec.dim)),):
                wrong.append(f"{name} has {held.placements}")
            if spec.dim is not None:
                expected = library._local_shard(expected, spec.dim, spec.block_sizes, mesh)  # noqa: SLF001 - its own oracle
            held = held.to_local()
        if not torch.equal(held, expected):
            wrong.append(name)
    with torch.no_grad():
        ours, theirs = (one(**inputs(kind), return_dict=False)[0] for one in (model, alone))
    if not torch.allclose(ours, theirs, atol=1e-5):
        wrong.append("what it computes")
    sfd.save_pretrained(model, out)
    return wrong


@pytest.mark.parametrize("kind", MODELS)
def test_a_cut_model_is_the_whole_model(ranks: RankPool, checkpoints: str, tmp_path: Path, kind: str) -> None:
    out = str(tmp_path / "out")
    assert ranks(2).run(load_compute_save, kind, f"{checkpoints}/{kind}", out) == [[]] * 2
    saved = load_file(f"{out}/{STEM}.safetensors")
    original = new_model(kind).state_dict()
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in original)
    again = MODELS[kind].from_pretrained(out)
    assert all(torch.equal(again.state_dict()[name], original[name]) for name in original)


def save_in_files(folder: str, out: str) -> None:
    model = sfd.from_pretrained(MODELS["flux2"], folder, tp_degree=dist.get_world_size())
    sfd.save_pretrained(model, out, max_shard_size=20_000)


def test_files_have_the_names_and_content_that_diffusers_reads(
    ranks: RankPool, checkpoints: str, tmp_path: Path
) -> None:
    for world_size in (2, 4):
        ranks(world_size).run(save_in_files, f"{checkpoints}/flux2", str(tmp_path / str(world_size)))
    two, four = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("2", "4"))
    assert two.keys() == four.keys()
    assert f"{STEM}.safetensors.index.json" in two
    assert f"{STEM}-00001-of-" in " ".join(two)
    assert all(two[name] == four[name] for name in two if name.startswith(STEM))
    again, original = MODELS["flux2"].from_pretrained(tmp_path / "2"), new_model("flux2")
    assert all(torch.equal(again.state_dict()[name], value) for name, value in original.state_dict().items())


def save_what_ranks_hold(folder: str, out: str) -> None:
    """Write a distributed checkpoint of a cut model, as torch does: DTensors are taken at their word."""
    model = sfd.from_pretrained(MODELS["flux2"], folder, tp_degree=dist.get_world_size())
    save(model.state_dict(), checkpoint_id=out)
    model.save_config(out)


def load_interleaved(folder: str, right: str, written: int) -> list[str]:
    degree = dist.get_world_size()
    ours = sfd.from_pretrained(MODELS["flux2"], folder, tp_degree=degree, written_tp_degree=written).state_dict()
    theirs = sfd.from_pretrained(MODELS["flux2"], right, tp_degree=degree).state_dict()
    return [name for name, value in theirs.items() if not torch.equal(local_part(ours[name]), local_part(value))]


def test_a_distributed_checkpoint_of_what_ranks_held_is_loaded_at_any_degree(
    ranks: RankPool, checkpoints: str, tmp_path: Path
) -> None:
    right, written = f"{checkpoints}/flux2", str(tmp_path / "written")
    ranks(2).run(save_what_ranks_hold, right, written)
    assert ranks(4).run(load_interleaved, written, right, 2) == [[]] * 4
    whole = sfd.from_pretrained(MODELS["flux2"], written, tp_degree=1, written_tp_degree=2).state_dict()
    original = new_model("flux2").state_dict()
    assert [name for name, value in original.items() if not torch.equal(whole[name], value)] == []


def refusals(folder: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    said = []
    cases: tuple[dict[str, Any], ...] = (
        {"device_map": "cpu"},
        {"use_safetensors": False},
        {"tp_degree": 3},
        {"tp_degree": 0},
    )
    for options in cases:
        try:
            sfd.from_pretrained(MODELS["flux2"], folder, **options)
        except (InvalidInputError, ShardingError) as error:
            said.append(str(error))
    model = sfd.from_pretrained(MODELS["flux2"], folder, mesh=mesh)
    with pytest.raises(ValueError, match="sharded with tensor parallelism"):
        model.enable_group_offload(torch.device("cpu"))
    model.hf_device_map = {"": "cpu"}
    try:
        sfd.save_pretrained(model, f"{folder}/out")
    except InvalidInputError as error:
        said.append(str(error))
    return said


def test_what_does_not_go_with_a_cut_is_refused_with_the_reason(ranks: RankPool, checkpoints: str) -> None:
    for device_map, pickles, three, none, placed in ranks(2).run(refusals, f"{checkpoints}/flux2"):
        assert "device_map= does not go" in device_map
        assert "only safetensors files can be read by parts" in pickles
        assert "tp_degree is 3, but the job has 2 ranks" in three
        assert "it must be at least 1" in none
        assert "placed by accelerate" in placed


def test_one_process_gets_a_whole_model_or_an_error(checkpoints: str, tmp_path: Path) -> None:
    model = sfd.from_pretrained(MODELS["flux"], f"{checkpoints}/flux", tp_degree=1, dtype=torch.bfloat16)
    expected = new_model("flux").to(torch.bfloat16).state_dict()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())
    whole = new_model("flux")
    state = whole.state_dict()
    del state["proj_out.bias"]
    save_file(state, tmp_path / f"{STEM}.safetensors", {"format": "pt"})
    whole.save_config(tmp_path)
    with pytest.raises(MismatchError, match=r"proj_out\.bias"):
        sfd.from_pretrained(MODELS["flux"], tmp_path, strict=False)
