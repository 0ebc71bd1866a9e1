"""The conversions of a model's family, as transformers itself describes them, for loads and for saves.

Names are made by transformers' own functions, tensors by its own operations: on names alone and on tensors without
values (`traced`), so that every rank knows from the checkpoint's index what each parameter is made of. Only then is
that cut by the parameter's layout. transformers itself cuts first and converts afterwards, which is wrong where an
operation touches the cut dim (5.24).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from shardferry.convert.table import Converted
from shardferry.convert.tensor import Tensor
from shardferry.errors import InvalidInputError
from shardferry.torch.dtypes import can_be_traced
from shardferry.torch.entries import plain_name
from shardferry.torch.transformers.quantized import Quantization, dequantized
from shardferry.torch.transformers.traced import Traced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter, WeightRenaming, WeightTransform

# Where transformers keeps the conversions that filled a model.
RECORDED = "_weight_conversions"
# Names listed in an error.
LISTED = 4


class FamilyConversions:
    """How checkpoints of a model's family become the model, and back."""

    def __init__(self, model: PreTrainedModel, quantization: Quantization | None = None) -> None:
        """Take the conversions of a model, which may be sharded and on the meta device.

        Args:
            model: The model.
            quantization: How the checkpoint is quantized, and whether the model is too; None for plain weights.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415 - takes seconds

        twin = _unwrapped_twin(model)
        self._model = model
        self._name = type(twin).__name__
        self._quantization = quantization
        quantizer = None if quantization is None else quantization.quantizer
        recorded: list[WeightTransform] | None = getattr(model, RECORDED, None)
        if quantizer is not None and recorded is not None:
            # A quantizer asks the model's own parameters, which a twin does not have.
            self._for_loads = self._for_saves = recorded
        else:
            self._for_loads = get_model_conversion_mapping(twin, hf_quantizer=quantizer)
            self._for_saves = get_model_conversion_mapping(twin, hf_quantizer=quantizer, add_legacy=False)
        self._used: list[WeightTransform] = []
        # The model may be one stage of several, whose names are those of a save.
        self._names = dict.fromkeys(map(plain_name, model.state_dict()), True)
        self._renamed: dict[str, str] = {}
        self._dropped: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        """Return what ranks compare, to be sure that they convert alike."""
        return f"FamilyConversions({self._name})"

    def to_model(self, tensors: Mapping[str, Tensor]) -> Converted:
        """Return a checkpoint's tensors under the model's names; what the model lacks keeps its name.

        Raises:
            InvalidInputError: If two tensors become one, or an operation is refused; names the tensors.
        """
        from transformers.core_model_loading import (  # noqa: PLC0415 - takes seconds
            dot_natural_key,
            rename_source_key,
        )

        transforms = copy.deepcopy(self._for_loads)
        renamings, converters = _by_kind(transforms)
        known, prefix = self._names, self._model.base_model_prefix
        groups = _Groups(converters)
        made: dict[str, Tensor] = {}
        if self._quantization is not None and self._quantization.quantizer is None:
            tensors, self._dropped = dequantized(tensors, self._quantization.block)
        self._renamed = {}
        for name in sorted(tensors, key=dot_natural_key):
            new, pattern = rename_source_key(name, renamings, converters, prefix, known)
            if new not in known and name in known:
                new, pattern = rename_source_key(name, [], [], prefix, known)
            if new in known:
                groups.add(new, pattern, tensors[name])
            else:
                made[name] = tensors[name]
                self._renamed[name] = new
        for new, group in groups.by_target.items():
            _put(made, self._convert(new, *group))
        self._used = [transform for transform in transforms if transform.was_used()]
        return Converted(made, (), ())

    def to_checkpoint(self, tensors: Mapping[str, Tensor]) -> Converted:
        """Return a model's tensors under the names, and in the shapes, of its family's checkpoints.

        Those are the checkpoint's that the model was filled from, or if it was not, what transformers would save.

        Raises:
            InvalidInputError: As `to_model`.
        """
        from transformers.core_model_loading import (  # noqa: PLC0415 - takes seconds
            apply_converters,
            apply_renamings,
            dot_natural_key,
        )

        renamings, converters = self._reversed()
        self._names |= dict.fromkeys(tensors, True)
        groups = _Groups(converters)
        made: dict[str, Tensor] = {}
        for name in sorted(tensors, key=dot_natural_key):
            new, pattern = apply_converters(name, converters)
            new = new if pattern is not None else apply_renamings(name, renamings)
            groups.add(new, pattern, tensors[name])
        became: dict[str, list[str]] = {}
        renamed: dict[str, str] = {}
        for new, (converter, parts) in groups.by_target.items():
            converted = self._convert(new, converter, parts)
            sources = [tensor.name for part in parts.values() for tensor in part]
            if converter is None:
                renamed[sources[0]] = new
            else:
                _check_parts(sources, converted, converter)
                converted = {apply_renamings(name, renamings): tensor for name, tensor in converted.items()}
                became.update((source, list(converted)) for source in sources)
            _put(made, converted)
        return Converted(made, (), _left_behind(renamed, became))

    def module_in_checkpoint(self, name: str) -> str:
        """Return how checkpoints spell the name of a module, from the top, or a pattern of such names."""
        from transformers.core_model_loading import apply_renamings  # noqa: PLC0415 - takes seconds

        # Renamings are written for the names of weights.
        return apply_renamings(f"{name}.", self._reversed()[0]).removesuffix(".")

    def ignores(self, name: str, is_ignored: Callable[[str], bool]) -> bool:
        """Return whether a name of the checkpoint is of no use on purpose; asked after `to_model`."""
        return name in self._dropped or is_ignored(self._renamed.get(name, name))

    def loaded(self) -> None:
        """Record in the model what has filled it, as transformers does, so that it is saved the way it was loaded."""
        setattr(self._model, RECORDED, self._used)

    def _reversed(self) -> tuple[list[WeightRenaming], list[WeightConverter]]:
        return _by_kind([transform.reverse_transform() for transform in reversed(self._recorded())])

    def _recorded(self) -> list[WeightTransform]:
        from transformers.core_model_loading import PrefixChange  # noqa: PLC0415 - takes seconds

        recorded: list[WeightTransform] | None = getattr(self._model, RECORDED, None)
        if recorded is not None:
            return recorded
        return [transform for transform in self._for_saves if not isinstance(transform, PrefixChange)]

    def _convert(
        self, name: str, converter: WeightConverter | None, parts: Mapping[str, list[Tensor]]
    ) -> dict[str, Tensor]:
        """Return what transformers makes of the tensors collected for a name."""
        if converter is None:
            ((tensor,),) = parts.values()
            return {name: tensor if tensor.name == name else tensor._replace(name=name)}
        for pattern, tensors in parts.items():
            collected: dict[str, Any] = converter.collected_tensors
            collected[pattern] = [_traced(tensor) for tensor in tensors]
        try:
            with torch.no_grad():
                realized = converter.convert(name, model=self._model, config=self._model.config)
            return dict(_tensors(realized))
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            # Operations raise whatever their code comes to with tensors they were not made for.
            sources = [tensor.name for tensors in parts.values() for tensor in tensors]
            steps = ", ".join(type(op).__name__ for op in converter.operations)
            raise InvalidInputError(f"{_listed(sources)}: {error}. Wanted for {name}, by {steps}") from error


def family_conversions(model: nn.Module, quantization: Quantization | None = None) -> FamilyConversions:
    """Return the conversions of a model of transformers.

    Raises:
        InvalidInputError: If the model is none of transformers.
    """
    model = getattr(model, "_orig_mod", model)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantization is None and quantizer is not None:
        quantization = Quantization(quantizer, None)
    if not hasattr(model, "base_model_prefix") or not hasattr(model, "config"):
        raise InvalidInputError(
            f"conversions='auto' asks the family of a transformers model, and {type(model).__name__} is none: "
            "give the rules themselves"
        )
    return FamilyConversions(model, quantization)  # type: ignore[arg-type] # by its attributes


class _Groups:
    """What is collected for every name that is made, in the order of first mention."""

    def __init__(self, converters: Sequence[WeightConverter]) -> None:
        self._converters = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        self.by_target: dict[str, tuple[WeightConverter | None, dict[str, list[Tensor]]]] = {}

    def add(self, target: str, pattern: str | None, tensor: Tensor) -> None:
        """Collect a tensor for a target, by the pattern of a converter or as it is."""
        if target not in self.by_target:
            converter = None if pattern is None else copy.deepcopy(self._converters[pattern])
            self.by_target[target] = (converter, {})
        converter, parts = self.by_target[target]
        if (pattern is None) != (converter is None) or (pattern is None and parts):
            other = next(one.name for part in parts.values() for one in part)
            raise InvalidInputError(f"{other} and {tensor.name} would both become {target}: a tensor is made once")
        parts.setdefault(pattern or "", []).append(tensor)


def _by_kind(transforms: Iterable[WeightTransform]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming  # noqa: PLC0415 - takes seconds

    transforms = list(transforms)
    return (
        [transform for transform in transforms if isinstance(transform, WeightRenaming)],
        [transform for transform in transforms if isinstance(transform, WeightConverter)],
    )


def _check_parts(sources: Sequence[str], made: Mapping[str, Tensor], converter: WeightConverter) -> None:
    """Refuse what reversed operations make of tensors they are not for: transformers does not look.

    Raises:
        InvalidInputError: If parts are not equal, or a list of experts is not one of matrices.
    """
    kinds = {type(operation).__name__ for operation in converter.operations}
    shapes = sorted({tensor.shape for tensor in made.values()})
    if "Chunk" in kinds and len(shapes) > 1:
        raise InvalidInputError(f"{_listed(sources)} cannot be cut into equal parts: they would be {shapes}")
    flat = [name for name, tensor in made.items() if name.endswith(".weight") and len(tensor.shape) < 2]  # noqa: PLR2004
    if "SplitModulelist" in kinds and flat:
        raise InvalidInputError(
            f"{_listed(sources)}: no list of matrices, as which {_listed(flat)} would be taken of it"
        )


def _left_behind(renamed: Mapping[str, str], became: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the names that belong to a converted tensor, such as its scales, and would no longer be seen to.

    Args:
        renamed: New names of tensors that stay as they are, by the model's.
        became: New names of what converted tensors became, by the model's.
    """
    heads: dict[str, list[str]] = {}
    for name, new in became.items():
        heads[name] = list(new)
        heads.setdefault(name.removesuffix(".weight"), []).extend(one.removesuffix(".weight") for one in new)
    left = []
    for name, new in renamed.items():
        ends = ((heads.get(name[:at]), name[at:]) for at, letter in enumerate(name) if letter in "._")
        if any(head is not None and new not in {one + end for one in head} for head, end in ends):
            left.append(name)
    # A pattern for a weight may match what its name only begins with: `weight` is never a module.
    misnamed = (
        name for name, new in became.items() if any(".weight." in one for one in new) and ".weight." not in name
    )
    return (*left, *misnamed)


def _unwrapped_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model whose classes have their own names, by which conversions are found: FSDP2 renames them."""
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 - as late as it is needed

    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return model
    own: Any = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    with torch.device("meta"):
        twin: PreTrainedModel = own(copy.deepcopy(model.config))
    return twin


def _traced(tensor: Tensor) -> Traced:
    # An operation that moves elements does so whatever they are; those torch cannot show are shown as bytes.
    return Traced(tensor.source, tensor.dtype, None if can_be_traced(tensor.dtype) else torch.uint8)


def _tensors(realized: Mapping[str, Any]) -> Iterable[tuple[str, Tensor]]:
    for name, made in realized.items():
        traced = made[0] if isinstance(made, list) else made
        if not isinstance(traced, Traced):
            raise InvalidInputError(f"{name} would be made of values that are in no checkpoint")
        yield name, Tensor(name, traced.stored_dtype, traced.source)


def _put(made: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    twice = sorted(made.keys() & more.keys())
    if twice:
        raise InvalidInputError(f"{_listed(twice)} would be made twice: a tensor is made once")
    made.update(more)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
