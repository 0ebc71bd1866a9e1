"""Build a model of transformers sharded, without memory, and fill it from a checkpoint."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardferry.errors import CheckpointWarning, InvalidInputError
from shardferry.torch.entries import model_entries
from shardferry.torch.filler import put_into_model
from shardferry.torch.load import load_model
from shardferry.torch.memory import make_storage
from shardferry.torch.transformers.buffers import INITIALIZED, initialize_buffers
from shardferry.torch.transformers.family import family_conversions
from shardferry.torch.transformers.quantized import Quantization

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from transformers import PreTrainedConfig, PreTrainedModel

    from shardferry.execute.report import LoadReport
    from shardferry.torch.load import LoadOptions

    Model = TypeVar("Model", bound=PreTrainedModel)

logger = logging.getLogger(__name__)

# Where transformers keeps what a model is quantized by.
QUANTIZER = "hf_quantizer"
# Methods of quantization whose weights are made whole; ModelOpt's are NVFP4.
DECODED = ("fp8", "mxfp4", "nvfp4", "modelopt")
# The axes of transformers' mesh in their order (5.24, distributed/utils), pipeline stages apart.
AXES = ("dp_replicate", "fsdp", "tp")


class Parallelism(NamedTuple):
    """How a model is spread over a mesh.

    Attributes:
        mesh: Axes named `dp_replicate`, `fsdp` and `tp`, as many of them as are wanted, in any order.
        ep_size: Ranks over which experts are dealt: a multiple of the `tp` axis that divides `fsdp` x `tp`.
        tp_plan: `"auto"` for the model's own plan, or rules that change it.
        ep_plan: Rules that change the model's own plan for experts.
        fsdp_plan: Rules that change the model's own plan of what FSDP2 wraps.
    """

    mesh: DeviceMesh
    ep_size: int
    tp_plan: Mapping[str, str] | Literal["auto"]
    ep_plan: Mapping[str, str] | None
    fsdp_plan: Mapping[str, str] | None


def from_pretrained(  # noqa: PLR0913 - one argument for each thing a caller decides, as in transformers
    model_class: Any,  # noqa: ANN401 - an auto class or a model class of transformers, whose types say nothing
    path: str | os.PathLike[str],
    *,
    mesh: DeviceMesh | None = None,
    ep_size: int = 1,
    tp_plan: Mapping[str, str] | Literal["auto"] = "auto",
    ep_plan: Mapping[str, str] | None = None,
    fsdp_plan: Mapping[str, str] | None = None,
    dtype: torch.dtype | Literal["auto"] = "auto",
    config: PreTrainedConfig | None = None,
    strict: bool = False,
    dequantize: bool = False,
    **options: Unpack[LoadOptions],
) -> PreTrainedModel:
    """Return a model of transformers, sharded over a mesh and filled from a checkpoint.

    Collective over the mesh. The model is built on the meta device, cut by its own plans, given its forward hooks by
    transformers, and filled: every rank reads its own bytes only and never holds more. It is in evaluation mode, and
    parameters that are tied are one.

    Args:
        model_class: An auto class such as `AutoModelForCausalLM`, or a model class.
        path: Directory of the checkpoint with its `config.json`.
        mesh: Axes named `tp`, `fsdp` and `dp_replicate`, as many as are wanted; None for a whole model on this rank.
        ep_size: Ranks over which experts are dealt; a multiple of `tp` that divides `fsdp` x `tp`.
        tp_plan: `"auto"` for the model's own plan, or rules that change it.
        ep_plan: Rules that change the model's own plan for experts.
        fsdp_plan: Rules that change the model's own plan of what FSDP2 wraps.
        dtype: Of the model; `"auto"` for what its configuration says. What the model keeps in float32 stays so.
        config: Instead of the checkpoint's own.
        strict: Whether a missing or unexpected name is an error. If not, as in transformers, missing parameters are
            initialised anew, and both are named in a warning.
        dequantize: Whether the weights of a quantized checkpoint (block-scaled FP8, MXFP4, NVFP4) become whole, each
            rank computing its own part. If not, the model keeps FP8 as it is stored, and the others are refused.
        **options: See `shardferry.torch.LoadOptions`; `conversions` are those of the model's family if none are given.

    Raises:
        InvalidInputError: If the mesh has an axis of another name, or the checkpoint is quantized.
        ShardferryError: As `shardferry.torch.load_model`.
        ValueError: Of transformers, if the model has no plan for an axis of the mesh.
    """
    config = _read_config(os.fspath(path), config)
    quantization = _quantization(os.fspath(path), config, dequantize=dequantize)
    is_tied = mesh is None or "tp" not in (mesh.mesh_dim_names or ()) or mesh["tp"].size() == 1
    model = _build(model_class, os.fspath(path), config, dtype, quantization, is_tied=is_tied)
    if options.get("conversions", "auto") == "auto":
        # By the names of classes, which FSDP2 changes.
        options["conversions"] = family_conversions(model, quantization)
    if mesh is not None and mesh.size() > 1:
        model = _distribute(model, Parallelism(mesh, ep_size, tp_plan, ep_plan, fsdp_plan))
    initialize_buffers(model)
    report = load_model(model, path, strict=strict, **options)
    if report.missing:
        _initialize(model, report.missing)
    model.tie_weights(recompute_mapping=False)
    _warn(model, report)
    model.eval()
    if quantization is not None and quantization.quantizer is not None:
        setattr(model, QUANTIZER, quantization.quantizer)
        quantization.quantizer.postprocess_model(model)
    _read_generation_config(model, os.fspath(path))
    return model


def _read_config(path: str, config: PreTrainedConfig | None) -> PreTrainedConfig:
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds

    return AutoConfig.from_pretrained(path) if config is None else copy.deepcopy(config)


def _quantization(path: str, config: PreTrainedConfig, *, dequantize: bool) -> Quantization | None:
    """Return how a checkpoint is quantized; None if it is not. The configuration is changed if it is dequantized.

    Raises:
        InvalidInputError: If the model cannot keep what is stored.
    """
    from transformers.quantizers.auto import AutoHfQuantizer  # noqa: PLC0415 - takes seconds

    said = getattr(config, "quantization_config", None)
    if said is None:
        return None
    said = said if isinstance(said, dict) else said.to_dict()
    method, size = said.get("quant_method", "an unknown method"), said.get("weight_block_size")
    block = (int(size[0]), int(size[1])) if size else None
    if method == "bitsandbytes":
        raise InvalidInputError(
            f"'{path}' is quantized by bitsandbytes, which flattens a weight into blocks that no cut of the weight "
            "follows. Load the checkpoint it was made of; load_state_dict reads what is stored, as it is"
        )
    if dequantize and method not in DECODED:
        raise InvalidInputError(
            f"'{path}' is quantized ({method}), and dequantize=True makes weights whole of {', '.join(DECODED)}. Load "
            "the checkpoint it was made of"
        )
    if dequantize:
        del config.quantization_config
        return Quantization(None, block)
    if method != "fp8":
        raise InvalidInputError(
            f"'{path}' is quantized ({method}), and a model of transformers keeps such weights in an order of its own: "
            "dequantize=True makes them whole, or fill a model that you have built with load_model"
        )
    return Quantization(AutoHfQuantizer.from_config(said, pre_quantized=True), block)


def _build(
    model_class: Any,  # noqa: ANN401 - see from_pretrained
    path: str,
    config: PreTrainedConfig,
    dtype: torch.dtype | Literal["auto"],
    quantization: Quantization | None,
    *,
    is_tied: bool,
) -> PreTrainedModel:
    """Return a model on the meta device in the dtypes it is to have.

    Its parameters are tied only if `is_tied`: tensor parallelism of transformers wants to find each under its own name,
    and ties them when they are filled.
    """
    from transformers.initialization import no_tie_weights  # noqa: PLC0415 - takes seconds

    said = config.dtype or torch.get_default_dtype()
    chosen = (
        dtype if isinstance(dtype, torch.dtype) else said if isinstance(said, torch.dtype) else getattr(torch, said)
    )
    with torch.device("meta"), nullcontext() if is_tied else no_tie_weights():
        make = getattr(model_class, "from_config", None) or model_class._from_config  # noqa: SLF001 - of model classes
        model: PreTrainedModel = make(config, dtype=chosen)
        if quantization is not None and quantization.quantizer is not None:
            quantization.quantizer.preprocess_model(model=model, dtype=chosen)
    model.config.name_or_path = path
    _keep_in_float32(model, chosen)
    return model


def _keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    from transformers.core_model_loading import build_glob_alternation  # noqa: PLC0415 - takes seconds

    kept = model._get_dtype_plan(dtype)  # noqa: SLF001 - the only place that says it
    if not kept:
        return
    matcher = build_glob_alternation(list(kept))[0]
    for entry in model_entries(model):
        if any(matcher.search(name) for name in entry.names) and entry.tensor.is_floating_point():
            tensor = entry.tensor.detach().to(torch.float32)
            is_parameter = isinstance(entry.tensor, nn.Parameter)
            for slot in entry.slots:
                slot.put(nn.Parameter(tensor, entry.tensor.requires_grad) if is_parameter else tensor)


def _distribute(model: PreTrainedModel, how: Parallelism) -> PreTrainedModel:
    """Let transformers cut a model that has no memory yet, and install its forward hooks."""
    from transformers.distributed.configuration_utils import DistributedConfig  # noqa: PLC0415 - takes seconds
    from transformers.distributed.utils import TransformersDeviceMesh  # noqa: PLC0415 - takes seconds

    ranks = _ordered_ranks(how.mesh)
    replicas, fsdp, tp = ranks.shape
    spread = DistributedConfig(
        dp_replicate_size=replicas,
        fsdp_size=fsdp,
        tp_size=tp,
        ep_size=how.ep_size,
        tp_plan=how.tp_plan if isinstance(how.tp_plan, str) else dict(how.tp_plan),
        ep_plan=None if how.ep_plan is None else dict(how.ep_plan),
        fsdp_plan=None if how.fsdp_plan is None else dict(how.fsdp_plan),
    )
    kind = how.mesh.device_type
    names = ("pp", *AXES)
    dense = DeviceMesh(kind, ranks.reshape(1, *ranks.shape), mesh_dim_names=names)
    experts = ranks.reshape(1, replicas, spread.efsdp_size, how.ep_size)
    manager = TransformersDeviceMesh(
        dense, DeviceMesh(kind, experts, mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"))
    )
    distributed: PreTrainedModel = type(model).maybe_distribute_model(model, spread, manager)
    return distributed


def _ordered_ranks(mesh: DeviceMesh) -> torch.Tensor:
    """Return a mesh's ranks with the axes `AXES`, those it lacks of size 1."""
    named = mesh.mesh_dim_names or ()
    unknown = [name for name in named if name not in AXES]
    if unknown or not named:
        what = f"an axis named {', '.join(unknown)}" if unknown else "no names for its axes"
        raise InvalidInputError(f"the mesh has {what}; a model is spread over axes named {', '.join(AXES)}")
    order = [named.index(name) for name in AXES if name in named]
    sizes = [mesh.size(named.index(name)) if name in named else 1 for name in AXES]
    return mesh.mesh.permute(order).reshape(sizes)


