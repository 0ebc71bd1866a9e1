"""transformers models: built sharded without memory, filled and saved without anybody holding the whole.

import shardferry.torch.transformers as sft

mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("fsdp", "tp"))
model = sft.from_pretrained(AutoModelForCausalLM, "/ckpt", mesh=mesh)
sft.save_pretrained(model, "/out")
"""

from __future__ import annotations

from shardferry.torch.transformers.buffers import initialize_buffers
from shardferry.torch.transformers.lazy import LazyTensor, lazy_state_dict
from shardferry.torch.transformers.load import from_pretrained
from shardferry.torch.transformers.save import save_pretrained

__all__ = ["LazyTensor", "from_pretrained", "initialize_buffers", "lazy_state_dict", "save_pretrained"]
