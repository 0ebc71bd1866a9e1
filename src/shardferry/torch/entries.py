"""What there is to fill: the parameters and persistent buffers of a model, or the tensors of a state dict.

An entry is one memory. Names that share it (the same parameter object in several modules, or names the model itself
declares tied) are one entry with several names; nothing is ever concluded from equal addresses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.parameter import is_lazy

from shardferry.errors import InvalidInputError
from shardferry.plan.target import Target
from shardferry.torch.dtypes import dtype_name, elements_per_item
from shardferry.torch.shardings import FsdpCut, GivenSharding, fsdp_cuts, given_layout, layouts_of, local_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from shardferry.plan.target import Layout

# torch.compile and checkpoint wrappers put their own names into the path of a parameter.
_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")
# transformers no longer stores these buffers, but checkpoints of older releases do (5.24, modeling_utils).
_OLD_BUFFERS = ("rotary_emb.inv_freq", "position_ids")


@dataclass(slots=True)
class Slot:
    """A place in a module that holds the entry's tensor."""

    module: nn.Module
    attribute: str

    def put(self, tensor: torch.Tensor) -> None:
        """Put another tensor there."""
        kept = self.module._parameters if self.attribute in self.module._parameters else self.module._buffers  # noqa: SLF001
        kept[self.attribute] = tensor  # type: ignore[assignment]


