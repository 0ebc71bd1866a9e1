"""Models of diffusers under tensor parallelism: filled with what each rank holds, and saved without gathering.

import shardferry.torch.diffusers as sfd

model = sfd.from_pretrained(FluxTransformer2DModel, "/ckpt/transformer", tp_degree=4)
sfd.save_pretrained(model, "/out/transformer")

The model's own plan says how it is cut. A weight that packs several projections is cut block by block: a rank's part
of it is not one run of rows, though its DTensor says so. The plan is believed, for loads and for saves.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.overrides import TorchFunctionMode

from shardferry.convert.ops import concatenate, narrow
from shardferry.convert.table import Converted
from shardferry.errors import CheckpointWarning, InvalidInputError, MismatchError, ShardingError
from shardferry.geometry.layouts import block_regions
from shardferry.torch.entries import model_entries
from shardferry.torch.load import load_model
from shardferry.torch.plans import over_mesh
from shardferry.torch.save import save_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from shardferry.convert.tensor import Tensor
    from shardferry.execute.report import LoadReport, SaveReport
    from shardferry.torch.load import LoadOptions
    from shardferry.torch.save import SaveOptions
    from shardferry.torch.shardings import GivenSharding

    Model = TypeVar("Model")

# A model of diffusers, or its class, whose own types say little.
_Mixin: TypeAlias = Any
STEM = "diffusion_pytorch_model"
# Options of diffusers' own from_pretrained that would be in the way, and why.
_REFUSED = {
    "device_map": "every rank's part is already on that rank's device",
    "quantization_config": "a quantizer packs weights into a layout of its own, which no plan cuts",
    "low_cpu_mem_usage": "the model never has memory for more than this rank's part",
    "use_flashpack": "its files cannot be read by parts; give a safetensors checkpoint",
    "use_safetensors": "only safetensors files can be read by parts",
}


class _Cut(NamedTuple):
    """How a parameter is cut: diffusers' `TPShardSpec`.

    Attributes:
        dim: The dim; None if every rank holds the whole.
        block_sizes: Sizes of the blocks of that dim, each cut by itself.
    """

    dim: int | None
    block_sizes: tuple[int, ...]


def from_pretrained(
    model_class: type[Model],
    path: str | os.PathLike[str],
    *,
    tp_degree: int | None = None,
    mesh: DeviceMesh | None = None,
    dtype: torch.dtype = torch.float32,
    strict: bool = True,
    written_tp_degree: int = 1,
    **options: Unpack[LoadOptions],
) -> Model:
    """Return a model of diffusers, sharded by its own tensor-parallel plan and filled from a checkpoint.

    Collective. Exactly the parameters the plan names become DTensors. Forward hooks are those of diffusers, and work
    on any device, CPU too. The model is in evaluation mode.

    Args:
        model_class: E.g. `FluxTransformer2DModel`.
        path: Directory of the checkpoint with its `config.json`.
        tp_degree: Ranks that share the model: all of the job; 1 or None without `mesh` for a whole model on each rank.
        mesh: A mesh of one axis instead, e.g. `mesh["tp"]`; its size is the degree.
        dtype: Of floating tensors, but for those the model keeps in float32.
        strict: Whether an unexpected name is an error and not a warning. A missing one always is: diffusers has no
            way to initialise a part of a parameter.
        written_tp_degree: The degree with which a distributed checkpoint was written that kept what ranks held: its
            packed weights are interleaved by it. 1 for every other checkpoint.
        **options: See `shardferry.torch.LoadOptions`.

    Raises:
        InvalidInputError: If the model has no plan, an option of diffusers does not go with it, or a style is unknown.
        ShardingError: If the degree does not divide heads or blocks, or is above the world size.
        MismatchError: If the checkpoint lacks a parameter.
        ShardferryError: As `shardferry.torch.load_model`.
    """
    for name in options:
        if name in _REFUSED:
            raise InvalidInputError(f"{name}= does not go with a load by parts: {_REFUSED[name]}. Drop it")
    mixin: _Mixin = model_class
    config = _read_config(mixin, os.fspath(path))
    mesh = _mesh(tp_degree, mesh)
    with _EmptyOnMeta():
        model: _Mixin = mixin.from_config(config)
    _cast(model, dtype)
    cuts = _cuts(model, written_tp_degree)
    if written_tp_degree > 1:
        options["conversions"] = _Interleaved(cuts, written_tp_degree)
    if mesh is not None:
        cuts = _cuts(model, mesh.size())
        _put_parts(model, cuts, mesh)
        options["shardings"] = {**_shardings(model, cuts, mesh), **options.get("shardings", {})}
    report = load_model(model, path, strict=strict, **options)
    _check(model, report)
    if mesh is not None:
        _install_hooks(model, mesh)
    model.register_to_config(_name_or_path=os.fspath(path))
    filled: Model = model.eval()
    return filled


def save_pretrained(
    model: _Mixin,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "10GB",
    on_existing: Literal["refuse", "replace"] = "refuse",
    **options: Unpack[SaveOptions],
) -> SaveReport:
    """Save a model of diffusers as a checkpoint that diffusers reads, also one sharded by its tensor-parallel plan.

    Collective. Nothing is gathered, and the files appear all at once; see `shardferry.torch.save_model`. They are the
    ones of a whole model: `diffusion_pytorch_model.safetensors`, or numbered files with an index.

    Raises:
        InvalidInputError: If the model is quantized, offloaded or placed by accelerate, or has adapter layers.
        ShardferryError: As `shardferry.torch.save_model`.
    """
    _check_state(model)
    mesh = _mesh_of(model)
    if mesh is not None:
        known = _shardings(model, _cuts(model, mesh.size()), mesh)
        options["shardings"] = {**known, **options.get("shardings", {})}
    options["extras"] = (_Config(model), *options.get("extras", ()))
    options.setdefault("stem", STEM)
    return save_model(model, path, max_shard_size=max_shard_size, on_existing=on_existing, **options)


def _read_config(model_class: _Mixin, path: str) -> dict[str, Any]:
    config: dict[str, Any] = model_class.load_config(path)
    if config.get("quantization_config") is not None:
        raise InvalidInputError(f"'{path}' is quantized: {_REFUSED['quantization_config']}")
    return config


def _mesh(tp_degree: int | None, mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the mesh to cut over; None if there is nothing to cut."""
    if mesh is not None:
        if mesh.ndim != 1:
            raise InvalidInputError(f"the mesh has {mesh.ndim} axes: give the one for tensor parallelism, mesh['tp']")
        return mesh
    degree = 1 if tp_degree is None else tp_degree
    if degree < 1:
        raise InvalidInputError(f"tp_degree is {degree}; it must be at least 1")
    if degree == 1:
        return None
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if degree != world_size:
        raise ShardingError(
            f"tp_degree is {degree}, but the job has {world_size} ranks: give mesh= to use some of them"
        )
    kind = torch.accelerator.current_accelerator() or torch.device("cpu")
    return init_device_mesh(kind.type, (degree,), mesh_dim_names=("tp",))


