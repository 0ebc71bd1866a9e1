"""Where a tensor's bytes lie in an archive as `torch.save` writes one, which may be a range of a larger file.

It is a zip archive: `data.pkl` says how the tensor lies in its storage, `data/0` is the storage, not compressed. Only
the two ends of the archive are read. Described from torch 2.13 (`torch.serialization`, `torch._utils`).
"""

from __future__ import annotations

import io
import re
import zipfile
from typing import TYPE_CHECKING, NamedTuple

from shardferry.errors import CheckpointError
from shardferry.format.dtypes import tensor_bytes
from shardferry.format.pickled import BadPickleError, Named, Record, read_pickle

if TYPE_CHECKING:
    from shardferry.format.files import Files

# An archive's directory and `data.pkl`; torch writes less than 2 KiB.
MAX_ARCHIVE_BYTES = 64 << 10
# What is read at once from either end of an archive: all that torch writes beside the data.
_WINDOW_BYTES = 4096
# In a zip archive's local header, two lengths of what follows it (APPNOTE.TXT 4.3.7).
_LENGTHS_AT, _LOCAL_HEADER_BYTES = 26, 30

# safetensors' name of each of torch's dtypes of whole bytes.
DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
# The same of the classes of storages; dtypes without one are named in the tensor.
_STORAGES = {
    "Bool": "BOOL",
    "Byte": "U8",
    "Char": "I8",
    "Short": "I16",
    "Int": "I32",
    "Long": "I64",
    "Half": "F16",
    "BFloat16": "BF16",
    "Float": "F32",
    "Double": "F64",
    "ComplexFloat": "C64",
}
_EXPECTED = re.compile(
    r"torch\.(?:\w+Storage|storage\.UntypedStorage|_utils\._rebuild_tensor_v[23])|collections\.OrderedDict"
)


class BadArchiveError(ValueError):
    """The bytes are no tensor that torch has written."""


class Place(NamedTuple):
    """The range of a file that holds an archive: `num_bytes` from `start`."""

    file: str
    start: int
    num_bytes: int


class StoredTensor(NamedTuple):
    """How an archive holds its tensor.

    Attributes:
        dtype: safetensors name of its dtype.
        sizes: Its shape.
        strides: In elements, per dim.
        start: Offset in the file of its first element.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @property
    def in_order(self) -> bool:
        """Whether the elements lie one after the other, row-major."""
        expected = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size > 1 and stride != expected:
                return 0 in self.sizes
            expected *= size
        return True


def read_stored_tensor(files: Files, place: Place) -> StoredTensor:
    """Return what an archive holds; nothing of it is executed.

    Raises:
        BadArchiveError: If it is no tensor in an archive of torch's.
        StorageError: If the file is there but cannot be read.
    """
    try:
        with zipfile.ZipFile(_Window(files, place)) as archive:
            return _read(archive, place)
    except (BadPickleError, zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, ValueError) as error:
        if isinstance(error, BadArchiveError | CheckpointError):
            raise
        raise BadArchiveError(f"is no tensor that torch has written: {error}") from error


def dtype_named(value: object) -> str | None:
    """Return safetensors' name of the dtype that a pickle names; None if it is none of `DTYPES`."""
    return DTYPES.get(value.name.removeprefix("torch.")) if isinstance(value, Named) else None


def as_shape(value: object) -> tuple[int, ...]:
    """Return what a pickle gives as a shape, or as strides.

    Raises:
        BadPickleError: If it is none.
    """
    if isinstance(value, Record) and value.name == "torch.Size" and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, tuple) or any(type(number) is not int or not 0 <= number < 1 << 63 for number in value):
        raise BadPickleError("has something else where a shape is expected")
    return value


def _read(archive: zipfile.ZipFile, place: Place) -> StoredTensor:
    inside = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    head, data = inside.get("data.pkl"), inside.get("data/0")
    if head is None or data is None or head.compress_type or data.compress_type or head.file_size > MAX_ARCHIVE_BYTES:
        raise BadArchiveError("is an archive, but not of one tensor as torch writes it")
    record = read_pickle(archive.read(head), lambda name: bool(_EXPECTED.fullmatch(name)) or _is_dtype(name))
    window = archive.fp
    assert window is not None
    window.seek(data.header_offset + _LENGTHS_AT)
    name_bytes, extra_bytes = (int.from_bytes(window.read(2), "little") for _ in range(2))
    start = data.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    if start + data.file_size > place.num_bytes:
        raise BadArchiveError("ends behind its own archive")
    return _described(record, place.start + start, data.file_size)


def _is_dtype(name: str) -> bool:
    return name.startswith("torch.") and name.removeprefix("torch.") in DTYPES


def _described(record: object, start: int, num_bytes: int) -> StoredTensor:
    """Return the tensor that `data.pkl` describes, whose storage begins at `start`.

    `_rebuild_tensor_v2` is called with storage, offset, size, stride, two more; `_v3` names the dtype after them. A
    storage is kept elsewhere under `("storage", class, key, device, size)`.
    """
    match record:
        case Record(
            name=function,
            arguments=(Record(name="persistent", arguments=(_, kind, *_)), int(offset), sizes, strides, *rest),
        ) if "_rebuild_tensor_" in function:
            dtype = _dtype_of_storage(kind) if function.endswith("_v2") else next(map(dtype_named, rest[2:3]), None)
        case _:
            raise BadArchiveError("is no plain tensor")
    shape, steps = as_shape(sizes), as_shape(strides)
    if dtype is None or offset < 0 or len(shape) != len(steps):
        raise BadArchiveError("is no plain tensor of a dtype that a safetensors file can hold")
    first = tensor_bytes(dtype, (offset,))
    if first + tensor_bytes(dtype, shape) > num_bytes:
        raise BadArchiveError(f"needs more than the {num_bytes} bytes of its storage")
    return StoredTensor(dtype, shape, steps, start + first)


def _dtype_of_storage(kind: object) -> str | None:
    return _STORAGES.get(kind.name.removeprefix("torch.").removesuffix("Storage")) if isinstance(kind, Named) else None


class _Window(io.RawIOBase):
    """The range of a file that holds an archive, to be read at its two ends; no more than a bound altogether."""

    def __init__(self, files: Files, place: Place) -> None:
        self._files = files
        self._place = place
        self._position = 0
        self._kept: list[tuple[int, bytes]] = []
        self._taken = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, offset + (0, self._position, self._place.num_bytes)[whence])
        return self._position

    def read(self, size: int = -1) -> bytes:
        start = min(self._position, self._place.num_bytes)
        stop = self._place.num_bytes if size < 0 else min(self._place.num_bytes, start + size)
        data = self._fetch(start, stop)
        self._position = start + len(data)
        return data

    def _fetch(self, start: int, stop: int) -> bytes:
        for at, kept in self._kept:
            if at <= start and stop <= at + len(kept):
                return kept[start - at : stop - at]
        first = max(0, min(start, self._place.num_bytes - _WINDOW_BYTES))
        last = min(self._place.num_bytes, max(stop, first + _WINDOW_BYTES))
        self._taken += last - first
        if self._taken > MAX_ARCHIVE_BYTES:
            raise ValueError("its directory is larger than torch writes one")
        self._kept.append(
            (first, self._files.read(self._place.file, self._place.start + first, self._place.start + last))
        )
        return self._fetch(start, stop)
