"""The torch side of a load: offers what there is to fill, hands out its memory, and puts new memory in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardferry.torch.destinations import TensorDestination, make_staging
from shardferry.torch.entries import Entry, make_target
from shardferry.torch.memory import advise_tensors, local_of, make_storage
from shardferry.torch.shardings import GivenSharding, local_part

if TYPE_CHECKING:
    from shardferry.execute.load import Destination, Staging
    from shardferry.execute.meter import Meter
    from shardferry.plan.load import LoadPlan, TensorPlan

# Puts new memory where an entry's meta tensor was.
Put = Callable[[Entry, torch.Tensor], None]


class Filler:
    """What one rank offers to a load, and what comes of it.

    Attributes:
        targets: What there is to fill, in neutral words.
        unfilled: Names of memory no checkpoint fills and nobody has computed.
    """

    def __init__(self, entries: Iterable[Entry], shardings: Mapping[str, GivenSharding], put: Put) -> None:
        """Prepare to fill the entries this rank has a part of."""
        pairs = [(make_target(entry, shardings, filled=True), entry) for entry in entries]
        self.targets = [target for target, _ in pairs if target is not None]
        self.unfilled: list[str] = []
        self._entries = {target.name: (entry, target.dtype) for target, entry in pairs if target is not None}
        self._put = put
        self._made: list[tuple[Entry, torch.Tensor]] = []
        self._destinations: dict[str, TensorDestination] = {}
        self._device = torch.device("cpu")

    def allocate(self, plan: LoadPlan, meter: Meter) -> Mapping[str, Destination]:  # noqa: ARG002 - tensors are not extra
        """Return the memory of every tensor of the plan, made where it is on the meta device."""
        locals_: list[torch.Tensor] = []
        for tensor in plan.tensors:
            entry, dtype = self._entries[tensor.name]
            local = self._local(entry, tensor)
            if local.device.type != "cpu":
                self._device = local.device
            self._destinations[tensor.name] = TensorDestination(local, dtype, tensor.local_shape)
            locals_.append(local)
        advise_tensors(locals_)
        return self._destinations

    def staging(self, num_bytes: int, meter: Meter) -> Sequence[Staging]:
        """Return the staging ring of one reading thread."""
        return make_staging(self._device, num_bytes, meter)

    def cast_counts(self) -> tuple[int, int]:
        """Return how many tensors were cast, and how many finite values became infinite by it."""
        destinations = self._destinations.values()
        return sum(d.was_cast for d in destinations), sum(d.num_overflowed for d in destinations)

    def commit(self) -> None:
        """Put the memory that was made where the meta tensors were."""
        for entry, storage in self._made:
            self._put(entry, storage)

    def _local(self, entry: Entry, plan: TensorPlan) -> torch.Tensor:
        local = local_part(entry.tensor)
        if not local.is_meta:
            return local
        storage = make_storage(entry, plan.copies[0].first_byte if plan.copies else 0)
        self._made.append((entry, storage))
        return local_of(entry, storage)


def put_into_model(entry: Entry, storage: torch.Tensor) -> None:
    """Replace an entry's meta tensor by new memory in every module that holds it."""
    if entry.cut is not None:
        _put_into_fsdp(entry.cut.param, storage, local_of(entry, storage))
        return
    tensor = _like(entry.tensor, _as_dtensor(entry, storage))
    for slot in entry.slots:
        slot.put(tensor)


def put_into_state_dict(state_dict: MutableMapping[str, torch.Tensor], entry: Entry, storage: torch.Tensor) -> None:
    """Replace an entry's meta tensor by new memory under every name the state dict has for it."""
    tensor = _like(entry.tensor, _as_dtensor(entry, local_of(entry, storage)))
    for name in entry.names:
        if name in state_dict:
            state_dict[name] = tensor


def _put_into_fsdp(state: Any, storage: torch.Tensor, local: torch.Tensor) -> None:  # noqa: ANN401 - private class
    old = state.sharded_param
    state._sharded_param_data = storage.view(-1)  # noqa: SLF001 - what FSDP2's own reset_sharded_param sets
    state.sharded_param = _like(old, state.to_sharded_dtensor(local))
    state._setattr_on_modules(state.sharded_param)  # noqa: SLF001 - covers modules that share the parameter


def _as_dtensor(entry: Entry, local: torch.Tensor) -> torch.Tensor:
    if not isinstance(entry.tensor, DTensor):
        return local
    # from_local would forget a spec's shard order.
    made: torch.Tensor = DTensor(local, entry.tensor._spec, requires_grad=False)  # noqa: SLF001
    return made


def _like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return `new` as what `old` is, a parameter, a buffer or a subclass of one, with the same attributes."""
    if isinstance(old, DTensor):
        made: torch.Tensor = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
    else:
        # What nn.Parameter itself does; a subclass's own constructor may want more than a tensor.
        made = torch.Tensor._make_subclass(type(old), new, old.requires_grad)  # noqa: SLF001
    for attribute, value in vars(old).items():
        if attribute not in vars(made):
            setattr(made, attribute, value)
    return made
