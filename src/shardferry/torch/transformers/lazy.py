"""A state dict whose tensors are read when, and as far as, they are asked for: for transformers' own loader.

state = lazy_state_dict("/ckpt", model=meta_model)
model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state, distributed_config=...)

transformers asks for the parts its own plans give each rank. With `model=`, tensors have the model's names and shapes
already, so that a part of them is the right one: transformers itself cuts what is stored, and converts afterwards.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import torch

from shardferry.convert.table import to_model
from shardferry.convert.tensor import stored_tensors
from shardferry.errors import InvalidInputError
from shardferry.execute.gather import Part, gather
from shardferry.execute.open import open_checkpoint
from shardferry.format.dtypes import BITS
from shardferry.geometry.region import Region
from shardferry.torch.dtypes import can_be_traced, torch_dtype
from shardferry.torch.transformers.family import family_conversions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import EllipsisType

    from torch import nn

    from shardferry.convert.tensor import Tensor
    from shardferry.format.index import CheckpointIndex
    from shardferry.geometry.region import Intervals

    Index = int | slice | EllipsisType


class LazyTensor:
    """A tensor of a checkpoint, in place of one in memory.

    Attributes:
        shape: Of the whole.
        dtype: As stored.
    """

    def __init__(self, index: CheckpointIndex, tensor: Tensor) -> None:
        """Take a tensor, as stored or made of stored ones."""
        if not can_be_traced(tensor.dtype):
            raise InvalidInputError(f"{tensor.name}: torch has no tensor of {tensor.dtype} that could be cut")
        self._index = index
        self._tensor = tensor
        self.shape = torch.Size(tensor.shape)
        self.dtype = torch_dtype(tensor.dtype)

    def get_shape(self) -> list[int]:
        """Return the shape, as a slice of the safetensors package does."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype."""
        return self._tensor.dtype

    def is_floating_point(self) -> bool:
        """Return whether its elements are floats."""
        return self.dtype.is_floating_point

    def __getitem__(self, key: Index | tuple[Index, ...]) -> torch.Tensor:
        """Read a part: whole numbers, slices of step 1, and `...`."""
        dims: list[Intervals] = []
        kept: list[int] = []
        for size, at in zip(self.shape, self._expanded(key), strict=True):
            start, stop = _interval(at, size, self._tensor.name)
            dims.append(((start, stop),) if start < stop else ())
            if isinstance(at, slice):
                kept.append(stop - start)
        region = Region(tuple(dims))
        out = torch.empty(math.prod(region.shape) * BITS[self._tensor.dtype] // 8, dtype=torch.uint8)
        gather(self._index, {self._tensor.name: Part(self._tensor, region, out.numpy())})
        return out.view(self.dtype).reshape(kept)

    def _expanded(self, key: Index | tuple[Index, ...]) -> Iterator[int | slice]:
        """Yield what is asked for of every dim."""
        keys = key if isinstance(key, tuple) else (key,)
        missing = len(self.shape) - sum(one is not Ellipsis for one in keys)
        if missing < 0 or keys.count(Ellipsis) > 1:
            raise InvalidInputError(f"{self._tensor.name} of shape {list(self.shape)} has no part {key}")
        for one in keys if Ellipsis in keys else (*keys, Ellipsis):
            if isinstance(one, int | slice):
                yield one
            else:
                yield from [slice(None)] * missing


def lazy_state_dict(
    path: str | os.PathLike[str], *, model: nn.Module | None = None, checkpoint_strict: bool = True
) -> dict[str, LazyTensor]:
    """Return a checkpoint's tensors, none of which has been read.

    Args:
        path: A safetensors file, an index file, or a directory that holds a checkpoint.
        model: A model of transformers, e.g. on the meta device, into whose names and shapes the tensors are brought.
        checkpoint_strict: Whether the rules of files and index are applied in full.

    Raises:
        CheckpointError: If the checkpoint breaks a rule of the format.
        InvalidInputError: If the family's conversions do not fit it.
    """
    index = open_checkpoint(os.fspath(path), strict=checkpoint_strict)
    tensors = stored_tensors(index.tensors)
    if model is not None:
        tensors = to_model(tensors, family_conversions(model)).tensors
    return {name: LazyTensor(index, tensor) for name, tensor in tensors.items()}


def _interval(at: int | slice, size: int, name: str) -> tuple[int, int]:
    if isinstance(at, int):
        if not -size <= at < size:
            raise InvalidInputError(f"{name} has no index {at} in a dim of {size}")
        return at % size, at % size + 1
    start, stop, step = at.indices(size)
    if step != 1:
        raise InvalidInputError(f"{name}: a part with steps of {step} cannot be read")
    return start, max(start, stop)