class _EmptyOnMeta(TorchFunctionMode):
    """Makes `torch.empty` give no memory: layers make weights by it, and what is computed stays real.

    Under `torch.device("meta")` tensors that a model computes for itself, such as frequencies, would have no values,
    and no checkpoint holds them.
    """

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 - torch's signature
        types: Any,  # noqa: ANN401
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call a function of torch."""
        given = dict(kwargs or {})
        if func is torch.empty:
            given["device"] = "meta"
        return func(*args, **given)


def _cast(model: _Mixin, dtype: torch.dtype) -> None:
    kept: Sequence[str] = model._keep_in_fp32_modules or ()  # noqa: SLF001 - where diffusers says it
    for entry in model_entries(model):
        tensor = entry.tensor
        if not tensor.is_floating_point():
            continue
        is_kept = any(part in name.split(".") for name in entry.names for part in kept)
        made = tensor.detach().to(torch.float32 if is_kept else dtype)
        for slot in entry.slots:
            slot.put(nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made)


def _cuts(model: _Mixin, degree: int) -> dict[str, _Cut]:
    """Return how the model's plan cuts every parameter it names."""
    from diffusers.hooks.tensor_parallel import resolve_tp_shard_specs  # noqa: PLC0415 - takes seconds

    if degree == 1:
        return {}
    plan, name = model._tp_plan, type(model).__name__  # noqa: SLF001 - where diffusers keeps it
    if plan is None:
        raise InvalidInputError(
            f"{name} has no plan for tensor parallelism (_tp_plan): load it whole, without a degree"
        )
    heads = getattr(model.config, "num_attention_heads", None)
    if heads is not None and heads % degree:
        raise ShardingError(f"{name} has {heads} attention heads, which do not divide over {degree} ranks")
    try:
        specs = resolve_tp_shard_specs(model, plan, degree)
    except ValueError as error:
        kind = ShardingError if "divisible" in str(error) else InvalidInputError
        raise kind(f"{name}: {error}") from error
    return {key: _Cut(spec.dim, tuple(spec.block_sizes or ())) for key, spec in specs.items()}


def _put_parts(model: _Mixin, cuts: Mapping[str, _Cut], mesh: DeviceMesh) -> None:
    """Replace every parameter that is cut by a DTensor with this rank's part, still without memory."""
    for name, cut in cuts.items():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        parameter = module.get_parameter(attribute)
        shape = list(parameter.shape)
        if cut.dim is not None:
            shape[cut.dim] //= mesh.size()
        local = torch.empty(shape, dtype=parameter.dtype, device="meta")
        made = DTensor.from_local(local, mesh, [_placement(cut)], run_check=False)
        setattr(module, attribute, nn.Parameter(made, requires_grad=parameter.requires_grad))


def _placement(cut: _Cut) -> Shard | Replicate:
    return Replicate() if cut.dim is None else Shard(cut.dim)


