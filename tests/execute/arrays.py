"""A load into NumPy arrays: the smallest adapter there is, to test loads without a framework or processes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

from shardferry.execute.job import Request, run_load
from shardferry.execute.memory import place_of
from shardferry.execute.save_job import SaveRequest, run_save
from shardferry.plan.match import Rules
from shardferry.plan.target import Layout, Target
from shardferry.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from shardferry.execute.meter import Meter
    from shardferry.execute.report import LoadReport, SaveReport
    from shardferry.plan.load import Copy, LoadPlan
    from shardferry.plan.save import Write
    from shardferry.transport.base import Group

    from .movers import QueueMover, Wires

DTYPES = {"F32": np.float32, "I64": np.int64, "F16": np.float16}


class ArrayDestination:
    """A NumPy array, read into directly where it can be."""

    def __init__(self, array: np.ndarray, dtype: str, *, stage: bool) -> None:
        self.array, self._dtype, self._stage = array, dtype, stage

    def direct(self, copy: Copy) -> np.ndarray | None:
        whole = tuple(stop - start for start, stop in copy.target) == self.array.shape
        usable = whole and copy.in_order and copy.dtype == self._dtype and not self._stage
        return self.array.reshape(-1).view(np.uint8) if usable else None

    def store(self, copy: Copy, staged: np.ndarray) -> None:
        source = staged.view(DTYPES[copy.dtype]).reshape(copy.region.shape).transpose(copy.axes)
        place = place_of(self.array.reshape(*self.array.shape, 1).view(np.uint8), copy)
        place.view(self.array.dtype)[..., 0] = source


class ArrayStaging:
    """One buffer; counts how often it was waited for."""

    def __init__(self, num_bytes: int, meter: Meter) -> None:
        self._buffer = np.empty(num_bytes, np.uint8)
        meter.add(num_bytes)
        self.waits = 0

    def memory(self, num_bytes: int) -> np.ndarray:
        return self._buffer[:num_bytes]

    def hold(self, data: np.ndarray) -> np.ndarray:
        return data

    def transfer(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wait(self) -> None:
        self.waits += 1


@dataclass
class ArrayAdapter:
    """Offers targets and fills arrays."""

    targets: Sequence[Target]
    unfilled: Sequence[str] = ()
    stage: bool = False
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    stagings: list[ArrayStaging] = field(default_factory=list)
    committed: bool = False

    def allocate(self, plan: LoadPlan, meter: Meter) -> Mapping[str, ArrayDestination]:  # noqa: ARG002
        dtypes = {target.name: target.dtype for target in self.targets}
        for tensor in plan.tensors:
            self.arrays[tensor.name] = np.full(tensor.local_shape, -1, DTYPES[dtypes[tensor.name]])
        return {name: ArrayDestination(array, dtypes[name], stage=self.stage) for name, array in self.arrays.items()}

    def staging(self, num_bytes: int, meter: Meter) -> Sequence[ArrayStaging]:
        ring = [ArrayStaging(num_bytes, meter) for _ in range(3)]
        self.stagings += ring
        return ring

    def cast_counts(self) -> tuple[int, int]:
        return 0, 0

    def commit(self) -> None:
        self.committed = True


class ArraySource:
    """A NumPy array that is always gathered from."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def direct(self, write: Write) -> np.ndarray | None:  # noqa: ARG002 - as a device tensor
        return None

    def fetch(self, write: Write, out: np.ndarray) -> None:
        picked = self._array
        for dim, held in enumerate(write.local.dims):
            picked = np.take(picked, [at for start, stop in held for at in range(start, stop)], axis=dim)
        out[...] = np.ascontiguousarray(picked.transpose(write.local_order)).reshape(-1).view(np.uint8)


@dataclass
class ArraySaver:
    """Offers arrays to be saved; `wires` are those of all ranks."""

    group: Group
    wires: Wires
    targets: Sequence[Target]
    arrays: Mapping[str, np.ndarray]

    def source(self, name: str) -> ArraySource:
        return ArraySource(self.arrays[name])

    def made_source(self, data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> ArraySource:
        return ArraySource(data.view(DTYPES[dtype]).reshape(shape))

    def content(self, name: str) -> np.ndarray:
        return np.ascontiguousarray(self.arrays[name]).reshape(-1).view(np.uint8)

    def mover(self, check: Callable[[], None]) -> AbstractContextManager[QueueMover]:
        return self.wires.open(self.group.rank, check)

    def write_extras(self, folder: Path) -> None:
        """Write nothing."""


def save_request(path: Path, **changes: object) -> SaveRequest:
    """Return a request for one file with the given fields changed."""
    plain = SaveRequest(
        path=str(path),
        max_shard_bytes=MIB,
        on_existing="refuse",
        dtype=None,
        replicas="trust",
        given_names=(),
        conversions=(),
        metadata={"format": "pt"},
        files_like=None,
        hub_limits=False,
        on_progress=None,
        budget_bytes=64 * MIB,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def save_arrays(group: Group, saver: ArraySaver, wanted: SaveRequest) -> SaveReport:
    """Run a save as an adapter's public door does."""
    with group:
        return run_save(group, saver, wanted)


def target(name: str, shape: tuple[int, ...], local: tuple[int, ...], *layouts: Layout, dtype: str = "F32") -> Target:
    """Return a target of one name."""
    return Target((name,), dtype, shape, local, layouts)


def request(path: Path, **changes: object) -> Request:
    """Return a strict request with the given fields changed."""
    plain = Request(
        path=str(path),
        strict=True,
        checkpoint_strict=True,
        variant=None,
        rules=Rules({}, cast=True, ignorable=lambda _: False),
        given_names=(),
        node_of_rank=None,
        on_progress=None,
        budget_bytes=64 * MIB,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def save(folder: Path, **tensors: np.ndarray) -> Path:
    """Write a checkpoint of one file and return its folder."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(group: Group, adapter: ArrayAdapter, wanted: Request) -> LoadReport:
    """Run a load as an adapter's public door does."""
    with group:
        return run_load(group, adapter, wanted)
