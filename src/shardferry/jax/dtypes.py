"""JAX dtypes and their names in safetensors files."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
from jax import numpy as jnp

from shardferry.errors import InvalidInputError
from shardferry.format.dtypes import BITS

# What both can hold. Files pack F4, two elements in a byte; a JAX array keeps each in a byte of its own on the host.
# F6 has no dtype that JAX can put on a device, and files have none for JAX's 2- and 4-bit integers.
_DTYPES: dict[str, np.dtype] = {
    name: np.dtype(scalar)
    for name, scalar in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "I16": np.int16,
        "U16": np.uint16,
        "I32": np.int32,
        "U32": np.uint32,
        "I64": np.int64,
        "U64": np.uint64,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F32": np.float32,
        "F64": np.float64,
        "C64": np.complex64,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F4": ml_dtypes.float4_e2m1fn,
    }.items()
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# An element's bits as JAX never changes them: XLA on the CPU quiets NaNs of several float types when it moves them.
_CARRIERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def dtype_name(dtype: object, tensor_name: str) -> str:
    """Return the safetensors name of a JAX dtype.

    Raises:
        InvalidInputError: If files cannot hold it; names the tensor.
    """
    name = None if jnp.issubdtype(dtype, jax.dtypes.extended) else _NAMES.get(np.dtype(dtype))  # type: ignore[arg-type,call-overload]
    if name is None:
        raise InvalidInputError(f"{tensor_name}: safetensors files cannot hold {dtype}, or JAX cannot hold it in them")
    return name


def refuse_truncated(name: str, tensor_name: str) -> None:
    """Raise `InvalidInputError` if JAX would make less of a dtype, given by its safetensors name; names the tensor."""
    dtype = _DTYPES[name]
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise InvalidInputError(
            f"{tensor_name}: JAX would silently truncate {dtype} to 32 bits, because jax_enable_x64 is off. Turn it "
            'on, or ask for a 32-bit dtype, which integers are cast to with cast="integers" only'
        )


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of a safetensors name that some array has or can be cast from."""
    return _DTYPES[name]


def carrier_dtype(name: str) -> np.dtype:
    """Return the unsigned integer dtype as wide as an element in host memory."""
    return np.dtype(_CARRIERS[_DTYPES[name].itemsize])


def is_packed(name: str) -> bool:
    """Return whether files hold several elements in a byte."""
    return BITS[name] != 8 * _DTYPES[name].itemsize
