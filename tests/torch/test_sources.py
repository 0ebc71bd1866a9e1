"""Tests of shardferry.torch.sources."""

from __future__ import annotations

import pytest
import torch

from shardferry.torch.sources import digest_view


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(1000.0).reshape(10, 100).t(),
        torch.arange(2000.0)[::2],
        torch.complex(torch.arange(500.0), torch.arange(500.0)).conj(),
    ],
    ids=["transposed", "strided", "conjugated"],
)
def test_the_bytes_to_hash_outlive_the_copy_they_are_of(tensor: torch.Tensor) -> None:
    data = digest_view(tensor)
    others = [torch.full((1000,), -1.0) for _ in range(16)]  # they take memory that was given back
    assert data.tobytes() == tensor.resolve_conj().contiguous().numpy().tobytes()
    assert len(others) == 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.uint64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_a_dense_tensor_is_hashed_where_it_lies(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    data = digest_view(tensor)
    assert data.nbytes == tensor.numel() * tensor.element_size()
    assert not tensor.numel() or data.ctypes.data == tensor.data_ptr()
