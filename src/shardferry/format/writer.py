"""Where everything lies in a file that is about to be written, header included.

The header is byte for byte what the safetensors crate 0.8 writes for the same tensors: tensors by alignment descending,
then by name; compact JSON with non-ASCII text left as it is; spaces up to a multiple of 8. So offsets are known before
any data is, and whoever holds a part of a tensor can write it. Two things differ on purpose: the crate writes the keys
of the metadata in a random order, here they are sorted; and for metadata without a tensor it writes broken JSON.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from json.encoder import encode_basestring as quote  # escapes exactly what the crate escapes
from typing import TYPE_CHECKING, NamedTuple

from shardferry.errors import InvalidInputError
from shardferry.format.dtypes import BITS, ORDER, tensor_bytes
from shardferry.format.header import LENGTH_BYTES, MAX_HEADER_BYTES, METADATA
from shardferry.format.problem import listed, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

# Complaints in one error message.
_LISTED = 20
_RANK = {dtype: -position for position, dtype in enumerate(ORDER)}
_BITS_PER_BYTE = 8


class TensorSpec(NamedTuple):
    """What a tensor to be written is.

    Attributes:
        dtype: The format's name of the dtype, e.g. `"BF16"`.
        shape: Shape of the whole tensor in elements; sub-byte dtypes count elements too.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in a file."""
        return tensor_bytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A file to be written.

    Attributes:
        name: Name relative to the checkpoint's root.
        header: Its first bytes, up to where the data begins: length field, JSON and padding.
        spans: Bytes [start, stop) of the file by tensor, in file order.
        size: Size of the file in bytes.
    """

    name: str
    header: bytes
    spans: dict[str, tuple[int, int]]
    size: int


def check_tensors(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> None:
    """Check that a file can hold these tensors and this metadata.

    Raises:
        InvalidInputError: Listing every tensor or metadata key that it cannot hold, and why.
    """
    wrong = [f"tensor {_shown(name)}: {why}" for name, spec in tensors.items() if (why := _wrong_tensor(name, spec))]
    wrong += [
        f"metadata {_shown(key)}: {why}" for key, value in metadata.items() if (why := _wrong_metadata(key, value))
    ]
    if wrong:
        more = [f"and {len(wrong) - _LISTED} more"] if len(wrong) > _LISTED else []
        raise InvalidInputError("\n  ".join(["this cannot be saved, nothing was written:", *wrong[:_LISTED], *more]))


def lay_out_file(name: str, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> FileLayout:
    """Return the file that safetensors' own `save_file` would write for these tensors.

    Args:
        name: Name of the file, relative to the checkpoint's root.
        tensors: In any order.
        metadata: Strings for the header, e.g. `{"format": "pt"}`.

    Raises:
        InvalidInputError: If a tensor or the metadata cannot be written, or the header is above the format's cap.

    Examples:
        >>> layout = lay_out_file("a.safetensors", {"w": TensorSpec("F16", (2, 3))}, {"format": "pt"})
        >>> layout.header[8:]
        b'{"__metadata__":{"format":"pt"},"w":{"dtype":"F16","shape":[2,3],"data_offsets":[0,12]}}'
        >>> layout.spans, layout.size
        ({'w': (96, 108)}, 108)
    """
    check_tensors(tensors, metadata)
    entries = [metadata_entry(metadata)]
    ends = [0]
    order = sorted(tensors, key=lambda name: (_RANK[tensors[name].dtype], name))
    for tensor in order:
        start, stop = ends[-1], ends[-1] + tensors[tensor].num_bytes
        entries.append(tensor_entry(tensor, tensors[tensor], start, stop))
        ends.append(stop)
    text = f"{{{','.join(entries)}}}".encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise InvalidInputError(
            f"the header of {shown(name)} would have {len(text)} bytes for {len(tensors)} tensors, above the format's"
            f" cap of {MAX_HEADER_BYTES}: put the tensors into more files or give them shorter names"
        )
    data_start = LENGTH_BYTES + len(text)
    spans = {
        tensor: (data_start + start, data_start + stop)
        for tensor, start, stop in zip(order, ends[:-1], ends[1:], strict=True)
    }
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return FileLayout(name, header, spans, data_start + ends[-1])


def metadata_entry(metadata: Mapping[str, str]) -> str:
    """Return the header's entry for the metadata, without a separator."""
    ordered = dict(sorted(metadata.items()))
    return f'"{METADATA}":' + json.dumps(ordered, ensure_ascii=False, separators=(",", ":"))


def tensor_entry(name: str, spec: TensorSpec, start: int, stop: int) -> str:
    """Return the header's entry for a tensor at bytes [start, stop) of the data, without a separator."""
    shape = ",".join(map(str, spec.shape))
    return f'{quote(name)}:{{"dtype":"{spec.dtype}","shape":[{shape}],"data_offsets":[{start},{stop}]}}'


def _wrong_tensor(name: object, spec: TensorSpec) -> str | None:
    if not isinstance(name, str):
        return f"a name must be text, not {type(name).__name__}"
    if name in ("", METADATA):
        return "no tensor can be found under the empty name" if not name else "the format reserves this name"
    if not _is_text(name):
        return "a name must be Unicode text, half a surrogate pair is none"
    bits = BITS.get(spec.dtype)
    if bits is None:
        return f"the format has no dtype {spec.dtype}, it has {listed(BITS, len(BITS))}"
    if bits % _BITS_PER_BYTE and math.prod(spec.shape) * bits % _BITS_PER_BYTE:
        return f"shape {list(spec.shape)} of {spec.dtype} does not end on a byte"
    return None


def _wrong_metadata(key: object, value: object) -> str | None:
    if not isinstance(key, str) or not isinstance(value, str):
        return f"key and value must be strings, they are {type(key).__name__} and {type(value).__name__}"
    if not (_is_text(key) and _is_text(value)):
        return "key and value must be Unicode text, half a surrogate pair is none"
    return None


def _is_text(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(name: object) -> str:
    return repr(shown(name) if isinstance(name, str) else name)
