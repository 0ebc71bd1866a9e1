"""Buffers of transformers models that no checkpoint holds, computed by the model itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardferry.torch.entries import non_persistent_buffers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# transformers' own mark for what its initialisation must leave alone (5.24, modeling_utils and initialization).
INITIALIZED = "_is_hf_initialized"


def initialize_buffers(model: PreTrainedModel) -> list[str]:
    """Compute the non-persistent buffers that are still on the meta device, and return their names.

    Checkpoints do not hold them (position ids, rotary frequencies). The model's own `initialize_weights` computes
    them; parameters and persistent buffers are marked as initialised, so that it leaves those alone. They get memory
    on torch's default device. Call it before or after sharding the model, and before `load_model`.
    """
    missing = [buffer for buffer in non_persistent_buffers(model) if buffer.tensor.is_meta]
    if not missing:
        return []
    default = torch.get_default_device()
    device = torch.device("cpu") if default.type == "meta" else default
    for buffer in missing:
        buffer.module.register_buffer(
            buffer.attribute, torch.empty_like(buffer.tensor, device=device), persistent=False
        )
        setattr(buffer.module, INITIALIZED, False)
    for tensor in model.state_dict(keep_vars=True).values():
        setattr(tensor, INITIALIZED, True)
    model.initialize_weights()
    return [buffer.name for buffer in missing]
