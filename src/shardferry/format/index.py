"""The parsed index of a checkpoint: which tensor lies where, as plain frozen data.

One rank parses and validates, the others get the result as bytes. The index says nothing about how files are read.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import NamedTuple

from shardferry.collector import paused_collector
from shardferry.format.dtypes import tensor_bytes

# Level 1: the names compress 10x already, and higher levels cost more than the bytes they save.
_ZLIB_LEVEL = 1


class Part(NamedTuple):
    """One stored box of a tensor that lies in several files.

    Attributes:
        file: Name relative to the checkpoint's root.
        span: Bytes [start, stop) of the file.
        offsets: Where the box begins in the tensor, in elements per dim.
        shape: Shape of the box, in elements per dim; its bytes are row-major.
    """

    file: str
    span: tuple[int, int]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class TensorInfo(NamedTuple):
    """Where a tensor lies and what it is.

    Attributes:
        dtype: The format's name of the dtype, e.g. `"BF16"`.
        shape: Shape of the whole tensor in elements; sub-byte dtypes count elements too.
        file: Name relative to the checkpoint's root; of the first part if there are parts.
        span: Bytes [start, stop) of the file, counted from its first byte; of the first part if there are parts.
        parts: Empty for a tensor stored in one piece, else all its boxes, disjoint and covering it, by offsets.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str
    span: tuple[int, int]
    parts: tuple[Part, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor, all parts together."""
        return tensor_bytes(self.dtype, self.shape)

    @property
    def files(self) -> frozenset[str]:
        """Names of all files it lies in."""
        return frozenset(part.file for part in self.parts) or frozenset((self.file,))


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What identifies a file's header.

    Attributes:
        size: Size of the file in bytes.
        header_bytes: Length of the header, its 8-byte length field included: where the data begins.
        header_sha256: Hex digest of these bytes.
        version: What the place it is in calls this content, as the ETag of an object; empty where there is no such.
    """

    size: int
    header_bytes: int
    header_sha256: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """All tensors and files of a checkpoint.

    Attributes:
        root: The folder that file names are relative to.
        tensors: By name; files in order of their names, tensors in order of their bytes.
        files: Every file that was read, by name.
        metadata: The `__metadata__` of all files merged; where files differ the first file's value counts.
        warnings: What is odd about the checkpoint, a sentence each.
    """

    root: str
    tensors: dict[str, TensorInfo]
    files: dict[str, FileInfo]
    metadata: dict[str, str]
    warnings: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, without headers."""
        return sum(info.num_bytes for info in self.tensors.values())

    def to_bytes(self) -> bytes:
        """Return a compact form of the whole index, for `from_bytes` on another rank."""
        number = {file: i for i, file in enumerate(self.files)}
        kinds: dict[tuple[str, tuple[int, ...]], int] = {}
        infos = self.tensors.values()
        columns = {
            "root": self.root,
            "files": [[name, f.size, f.header_bytes, f.header_sha256, f.version] for name, f in self.files.items()],
            "metadata": self.metadata,
            "warnings": self.warnings,
            "names": list(self.tensors),
            "tensor_kinds": [kinds.setdefault((info.dtype, info.shape), len(kinds)) for info in infos],
            "tensor_files": [number[info.file] for info in infos],
            "starts": [info.span[0] for info in infos],
            "stops": [info.span[1] for info in infos],
            "parts": {
                name: [[number[p.file], p.span, p.offsets, p.shape] for p in info.parts]
                for name, info in self.tensors.items()
                if info.parts
            },
            "kinds": list(kinds),  # a model has tens of (dtype, shape); columns of plain integers parse fastest
        }
        return zlib.compress(json.dumps(columns, separators=(",", ":")).encode(), _ZLIB_LEVEL)

    @classmethod
    @paused_collector()
    def from_bytes(cls, packed: bytes) -> CheckpointIndex:
        """Return the index that `to_bytes` packed; for bytes of another rank of the job, not for untrusted ones."""
        columns = json.loads(zlib.decompress(packed))
        files = {name: FileInfo(*info) for name, *info in columns["files"]}
        file_names = list(files)
        parts = {
            name: tuple(
                Part(file_names[file], (start, stop), tuple(offsets), tuple(shape))
                for file, (start, stop), offsets, shape in boxes
            )
            for name, boxes in columns["parts"].items()
        }
        kinds = [(dtype, tuple(shape)) for dtype, shape in columns["kinds"]]
        keys = ("names", "tensor_kinds", "tensor_files", "starts", "stops")
        rows = zip(*(columns[key] for key in keys), strict=True)
        tensors = {
            name: TensorInfo(kinds[kind][0], kinds[kind][1], file_names[file], (start, stop), parts.get(name, ()))
            for name, kind, file, start, stop in rows
        }
        return cls(columns["root"], tensors, files, columns["metadata"], tuple(columns["warnings"]))
