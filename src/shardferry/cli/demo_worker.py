"""The program that `shardferry demo` starts on every process: loads a real model sharded, and compares.

Run by `torchrun` and never imported by the command line, so it is the one file outside the torch adapter that
imports torch. It loads the same sentence-embedding model once per layout and loader, computes an embedding with
it, and compares that with what transformers computes on one process. Rank 0 writes one JSON object per line to
standard output: `{"step": ...}` before each step and one `{"result": ...}` at the end.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModel, AutoTokenizer

import shardferry.torch
import shardferry.torch.transformers

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardferry.cli.demo_result import DemoResult, LoadResult

SENTENCES = (
    "A ferry carries cars across the river.",
    "Boats move vehicles over the water.",
    "The cake needs two eggs and some sugar.",
)
# float32 sums in another order differ by about 1e-7; one wrong row differs by about 1e-2.
TOLERANCE = 1e-5
# The first load of a process pays for lazy imports: the second is what a user's job sees.
REPEATS = 2
SAMPLE_SECONDS = 0.002


class Layout(NamedTuple):
    """A way to shard the model over the processes."""

    name: str
    shard: Callable[[torch.nn.Module], None]


class Loader(NamedTuple):
    """A way to get a sharded model from a path; returns it with the bytes this rank read."""

    name: str
    load: Callable[[str, Layout], tuple[torch.nn.Module, int]]


class Task(NamedTuple):
    """What every load is tried on: the model's path, the tokenized sentences, and the embedding to expect."""

    path: str
    inputs: dict[str, torch.Tensor]
    reference: torch.Tensor


class Measured(NamedTuple):
    """What one rank saw of one load."""

    bytes_read: int
    seconds: float
    peak_memory_bytes: int
    max_difference: float
    min_cosine: float


class PeakMemory:
    """Samples how far this process's private memory grows above where it started.

    Resident anonymous memory: pages of a mapped file are shared by all processes and are not counted.
    """

    def __enter__(self) -> Self:
        gc.collect()
        # Memory the allocator kept from the previous load would hide growth.
        ctypes.CDLL(None).malloc_trim(0)
        self._start = self._peak = _private_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._peak = max(self._peak, _private_bytes())

    @property
    def growth_bytes(self) -> int:
        """Highest sample above the first one."""
        return self._peak - self._start

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._peak = max(self._peak, _private_bytes())


def main(path: str) -> None:
    """Run every layout with every loader on the model at `path`; collective."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    try:
        _announce("transformers, one process")
        inputs = dict(AutoTokenizer.from_pretrained(path)(list(SENTENCES), padding=True, return_tensors="pt"))
        task = Task(path, inputs, _reference(path, inputs))
        loads = [
            _compare(layout, loader, task=task)
            for layout in _layouts()
            for loader in (Loader("shardferry", _load_own_part), Loader("everything", _load_everything))
        ]
        result: DemoResult = {
            "file_bytes": Path(path, "model.safetensors").stat().st_size,
            "processes": dist.get_world_size(),
            "sentences": list(SENTENCES),
            "similarity": (task.reference @ task.reference.T).tolist(),
            "tolerance": TOLERANCE,
            "loads": loads,
        }
        _write({"result": result})
    finally:
        dist.destroy_process_group()


def _layouts() -> tuple[Layout, ...]:
    world_size = dist.get_world_size()
    fsdp = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    tp = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    both = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("fsdp", "tp"))

    def shard_both(model: torch.nn.Module) -> None:
        _shard_tp(model, both["tp"])
        _shard_fsdp(model, both["fsdp"])

    return (
        Layout("FSDP2", lambda model: _shard_fsdp(model, fsdp)),
        Layout("TP", lambda model: _shard_tp(model, tp)),
        Layout("FSDP2 over TP", shard_both),
    )


def _shard_fsdp(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.get_submodule("encoder.layer").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _shard_tp(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Shard like Megatron; transformers has no plan for BERT.

    The word embedding is cut by rows too: its 30,522 rows do not divide by four.
    """
    plan: dict[str, ParallelStyle] = {
        "embeddings.word_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "encoder.layer.*.attention.self.query": ColwiseParallel(),
        "encoder.layer.*.attention.self.key": ColwiseParallel(),
        "encoder.layer.*.attention.self.value": ColwiseParallel(),
        "encoder.layer.*.attention.output.dense": RowwiseParallel(),
        "encoder.layer.*.intermediate.dense": ColwiseParallel(),
        "encoder.layer.*.output.dense": RowwiseParallel(),
    }
    parallelize_module(model, mesh, plan)


