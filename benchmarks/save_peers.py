"""The savers that the save benchmark compares: the library, its peers, and what the machine can do without one.

Answers no question itself. A saver takes a `Job`, makes ready what it saves, off the clock, and returns the function
that saves it into a folder that is not there yet. Each is asked for about `NUM_FILES` files.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.checkpoints import NUM_FILES, TensorSpec, header, split_into_files, write_index
from benchmarks.load_job import filled_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from benchmarks.load_job import Job, Part

    Save = Callable[[Path], None]
    Saver = Callable[[Job], Save]


def limit(job: Job) -> Save:
    """What the machine does without a library: every rank writes its own bytes into files of their final size.

    Rows that are too thin for a call each are stored through a shared mapping of the file. Nothing is staged, checked
    or published.
    """
    tensors = {name: tensor.to_local() for name, tensor in filled_tensors(job).items()}
    rank = dist.get_rank()

    def save(folder: Path) -> None:
        places = _make_files(folder, job.parts) if rank == 0 else {}
        told = [places]
        dist.broadcast_object_list(told)
        descriptors = {file: os.open(folder / file, os.O_RDWR) for file in {file for file, _ in told[0].values()}}
        for name, (file, start) in told[0].items():
            part, data = job.parts[name], tensors[name].view(torch.int16).numpy()
            if part.dim is None and rank != 0:
                continue
            if part.dim is None or part.dim == 0:
                row_bytes = part.stored.num_bytes // part.stored.shape[0]
                _write(descriptors[file], data.data.cast("B"), start + part.start * row_bytes)
            else:
                whole = np.memmap(folder / file, np.int16, "r+", start, part.stored.shape)
                whole[part.index] = data
        for descriptor in descriptors.values():
            os.close(descriptor)
        dist.barrier()

    return save


def shardferry(job: Job) -> Save:
    """`shardferry.torch.save_state_dict`."""
    import shardferry.torch

    tensors = filled_tensors(job)
    return lambda folder: _ignore(
        shardferry.torch.save_state_dict(tensors, folder, max_shard_size=_file_bytes(job.parts))
    )


def gather(job: Job) -> Save:
    """What people write: `full_tensor` of everything, kept on rank 0, then safetensors' `save_file`."""
    from safetensors.torch import save_file

    tensors = filled_tensors(job)
    files = split_into_files(_specs(job.parts), NUM_FILES)

    def save(folder: Path) -> None:
        whole = {}
        for name, tensor in tensors.items():
            full = tensor.full_tensor()
            if dist.get_rank() == 0:
                whole[name] = full
        if dist.get_rank() == 0:
            folder.mkdir()
            for file, names in files.items():
                save_file({name: whole[name] for name in names}, folder / file, {"format": "pt"})
            write_index(folder, files)

    return save


def torch_dcp(job: Job) -> Save:
    """Torch's distributed checkpoint with its Hugging Face writer and consolidation."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

    tensors = filled_tensors(job)
    files = split_into_files(_specs(job.parts), NUM_FILES)
    numbers = {name: at for at, names in enumerate(files.values(), start=1) for name in names}

    def save(folder: Path) -> None:
        writer = HuggingFaceStorageWriter(
            str(folder),
            fqn_to_index_mapping=numbers,
            save_distributed=True,
            enable_consolidation=True,
            thread_count_consolidation=2,
        )
        save_distributed(dict(tensors), storage_writer=writer)

    return save


def transformers_gather(job: Job) -> Save:
    """Transformers' `save_pretrained` of a model under its own TP plan."""
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job.folder,
        dtype=torch.bfloat16,
        distributed_config=DistributedConfig(tp_plan="auto", tp_size=job.mesh.size()),
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # memory of its own, not a mapping of the source
    return lambda folder: model.save_pretrained(folder, max_shard_size=_file_bytes(job.parts))


SAVERS: dict[str, Saver] = {
    "limit": limit,
    "shardferry": shardferry,
    "gather": gather,
    "torch_dcp": torch_dcp,
    "transformers": transformers_gather,
}


def _make_files(folder: Path, parts: Mapping[str, Part]) -> dict[str, tuple[str, int]]:
    """Make the files with their headers and space; return every tensor's file and offset."""
    folder.mkdir()
    places = {}
    files = split_into_files(_specs(parts), NUM_FILES)
    for file, names in files.items():
        head = header({name: _specs(parts)[name] for name in names})
        start = len(head)
        for name in names:
            places[name] = (file, start)
            start += parts[name].stored.num_bytes
        with (folder / file).open("wb") as out:
            os.posix_fallocate(out.fileno(), 0, start)
            out.write(head)
    write_index(folder, files)
    return places


def _specs(parts: Mapping[str, Part]) -> dict[str, TensorSpec]:
    return {name: TensorSpec("BF16", part.stored.shape) for name, part in parts.items()}


def _file_bytes(parts: Mapping[str, Part]) -> int:
    return -(-sum(part.stored.num_bytes for part in parts.values()) // NUM_FILES) + (1 << 20)


def _ignore(_: object) -> None:
    pass


def _write(descriptor: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], start + done)