@dataclass(slots=True)
class Entry:
    """One memory to fill.

    Attributes:
        names: Names the model or state dict gives it, then names it is declared to be tied to.
        tensor: The tensor as found: plain or DTensor, perhaps on the meta device.
        slots: Where the model holds it; empty for a state dict.
        cut: FSDP2's record of it.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    slots: list[Slot] = field(default_factory=list)
    cut: FsdpCut | None = None


def model_entries(model: nn.Module) -> list[Entry]:
    """Return the parameters and persistent buffers of a model.

    What modules put under `_extra_state` is theirs to read and write, and left alone.

    Raises:
        InvalidInputError: If its state dict holds a tensor that is neither, so that filling it would not reach the
            model.
    """
    state = model.state_dict(keep_vars=True)  # FSDP2 puts its sharded parameters back in place for this
    slots, cuts = _slots(model), fsdp_cuts(model)
    entries: dict[int, Entry] = {}
    for key, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or _is_extra_state(key):
            continue
        entry = entries.get(id(tensor))
        if entry is not None:
            entry.names = (*entry.names, plain_name(key))
            continue
        if id(tensor) not in slots:
            message = (
                f"{key} is neither a parameter nor a buffer of the model but made by its state_dict(): load it with "
                "load_state_dict, and hand the result to the model yourself"
            )
            raise InvalidInputError(message)
        entries[id(tensor)] = Entry((plain_name(key),), tensor, slots[id(tensor)], cuts.get(id(tensor)))
    return _with_declared_ties(list(entries.values()), model)


def state_dict_entries(state_dict: Mapping[str, torch.Tensor], model: nn.Module | None) -> list[Entry]:
    """Return the tensors of a state dict; a model, if given, tells how they are cut and which are tied."""
    known = {name: entry for entry in model_entries(model) for name in entry.names} if model is not None else {}
    entries: dict[int, Entry] = {}
    for name, tensor in state_dict.items():
        if _is_extra_state(name):
            continue
        of_model = known.get(plain_name(name))
        memory = id(tensor) if of_model is None else id(of_model)
        if memory in entries:
            entries[memory].names = tuple(dict.fromkeys((*entries[memory].names, name)))
        else:
            ties = of_model.names if of_model is not None else ()
            entries[memory] = Entry(tuple(dict.fromkeys((name, *ties))), tensor, [], of_model.cut if of_model else None)
    return list(entries.values())


def make_target(entry: Entry, shardings: Mapping[str, GivenSharding], *, filled: bool) -> Target | None:
    """Return what this rank wants of an entry; None if the rank is not on the tensor's mesh.

    A sharding the caller gives wins over what the tensor says of itself.

    Raises:
        InvalidInputError: If its bytes are not a tensor's in plain memory.
        ShardingError: If its placements are no layout of a stored tensor.
    """
    name, tensor = entry.names[0], entry.tensor
    check_plain_memory(tensor, name, filled=filled)
    per_item = elements_per_item(tensor.dtype)
    shape: tuple[int, ...] | None = _in_file_elements(tensor.shape, per_item)
    local_shape = _in_file_elements(local_part(tensor).shape, per_item)
    given = next((shardings[other] for other in entry.names if other in shardings), None)
    layouts: tuple[Layout, ...] = ()
    if given is not None:
        shape = shape if isinstance(tensor, DTensor) else None
        layouts = (given_layout(given, tensor.ndim, name),)
    elif isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return None
        layouts = layouts_of(tensor, entry.cut, name)
    return Target(entry.names, dtype_name(tensor.dtype, name), shape, local_shape, layouts)


class Buffer(NamedTuple):
    """A non-persistent buffer of a module."""

    name: str
    module: nn.Module
    attribute: str
    tensor: torch.Tensor


def non_persistent_buffers(model: nn.Module) -> Iterator[Buffer]:
    """Yield the buffers of a model that its state dict leaves out."""
    for prefix, module in model.named_modules():
        for attribute in module._non_persistent_buffers_set:  # noqa: SLF001 - the only place that says it
            tensor = module._buffers.get(attribute)  # noqa: SLF001
            if tensor is not None:
                yield Buffer(f"{prefix}.{attribute}" if prefix else attribute, module, attribute, tensor)


def unfilled_names(model: nn.Module, entries: Iterable[Entry]) -> list[str]:
    """Return what is on the meta device and not among the entries: buffers not saved, and what hooks take out."""
    filled = {id(entry.tensor) for entry in entries}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return [plain_name(name) for name, tensor in named if tensor.device.type == "meta" and id(tensor) not in filled]


def ignorable_names(model: nn.Module | None) -> Callable[[str], bool]:
    """Return whether a checkpoint name is of no use to a model on purpose.

    That is a non-persistent buffer of the model, a name its own `_keys_to_ignore_on_load_unexpected` matches, and
    what older transformers releases stored of buffers that are computed today.
    """
    if model is None:
        return lambda _: False
    buffers = {plain_name(name) for name, _ in model.named_buffers()}
    computed = {plain_name(buffer.name) for buffer in non_persistent_buffers(model)}
    patterns: list[str] = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    patterns += [rf"(^|\.){re.escape(old)}$" for old in _OLD_BUFFERS if any(name.endswith(old) for name in buffers)]
    matcher = re.compile("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else None
    return lambda name: name in computed or (matcher is not None and matcher.search(name) is not None)


def check_plain_memory(tensor: torch.Tensor, name: str, *, filled: bool) -> None:
    """Raise `InvalidInputError` unless a tensor is plain memory, and each element its own if it is to be filled."""
    if not isinstance(tensor, torch.Tensor):
        message = f"{name} is no tensor but a {type(tensor).__name__}: take it out of the state dict"
    elif is_lazy(tensor):
        message = f"{name} has no shape yet: run one forward of its lazy module first"
    elif tensor.layout is not torch.strided:
        message = f"{name} has layout {tensor.layout}: only dense tensors can be filled or stored"
    else:
        local = local_part(tensor)
        if type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            message = (
                f"{name} is a {type(local).__name__}, a tensor subclass that keeps its values elsewhere: load before "
                "converting the model, or pass the plain tensors it is made of"
            )
        elif filled and any(stride == 0 and size > 1 for size, stride in zip(local.shape, local.stride(), strict=True)):
            message = f"{name} is an expanded view, whose elements share memory: clone() it first"
        else:
            return
    raise InvalidInputError(message)


def plain_name(name: str) -> str:
    """Return a parameter's name without what wrappers put into it."""
    return _WRAPPERS.sub("", name)


def _is_extra_state(key: str) -> bool:
    return key.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def _slots(model: nn.Module) -> dict[int, list[Slot]]:
    slots: dict[int, list[Slot]] = {}
    for module in model.modules():
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):  # noqa: SLF001
            if tensor is not None:
                slots.setdefault(id(tensor), []).append(Slot(module, attribute))
    return slots


def _with_declared_ties(entries: list[Entry], model: nn.Module) -> list[Entry]:
    """Add, to entries that wrapping has untied, the name their model declares them tied to (transformers 5)."""
    declared: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    for entry in entries:
        sources = [declared[name] for name in entry.names if name in declared]
        entry.names = tuple(dict.fromkeys((*entry.names, *sources)))
    return entries


def _in_file_elements(shape: Sequence[int], per_item: int) -> tuple[int, ...]:
    """Count the last dim as files do, for dtypes that pack several elements into one item."""
    return (*shape[:-1], shape[-1] * per_item) if per_item > 1 and shape else tuple(shape)
