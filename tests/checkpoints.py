"""Small checkpoints made byte by byte, well-formed or broken in one chosen way, with no library that would refuse."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from shardferry.format.dtypes import BITS, ORDER, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from shardferry.format.index import CheckpointIndex, TensorInfo

Entry: TypeAlias = dict[str, object]

INDEX = "model.safetensors.index.json"


class Tensor(NamedTuple):
    """A tensor to store: its bytes are row-major and little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def tensor(name: str, dtype: str, shape: tuple[int, ...], *, seed: int = 0) -> Tensor:
    """Return a tensor of reproducible random bytes, so that a byte read from the wrong place shows."""
    source = random.Random(f"{name}/{dtype}/{shape}/{seed}")  # noqa: S311 - reproducible on purpose
    return Tensor(name, dtype, shape, source.randbytes(tensor_bytes(dtype, shape)))


def entry(dtype: object, shape: object, start: object, stop: object) -> Entry:
    """Return a header's entry, with whatever values it is given."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def raw_file(header: Mapping[str, object] | str | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a file with this header, as JSON if it is a mapping, and a length field that may lie."""
    if isinstance(header, str | bytes):
        text = header.encode() if isinstance(header, str) else header
    else:
        text = json.dumps(header, ensure_ascii=False).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def file_of(tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a correct file of these tensors, in the order the format's writer uses."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for one in sorted(tensors, key=lambda t: (-ORDER.index(t.dtype), t.name)):
        header[one.name] = entry(one.dtype, list(one.shape), len(data), len(data) + len(one.data))
        data += one.data
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return raw_file(text + b" " * (-len(text) % 8), data)


def index_of(weight_map: Mapping[str, object], **metadata: object) -> bytes:
    """Return an index file that promises this."""
    return json.dumps({"metadata": metadata, "weight_map": weight_map}).encode()


def sharded(files: Mapping[str, Iterable[Tensor]]) -> dict[str, bytes]:
    """Return the files of a correct sharded checkpoint, its index included."""
    contents = {name: file_of(tensors, {"format": "pt"}) for name, tensors in files.items()}
    placed = {one.name: name for name, tensors in files.items() for one in tensors}
    total = sum(len(one.data) for tensors in files.values() for one in tensors)
    return contents | {INDEX: index_of(placed, total_size=total)}


def rank_file(*boxes: tuple[Tensor, tuple[int, ...]]) -> bytes:
    """Return the file in which PyTorch's writer puts the boxes of one rank: each with where it begins."""
    info = {box.name: {"saved_offsets": list(offsets)} for box, offsets in boxes}
    return file_of((box for box, _ in boxes), {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0"})


def write_files(folder: Path, contents: Mapping[str, bytes]) -> Path:
    """Write files, in sub-folders where their names say so, and return the folder."""
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def stored(index: CheckpointIndex, contents: Mapping[str, bytes]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of every tensor that an index finds in these files."""
    return {name: (info.dtype, info.shape, _bytes_of(info, contents)) for name, info in index.tensors.items()}


def expected(tensors: Iterable[Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return what `stored` must give for these tensors."""
    return {one.name: (one.dtype, one.shape, one.data) for one in tensors}


def _bytes_of(info: TensorInfo, contents: Mapping[str, bytes]) -> bytes:
    if not info.parts:
        return contents[info.file][slice(*info.span)]
    item = BITS[info.dtype] // 8
    whole = bytearray(info.num_bytes)
    for part in info.parts:  # of two dims: a box is copied row by row
        rows, columns = part.shape
        for row in range(rows):
            source = part.span[0] + row * columns * item
            target = ((part.offsets[0] + row) * info.shape[1] + part.offsets[1]) * item
            whole[target : target + columns * item] = contents[part.file][source : source + columns * item]
    return bytes(whole)
