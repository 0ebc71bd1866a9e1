"""Casting bytes of one floating dtype to another, as torch casts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardferry.torch.dtypes import torch_dtype

if TYPE_CHECKING:
    from shardferry.storage.base import Bytes


def cast_bytes(source: Bytes, source_dtype: str, out: Bytes, dtype: str) -> None:
    """Cast the elements in `source` to `dtype`, into `out`.

    Args:
        source: Bytes of elements of `source_dtype`.
        source_dtype: safetensors name of a floating dtype.
        out: Filled with as many elements of `dtype`.
        dtype: safetensors name of a floating dtype.
    """
    target = torch.from_numpy(out).view(torch_dtype(dtype))
    target.copy_(torch.from_numpy(source).view(torch_dtype(source_dtype)))