def _initialize(model: PreTrainedModel, missing: Collection[str]) -> None:
    """Give parameters that the checkpoint lacks memory and the values of a new model."""
    names = {name.partition(":")[0] for name in missing}
    entries = [entry for entry in model_entries(model) if names & set(entry.names) and entry.tensor.is_meta]
    for entry in entries:
        put_into_model(entry, make_storage(entry, 0))
    for module in model.modules():
        setattr(module, INITIALIZED, False)
    for name, tensor in model.state_dict(keep_vars=True).items():
        setattr(tensor, INITIALIZED, name not in names)
    model.initialize_weights()


def _warn(model: PreTrainedModel, report: LoadReport) -> None:
    for names, what in (
        (report.missing, "are not in the checkpoint and were initialised anew"),
        (report.unexpected, "are in the checkpoint and not in the model"),
    ):
        if names:
            message = f"{type(model).__name__}: {len(names)} names {what}: {_listed(names)}"
            warnings.warn(message, CheckpointWarning, stacklevel=3)


def _listed(names: Sequence[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _read_generation_config(model: PreTrainedModel, path: str) -> None:
    from transformers import GenerationConfig  # noqa: PLC0415 - takes seconds

    if model.can_generate() and os.path.exists(os.path.join(path, "generation_config.json")):  # noqa: PTH110, PTH118
        model.generation_config = GenerationConfig.from_pretrained(path)