def _load_own_part(path: str, layout: Layout) -> tuple[torch.nn.Module, int]:
    model = _model_on_meta(path)
    layout.shard(model)
    shardferry.torch.transformers.initialize_buffers(model)
    report = shardferry.torch.load_model(model, path)
    return model, report.ranks[dist.get_rank()].bytes_read


def _load_everything(path: str, layout: Layout) -> tuple[torch.nn.Module, int]:
    """What is written without a library: every process fills a whole model, then keeps its part of it."""
    file = Path(path, "model.safetensors")
    model = _model_on_meta(path)
    shardferry.torch.transformers.initialize_buffers(model)
    # Cloned, because safetensors returns views of the mapped file, of which nothing has been read.
    state_dict = {name: tensor.clone() for name, tensor in load_file(file).items()}
    # Not strict: the file holds `embeddings.position_ids`, which the model does not save any more.
    model.load_state_dict(state_dict, strict=False, assign=True)
    layout.shard(model)
    return model, file.stat().st_size


def _model_on_meta(path: str) -> transformers.PreTrainedModel:
    with torch.device("meta"):
        model: transformers.PreTrainedModel = AutoModel.from_config(AutoConfig.from_pretrained(path))
    return model


def _compare(layout: Layout, loader: Loader, *, task: Task) -> LoadResult:
    """Load `REPEATS` times, and return all ranks' best time, highest memory and worst difference."""
    _announce(f"{layout.name}: {loader.name}")
    runs = [_load_once(layout, loader, task=task) for _ in range(REPEATS)]
    mine = Measured(
        bytes_read=runs[-1].bytes_read,
        seconds=min(run.seconds for run in runs),
        peak_memory_bytes=max(run.peak_memory_bytes for run in runs),
        max_difference=max(run.max_difference for run in runs),
        min_cosine=min(run.min_cosine for run in runs),
    )
    ranks: list[Measured] = [mine] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return {
        "layout": layout.name,
        "loader": loader.name,
        "bytes_read": [rank.bytes_read for rank in ranks],
        "seconds": max(rank.seconds for rank in ranks),
        "peak_memory_bytes": [rank.peak_memory_bytes for rank in ranks],
        "max_difference": max(rank.max_difference for rank in ranks),
        "min_cosine": min(rank.min_cosine for rank in ranks),
    }


def _load_once(layout: Layout, loader: Loader, *, task: Task) -> Measured:
    dist.barrier()
    with PeakMemory() as memory:
        start = time.perf_counter()
        model, bytes_read = loader.load(task.path, layout)
        seconds = time.perf_counter() - start
    embedding = _embed(model, task.inputs)
    return Measured(
        bytes_read=bytes_read,
        seconds=seconds,
        peak_memory_bytes=memory.growth_bytes,
        max_difference=(embedding - task.reference).abs().max().item(),
        min_cosine=(embedding * task.reference).sum(dim=1).min().item(),
    )


def _reference(path: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What transformers computes from the whole model, on rank 0, given to all ranks."""
    model = AutoModel.from_pretrained(path) if dist.get_rank() == 0 else None
    hidden_size = AutoConfig.from_pretrained(path).hidden_size
    embedding = _embed(model, inputs) if model is not None else torch.empty(len(SENTENCES), hidden_size)
    dist.broadcast(embedding, src=0)
    return embedding


def _embed(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model card's sentence embedding: the mean over a sentence's tokens, at unit length."""
    with torch.no_grad():
        hidden = model.eval()(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
    return torch.nn.functional.normalize(mean, dim=1)


def _private_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon line: this demo measures memory on Linux only")


def _announce(step: str) -> None:
    _write({"step": step})


def _write(message: dict[str, str | DemoResult]) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stderr.flush()
    # Everything is written. A thread of a library that still runs can abort a process that ends in the usual way.
    os._exit(0)
