"""The memory of local tensors as a place that bytes are read into."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardferry.format.dtypes import BITS
from shardferry.geometry.spans import flat_span
from shardferry.torch.casting import became_infinite, fits, put_values
from shardferry.torch.dtypes import elements_per_item, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardferry.convert.values import Values
    from shardferry.execute.meter import Meter
    from shardferry.plan.load import Copy
    from shardferry.storage.base import Bytes

# Reads into one buffer while the last is on its way to the device, and one is spare.
RING_SIZE = 3


class TensorDestination:
    """One local tensor; a dense CPU tensor is read into directly, any other is copied into from staging memory."""

    def __init__(self, local: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> None:
        """Fill `local`, whose dtype is `dtype` in safetensors words and whose shape in file elements is `shape`."""
        self.was_cast = False
        self._local = local
        self._dtype = dtype
        self._shape = shape
        self._overflowed: list[torch.Tensor] = []
        dense = local.device.type == "cpu" and local.is_contiguous() and not local.is_conj() and not local.is_neg()
        self._memory = memory_of(local) if dense and local.numel() else None

    @property
    def num_overflowed(self) -> int:
        """Finite values that became infinite when they were cast."""
        return sum(int(count) for count in self._overflowed)

    def direct(self, copy: Copy) -> Bytes | None:
        """Return the contiguous memory into which `copy` can be read as it is stored, or None."""
        if self._memory is None or copy.dtype != self._dtype or not copy.in_order:
            return None
        span = flat_span(copy.target, self._shape, BITS[copy.dtype])
        return None if span is None else self._memory[slice(*span)]

    def store(self, copy: Copy, staged: Bytes) -> None:
        """Take what `copy` read, in the order of its region, out of staging memory, casting it if need be."""
        # A thread's own mode: a tensor made in inference mode can be changed in that mode only.
        with torch.inference_mode(self._local.is_inference()):
            self._store(copy, staged)

    def take(self, copy: Copy, values: Values) -> bool:
        """Take computed values if their place, on a CPU, is a table; return False if its dims do not make two."""
        if self._memory is None:
            return False
        target = _place_of(self._local, copy, 1).permute(np.argsort(copy.axes).tolist())
        try:
            table = target.view(values.shape)
        except RuntimeError:  # their dims cannot be made two without a copy
            return False
        if table.dtype != torch_dtype(copy.dtype):
            self.was_cast = True
        with torch.inference_mode(self._local.is_inference()):
            self._overflowed += put_values(table, values, torch_dtype(copy.dtype))
        return True

    def _store(self, copy: Copy, staged: Bytes) -> None:
        dtype = torch_dtype(copy.dtype)
        stored = torch.from_numpy(staged).view(dtype)
        source = stored.reshape(_items(copy.region.shape, dtype)).permute(copy.axes)
        target = _place_of(self._local, copy, elements_per_item(dtype))
        if target.element_size() == source.element_size() and dtype == target.dtype:
            target.copy_(source, non_blocking=True)
            return
        self.was_cast = True
        target.copy_(source, non_blocking=True)
        if not fits(stored, target.dtype):
            self._overflowed.append(became_infinite(source, target))


class HostStaging:
    """Staging for tensors in host memory: the copy out of it is done when `store` returns."""

    def __init__(self, num_bytes: int, meter: Meter) -> None:
        """Hold one buffer of `num_bytes`."""
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        meter.add(num_bytes)

    def memory(self, num_bytes: int) -> Bytes:
        """Return `num_bytes` of the buffer."""
        return self._buffer[:num_bytes].numpy()

    def hold(self, data: Bytes) -> Bytes:
        """Return `data`: it is copied out of at once."""
        return data

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Give a context that adds nothing."""
        yield

    def wait(self) -> None:
        """Return at once."""


class PinnedStaging:
    """Staging for tensors on a device: page-locked, emptied by copies on a stream of its own."""

    def __init__(self, num_bytes: int, meter: Meter, stream: torch.Stream) -> None:
        """Hold one page-locked buffer of `num_bytes`, emptied on `stream`."""
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._stream = stream
        self._event = torch.Event(stream.device)
        meter.add(num_bytes)

    def memory(self, num_bytes: int) -> Bytes:
        """Return `num_bytes` of the buffer, once the last copy out of it has finished."""
        self.wait()
        return self._buffer[:num_bytes].numpy()

    def hold(self, data: Bytes) -> Bytes:
        """Return a copy of `data` in the buffer, once the last copy out of it has finished."""
        memory = self.memory(len(data))
        memory[...] = data
        return memory

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Give a context whose copies run on the stream while the next read goes on."""
        with self._stream:
            yield
        self._event.record(self._stream)

    def wait(self) -> None:
        """Wait until the copies out of the buffer have finished."""
        self._event.synchronize()


def make_staging(device: torch.device, num_bytes: int, meter: Meter) -> list[HostStaging] | list[PinnedStaging]:
    """Return the staging ring of one reading thread for tensors on `device`."""
    if device.type == "cpu":
        return [HostStaging(num_bytes, meter)]
    stream = torch.Stream(device)
    # The memory to fill may still be in use by kernels that were queued before it was handed out.
    stream.wait_stream(torch.accelerator.current_stream(device))
    return [PinnedStaging(num_bytes, meter, stream) for _ in range(RING_SIZE)]


def memory_of(tensor: torch.Tensor) -> Bytes:
    """Return a dense CPU tensor's memory; the caller keeps the tensor alive."""
    # Through the address: NumPy knows neither bfloat16 nor the 8-bit floats.
    count = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_uint8 * count).from_address(tensor.data_ptr())
    return np.frombuffer(memoryview(memory), np.uint8)


def _place_of(local: torch.Tensor, copy: Copy, per_item: int) -> torch.Tensor:
    """Return the view of a local tensor that a copy fills, its dims in the order that `axes` gives."""
    if copy.fine:
        strides = [step * local.stride(dim) if step else 0 for dim, step in copy.fine]
        offset = sum(start * stride for (start, _), stride in zip(copy.target, strides, strict=True))
        sizes = [stop - start for start, stop in copy.target]
        return local.as_strided(sizes, strides, local.storage_offset() + offset)
    place = [slice(start, stop) for start, stop in copy.target]
    if per_item > 1:
        place[-1] = slice(copy.target[-1][0] // per_item, copy.target[-1][1] // per_item)
    return local[tuple(place)]


def _items(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Return a shape in file elements as a shape in torch elements."""
    per_item = elements_per_item(dtype)
    return (*shape[:-1], shape[-1] // per_item) if per_item > 1 else shape
