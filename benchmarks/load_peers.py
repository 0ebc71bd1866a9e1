"""The loaders that the load benchmark compares: the library, its peers, and what the machine can do without one.

Answers no question itself. A loader takes a `Job`, and what its caller has before a load (a model without values, a
state dict whose memory nobody has touched), and fills or returns this rank's tensors, complete. Where they may still be
views of a mapped file, looking for those and copying them is part of loading.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from benchmarks.load_job import Part, empty_tensors
from benchmarks.measure import file_mappings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.load_job import Job

MADV_HUGEPAGE = 14
HUGE_BYTES = 2 << 20
PAGE_BYTES = 4096


class Loader(NamedTuple):
    """One way to do the job.

    Attributes:
        load: Does it; timed.
        prepare: Makes what `load` is given; not timed, because whoever loads has it.
        tensors: Returns the local tensors by name of what `load` returned; not timed.
    """

    load: Callable[[Job, Any], Any]
    prepare: Callable[[Job], Any] = lambda _: None
    tensors: Callable[[Any], dict[str, torch.Tensor]] = lambda loaded: loaded


def limit(job: Job, _: None) -> dict[str, torch.Tensor]:
    """What the machine does without a library: one copy out of the page cache, into well-placed huge pages."""
    loaded = {}
    descriptors: dict[object, int] = {}
    for name, part in job.parts.items():
        file = part.stored.file
        if file not in descriptors:
            descriptors[file] = os.open(file, os.O_RDONLY)
        if part.dim is None or part.dim == 0:
            row = part.stored.num_bytes // part.stored.shape[0]
            start = part.stored.start + (part.start * row if part.dim == 0 else 0)
            target = _huge_memory(part, start)
            _read(descriptors[file], target.numpy().data.cast("B"), start)
        else:
            target = _huge_memory(part, part.stored.start)
            whole = np.memmap(file, np.int16, "r", part.stored.start, part.stored.shape)
            np.copyto(target.numpy(), whole[part.index])
        loaded[name] = target.view(torch.bfloat16)
    for descriptor in descriptors.values():
        os.close(descriptor)
    return loaded


def shardferry_state_dict(job: Job, state_dict: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """`shardferry.torch.load_state_dict` into memory nobody has touched."""
    import shardferry.torch

    shardferry.torch.load_state_dict(state_dict, job.folder)
    return state_dict


def shardferry_model(job: Job, model: torch.nn.Module) -> torch.nn.Module:
    """`shardferry.torch.load_model` on a model whose parameters are on meta."""
    import shardferry.torch

    shardferry.torch.load_model(model, job.folder)
    return model


def safetensors_slices(job: Job, _: None) -> dict[str, torch.Tensor]:
    """`safetensors.safe_open` and `get_slice`, each rank its own slices."""
    from safetensors import safe_open

    loaded = {}
    for file in sorted({part.stored.file for part in job.parts.values()}):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - the handle is no mapping
                if name in job.parts:
                    loaded[name] = opened.get_slice(name)[job.parts[name].index]
    return clone_views(loaded)


def torch_dcp(job: Job, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Torch's distributed checkpoint with its Hugging Face reader."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(state_dict, storage_reader=HuggingFaceStorageReader(str(job.folder)))
    return clone_views(_local(state_dict))


def transformers_tp(job: Job, _: None) -> dict[str, torch.Tensor]:
    """Transformers' `from_pretrained` with the model's own TP plan; it makes its model itself, on the clock."""
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job.folder,
        dtype=torch.bfloat16,
        distributed_config=DistributedConfig(tp_plan="auto", tp_size=job.mesh.size()),
    )
    return clone_views(_local(model.state_dict()))


def clone_views(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy what is still a view of a mapped file, whose bytes nobody has read yet, or is strided."""
    mappings = file_mappings()

    def is_own(tensor: torch.Tensor) -> bool:
        mapped = any(start <= tensor.data_ptr() < stop for start, stop in mappings)
        return tensor.is_contiguous() and not mapped

    return {name: tensor if is_own(tensor) else tensor.clone() for name, tensor in tensors.items()}


def _local(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: (t.to_local() if hasattr(t, "to_local") else t).detach() for name, t in tensors.items()}


def _module_of(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Return a module whose state dict has these names."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:  # noqa: SLF001 - there is no public test for a child's name
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))
    return root


def _huge_memory(part: Part, file_start: int) -> torch.Tensor:
    """Return int16 memory for `part` in huge pages, not 1 to 31 bytes past the file offset modulo a page.

    At that distance the kernel's copy is 2.8 times slower on some AMD machines.
    """
    memory = torch.empty(part.num_bytes + 192, dtype=torch.uint8)
    address = memory.data_ptr()
    skip = -address % 64
    if 1 <= (address + skip - file_start) % PAGE_BYTES <= 31:
        skip += 64
    first = -(-address // HUGE_BYTES) * HUGE_BYTES
    last = (address + memory.numel()) // HUGE_BYTES * HUGE_BYTES
    if last - first >= HUGE_BYTES:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_HUGEPAGE)
    return memory[skip : skip + part.num_bytes].view(torch.int16).reshape(part.shape)


def _read(descriptor: int, target: memoryview, start: int) -> None:
    done = 0
    while done < len(target):
        done += os.preadv(descriptor, [target[done:]], start + done)


def _empty_state_dict(job: Job) -> dict[str, torch.Tensor]:
    return empty_tensors(job, "cpu")


def _empty_model(job: Job) -> torch.nn.Module:
    return _module_of(empty_tensors(job, "meta"))


LOADERS: dict[str, Loader] = {
    "limit": Loader(limit),
    "shardferry_state_dict": Loader(shardferry_state_dict, _empty_state_dict, _local),
    "shardferry_model": Loader(shardferry_model, _empty_model, lambda model: _local(model.state_dict())),
    "safetensors": Loader(safetensors_slices),
    "torch_dcp": Loader(torch_dcp, _empty_state_dict),
    "transformers": Loader(transformers_tp),
}