def _shardings(model: _Mixin, cuts: Mapping[str, _Cut], mesh: DeviceMesh) -> dict[str, GivenSharding]:
    """Return what ranks truly hold of the weights that are packed; the other DTensors say it themselves."""
    shardings: dict[str, GivenSharding] = {}
    for name, cut in cuts.items():
        if cut.dim is not None and len(cut.block_sizes) > 1:
            shape = tuple(model.get_parameter(name).shape)
            regions = block_regions(shape, dim=cut.dim, block_sizes=cut.block_sizes, group_size=mesh.size())
            shardings[name] = over_mesh(shape, regions, mesh)
    return shardings


class _Interleaved:
    """Conversions from a checkpoint in which the parts of packed weights lie rank after rank."""

    def __init__(self, cuts: Mapping[str, _Cut], degree: int) -> None:
        """Take what cut the weights when they were written."""
        self._cuts = {name: cut for name, cut in cuts.items() if cut.dim is not None and len(cut.block_sizes) > 1}
        self._degree = degree

    def to_model(self, tensors: Mapping[str, Tensor]) -> Converted:
        """Return the tensors with the blocks of packed weights whole again."""
        return Converted({name: self._joined(name, tensor) for name, tensor in tensors.items()}, (), ())

    def _joined(self, name: str, tensor: Tensor) -> Tensor:
        cut = self._cuts.get(name)
        if cut is None or cut.dim is None:
            return tensor
        held = sum(cut.block_sizes) // self._degree
        parts, before = [], 0
        for size in cut.block_sizes:
            part = size // self._degree
            starts = [rank * held + before for rank in range(self._degree)]
            parts += [narrow(tensor.source, cut.dim, start, start + part) for start in starts]
            before += part
        return tensor._replace(source=concatenate(parts, cut.dim))

    def to_checkpoint(self, tensors: Mapping[str, Tensor]) -> Converted:
        """Return the tensors as they are: nobody should write such a checkpoint."""
        return Converted(dict(tensors), (), ())

    def module_in_checkpoint(self, name: str) -> str:
        """Return the name as it is."""
        return name

    def ignores(self, name: str, is_ignored: Callable[[str], bool]) -> bool:
        """Return what the model says of the name, which is the same."""
        return is_ignored(name)

    def loaded(self) -> None:
        """Take note of nothing."""


def _check(model: _Mixin, report: LoadReport) -> None:
    name = type(model).__name__
    if report.missing:
        raise MismatchError(f"{name}: the checkpoint lacks {', '.join(report.missing)}, which nothing can initialise")
    if report.unexpected:
        message = f"{name}: {len(report.unexpected)} names are in the checkpoint and not in the model: "
        warnings.warn(message + ", ".join(report.unexpected[:20]), CheckpointWarning, stacklevel=3)


def _install_hooks(model: _Mixin, mesh: DeviceMesh) -> None:
    """Have diffusers' hooks exchange what the parts of the model compute, and the model know that it is cut."""
    import diffusers  # noqa: PLC0415 - takes seconds
    from diffusers.hooks.tensor_parallel import (  # noqa: PLC0415
        _hooks_only_styles,
        _resolve_tp_plan,
    )

    # What apply_tensor_parallel does, which takes no mesh of CPUs (0.42).
    for module, plan in _resolve_tp_plan(model, model._tp_plan):  # noqa: SLF001 - where diffusers keeps it
        parallelize_module(module, mesh, _hooks_only_styles(plan))
    library: Any = diffusers
    config = library.ParallelConfig(tensor_parallel_config=library.TensorParallelConfig(mesh=mesh))
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device(mesh.device_type), mesh=mesh)
    model._parallel_config = config  # noqa: SLF001 - by it, diffusers refuses to offload the model


def _mesh_of(model: _Mixin) -> DeviceMesh | None:
    config = getattr(model, "_parallel_config", None)
    tensor = getattr(config, "tensor_parallel_config", None)
    mesh: DeviceMesh | None = getattr(tensor, "_mesh", None)
    return mesh


def _check_state(model: _Mixin) -> None:
    """Refuse a model whose parameters are not all its own, plain, and here."""
    name, reason = type(model).__name__, None
    modules = list(model.modules())
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        reason = f"is quantized: {_REFUSED['quantization_config']}"
    elif getattr(model, "hf_device_map", None) is not None or any(hasattr(module, "_hf_hook") for module in modules):
        reason = "is placed by accelerate, which keeps some weights elsewhere: load it without device_map or offloading"
    elif any(type(hook).__name__ == "GroupOffloadingHook" for module in modules for hook in _hooks(module)):
        reason = "is offloaded by groups, so its weights move while they would be read: disable that first"
    elif any("peft" in type(module).__module__.split(".") for module in modules):
        reason = "has adapter layers, whose weights have other names than the model's: unload or fuse them first"
    if reason is not None:
        raise InvalidInputError(f"{name} {reason}")


def _hooks(module: nn.Module) -> Sequence[object]:
    registry = getattr(module, "_diffusers_hook", None)
    return tuple(getattr(registry, "hooks", {}).values())


class _Config:
    """A model's configuration, as what belongs beside its weights."""

    def __init__(self, model: _Mixin) -> None:
        self._model = model

    def save_pretrained(self, save_directory: Path, /) -> None:
        """Write it."""
        self._model.save_config(save_directory)
