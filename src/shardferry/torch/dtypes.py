"""torch dtypes and their names in safetensors files."""

from __future__ import annotations

import torch

from shardferry.errors import InvalidInputError

# As the safetensors package maps them; F6 has no torch dtype.
_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "F4",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype, tensor_name: str) -> str:
    """Return the safetensors name of a torch dtype.

    Raises:
        InvalidInputError: If files cannot hold it; names the tensor.
    """
    if dtype not in _NAMES:
        message = f"{tensor_name}: safetensors files cannot hold {dtype}"
        raise InvalidInputError(message)
    return _NAMES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a safetensors name that some tensor of the model already has or can be cast from."""
    return _DTYPES[name]


def can_be_traced(name: str) -> bool:
    """Return whether torch has a dtype of this safetensors name with one element per item."""
    return name in _DTYPES and elements_per_item(_DTYPES[name]) == 1


def elements_per_item(dtype: torch.dtype) -> int:
    """Return how many elements, as files count them, one torch element holds: 2 for packed float4, else 1."""
    return 2 if dtype is torch.float4_e2m1fn_x2 else 1
