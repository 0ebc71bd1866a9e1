"""The header of one safetensors file: read within bounds, parsed, checked against the size of the file.

A file is an 8-byte little-endian length, that many bytes of JSON, and the data without holes. The rules are those of
the safetensors crate 0.8, in its order, plus: no duplicate JSON keys, no positional entries, no empty name. Every entry
first takes a short path that accepts what nearly all entries are; only what fails there is taken apart to say why.
Nothing is allocated on the word of a length or a shape.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard

from shardferry.collector import paused_collector
from shardferry.format.dtypes import BITS
from shardferry.format.impostor import impostor
from shardferry.format.index import FileInfo, TensorInfo
from shardferry.format.problem import Findings, Problem, listed, shown
from shardferry.format.strictjson import BadJsonError, Json, Twins, json_kind, parse_object

if TYPE_CHECKING:
    from shardferry.format.files import Files

LENGTH_BYTES = 8
# The crate refuses longer headers when reading and when writing; exactly this many bytes are allowed.
MAX_HEADER_BYTES = 100_000_000
# Most headers fit one read of this size; reading so much of the data costs less than a second request.
FIRST_READ_BYTES = 128 * 1024
METADATA = "__metadata__"

_MAX_U64 = 2**64 - 1
_FIELDS = ("dtype", "shape", "data_offsets")
# Bounds of the short path. They keep every product small; what lies outside is checked step by step.
_PLAIN_DIMS, _PLAIN_EXTENT, _PLAIN_OFFSET = 8, 2**40, 2**60
# A hostile header can hold millions of wrong entries. A guess, above the tensors of any real file.
_MAX_PROBLEMS = 10_000
# What one line of a message bears, a guess.
_BRIEF_ITEMS, _BRIEF_CHARACTERS = 10, 100


class RawHeader(NamedTuple):
    """The first bytes of a file: the whole header if its length is possible, else what was read to find that out."""

    size: int
    raw: bytes


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header.

    Attributes:
        tensors: By name, in order of their bytes; spans are absolute.
        metadata: The `__metadata__` strings, unchanged.
        info: Size and hash to recognise the file by.
    """

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    info: FileInfo


# Bytes [start, stop) of the data that a name claims, and the tensor unless its entry is wrong. A bare tuple: there are
# 100,000 of them in a large checkpoint, and it sorts as the format wants it.
_Extent: TypeAlias = tuple[int, int, str, TensorInfo | None]


def read_raw_header(files: Files, name: str) -> RawHeader:
    """Return the header's bytes, its length field included, having read no more than the format's cap.

    Raises:
        CheckpointError: If the file is missing or is no regular file.
        StorageError: If it cannot be read.
    """
    size = files.size(name)
    first = files.read(name, 0, min(size, FIRST_READ_BYTES))
    stop = LENGTH_BYTES + int.from_bytes(first[:LENGTH_BYTES], "little")
    if len(first) < LENGTH_BYTES or stop > min(size, LENGTH_BYTES + MAX_HEADER_BYTES):
        return RawHeader(size, first)
    if stop <= len(first):
        return RawHeader(size, first[:stop])
    return RawHeader(size, first + files.read(name, len(first), stop))


@paused_collector()
def parse_header(raw: bytes, size: int, file: str) -> tuple[Header | None, list[Problem]]:
    """Return what a file's header says, and everything that is wrong with it.

    Args:
        raw: The first bytes of the file, at least its header if the header's length is possible.
        size: Size of the file in bytes.
        file: Name that messages and `TensorInfo.file` carry.

    Returns:
        The header, None if an entry of it cannot be read; with a problem of severity `fatal` it must not be used.
    """
    findings = Findings(file)
    length = _header_length(raw, size, findings)
    if length is None:
        return None, findings.problems
    data_start = LENGTH_BYTES + length
    text = raw[LENGTH_BYTES:data_start]
    try:
        header, twins = parse_object(text)
    except BadJsonError as error:
        what = impostor(raw)
        findings.add("fatal", f"header {error}" + (f"; {what}" if what else ""))
        return None, findings.problems
    if text[:1] != b"{":
        findings.add("warning", "header begins with white space, the format says it begins with '{'")
    metadata = _metadata(header.get(METADATA), findings)
    extents = _extents(header, data_start, findings)
    _check_uniqueness(header, twins, _cover_problems(extents, size - data_start, file), findings)
    tensors = {name: info for _, _, name, info in extents or () if info is not None}
    if extents is None or len(tensors) < len(extents):
        return None, findings.problems
    digest = hashlib.sha256(raw[:data_start]).hexdigest()
    return Header(tensors, metadata, FileInfo(size, data_start, digest)), findings.problems


def _header_length(raw: bytes, size: int, findings: Findings) -> int | None:
    """Return the length of the JSON text, None if it cannot be."""
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    if size == 0:
        text = "the file is empty (0 bytes): an interrupted copy or download; fetch it again"
    elif size < LENGTH_BYTES:
        text = f"truncated: {size} bytes, too short for the 8 bytes of the header length"
    elif length > MAX_HEADER_BYTES:
        text = f"the header length {length} is above the cap of {MAX_HEADER_BYTES} bytes"
    elif length > size - LENGTH_BYTES:
        text = f"the header length {length} points past the end of the file of {size} bytes"
    elif length == 0:
        text = "the header length is zero: space was reserved for the file, but it was never written"
    else:
        return length
    what = impostor(raw)
    findings.add("fatal", f"{what} ({text})" if what else text)
    return None


def _metadata(value: Json, findings: Findings) -> dict[str, str]:
    if value is None:  # absent, or null as the crate accepts it
        return {}
    if not isinstance(value, dict):
        findings.add("fatal", f"{METADATA} must be an object of strings, not {json_kind(value)}")
        return {}
    for key, item in value.items():
        if not isinstance(item, str):
            findings.add("fatal", f"{METADATA}: the value of {shown(key)!r} must be a string, not {json_kind(item)}")
    return {key: item for key, item in value.items() if isinstance(item, str)}


def _extents(header: dict[str, Json], data_start: int, findings: Findings) -> list[_Extent] | None:
    """Return what every tensor claims, in order of its bytes; None if an entry's offsets cannot be used."""
    extents: list[_Extent] = []
    usable = True
    file = findings.file
    if "" in header:
        findings.strict("a tensor has the empty name, which no plan or index can address", "it keeps that name")
    for name, entry in header.items():
        if name == METADATA:
            continue
        if len(findings.problems) > _MAX_PROBLEMS:
            findings.add(
                "fatal", f"more than {_MAX_PROBLEMS} things are wrong: the rest of the header is not looked at"
            )
            return None
        plain = _plain_entry(entry)
        if plain is None:
            extent = _examined_entry(name, entry, data_start, findings)
            usable = usable and extent is not None
        else:
            dtype, shape, start, stop = plain
            info = TensorInfo(dtype, tuple(shape), file, (data_start + start, data_start + stop))
            extent = (start, stop, name, info)
        if extent is not None:
            extents.append(extent)
    extents.sort()  # names are unique, so no two tensors are ever compared
    return extents if usable else None


def _plain_entry(entry: Any) -> tuple[str, list[int], int, int] | None:  # noqa: ANN401 - JSON, anything
    """Return dtype, shape, start and stop of an entry that is right and ordinary, None for any other."""
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        start, stop = offsets
        # Not isinstance: a bool is an int, and no class but the parser's own can occur.
        if type(offsets) is not list or type(start) is not int or type(stop) is not int or type(shape) is not list:
            return None
        bits = BITS[dtype]
        if len(shape) > _PLAIN_DIMS or not 0 <= start < stop < _PLAIN_OFFSET:
            return None
        for extent in shape:
            if type(extent) is not int or not 0 < extent < _PLAIN_EXTENT:
                return None
            bits *= extent
    except (KeyError, TypeError, ValueError):
        return None
    return (dtype, shape, start, stop) if bits == (stop - start) * 8 else None


def _examined_entry(name: str, entry: Json, data_start: int, findings: Findings) -> _Extent | None:
    """Return what an unusual entry claims and record all that is wrong with it; None without usable offsets."""
    where = f"tensor {shown(name)!r}"
    if isinstance(entry, list) and len(entry) == len(_FIELDS):
        findings.strict(
            f"{where}: the entry is an array, the format wants an object",
            "it is read as [dtype, shape, data_offsets]",
        )
        entry = dict(zip(_FIELDS, entry, strict=True))
    if not isinstance(entry, dict):
        findings.add("fatal", f"{where}: the entry must be an object, not {json_kind(entry)}")
        return None
    absent = [field for field in _FIELDS if field not in entry]
    if absent:
        findings.add("fatal", f"{where}: the entry lacks {', '.join(absent)}")
        return None
    offsets = _offsets(entry["data_offsets"], where, findings)
    dtype = _dtype(entry["dtype"], where, findings)
    shape = _shape(entry["shape"], where, findings)
    if offsets is None:
        return None
    start, stop = offsets
    if dtype is None or shape is None or not _size_fits(dtype, shape, stop - start, where, findings):
        return start, stop, name, None
    return start, stop, name, TensorInfo(dtype, shape, findings.file, (data_start + start, data_start + stop))


def _offsets(value: Json, where: str, findings: Findings) -> tuple[int, int] | None:
    if isinstance(value, list) and len(value) == 2:  # noqa: PLR2004 - begin and end
        start, stop = value
        if _is_unsigned(start) and _is_unsigned(stop):
            if start <= stop:
                return start, stop
            findings.add("fatal", f"{where}: data_offsets end at {stop}, before they begin at {start}")
            return None
    findings.add("fatal", f"{where}: data_offsets must be two unsigned 64-bit integers, not {_brief(value)}")
    return None


def _dtype(value: Json, where: str, findings: Findings) -> str | None:
    if isinstance(value, str) and value in BITS:
        return value
    findings.add("fatal", f"{where}: dtype {_brief(value)} is none of the format's ({', '.join(BITS)})")
    return None


def _shape(value: Json, where: str, findings: Findings) -> tuple[int, ...] | None:
    if isinstance(value, list):
        extents = tuple(extent for extent in value if _is_unsigned(extent))
        if len(extents) == len(value):
            return extents
    findings.add("fatal", f"{where}: shape must be an array of unsigned 64-bit integers, not {_brief(value)}")
    return None


def _size_fits(dtype: str, shape: tuple[int, ...], num_bytes: int, where: str, findings: Findings) -> bool:
    """Return whether a tensor of this shape takes `num_bytes`; overflow is judged from the left, as the crate does."""
    count = 1
    for extent in shape:
        count *= extent
        if count > _MAX_U64:
            break
    bits = count * BITS[dtype]
    if bits > _MAX_U64:
        text = f"shape {_brief(list(shape))} of {dtype} is too large: its size overflows 64 bits"
    elif bits % 8:
        text = f"shape {_brief(list(shape))} of {dtype} takes {bits} bits and does not end on a byte"
    elif bits // 8 != num_bytes:
        text = f"shape {_brief(list(shape))} of {dtype} takes {bits // 8} bytes, data_offsets give it {num_bytes} bytes"
    else:
        return True
    findings.add("fatal", f"{where}: {text}")
    return False


def _is_unsigned(value: Json) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MAX_U64


def _brief(value: Json) -> str:
    """Return `value` as it stands in the header, cut to what fits a message; what lies deeper is only named."""
    if not isinstance(value, list):
        return _brief_item(value)
    more = len(value) - _BRIEF_ITEMS
    items = ", ".join(map(_brief_item, value[:_BRIEF_ITEMS]))
    return f"[{items}, and {more} more]" if more > 0 else f"[{items}]"


def _brief_item(value: Json) -> str:
    if isinstance(value, list | dict):
        return json_kind(value)
    if isinstance(value, int) and value.bit_length() > 128:  # noqa: PLR2004 - repr() may refuse thousands of digits
        return "an integer of more than 128 bits"
    text = repr(value)
    return text if len(text) <= _BRIEF_CHARACTERS else f"{text[:_BRIEF_CHARACTERS]}..."


def _cover_problems(extents: list[_Extent] | None, data_bytes: int, file: str) -> list[Problem]:
    """Return where the tensors do not cover the data exactly once; nothing if some offsets are unusable anyway."""
    findings = Findings(file)
    if extents is None:
        return []
    end, last = 0, ""
    for start, stop, name, _ in extents:
        if start != end:
            _report_step(end, last, (start, stop, name), findings)
        if stop >= end:
            end, last = stop, name
    if end > data_bytes:
        start, stop, name, _ = next(extent for extent in extents if extent[1] > data_bytes)
        findings.add(
            "fatal",
            f"truncated: the data has {data_bytes} of {end} bytes; tensor {shown(name)!r} needs bytes"
            f" {start} to {stop}. An unfinished write or download: fetch the file again",
        )
    elif end < data_bytes:
        findings.add("fatal", f"{data_bytes - end} trailing bytes after the last tensor, which ends at byte {end}")
    return findings.problems


def _report_step(end: int, last: str, extent: tuple[int, int, str], findings: Findings) -> None:
    """Record that a tensor does not begin at `end`, where the bytes claimed so far stop, with those of `last`."""
    start, stop, name = extent
    where = f"tensor {shown(name)!r}"
    if start < end:
        text = f"{where} at bytes {start} to {stop} overlaps tensor {shown(last)!r}, which ends at {end}"
    else:
        before = f"tensor {shown(last)!r} ends at {end}" if end else "the data begins at 0"
        text = f"a hole of {start - end} bytes: {where} begins at {start}, {before}"
    findings.add("fatal", text)


def _check_uniqueness(header: dict[str, Json], twins: list[Twins], cover: list[Problem], findings: Findings) -> None:
    """Record duplicate keys, then `cover` unless a duplicate name is what causes it."""
    owners = {id(entry): f"tensor {shown(name)!r}" for name, entry in header.items()} if twins else {}
    for found, keys in twins:
        if found is header and METADATA in keys:
            findings.add("fatal", f"duplicate {METADATA}: the block is given more than once")
        names = [key for key in keys if key != METADATA] if found is header else []
        if names and cover:
            cover = []
            findings.add("fatal", f"duplicate names, whose entries claim different bytes: {listed(names, 50)}")
        elif names:
            findings.strict(f"duplicate names in the header: {listed(names, 50)}", "the last entry of each counts")
        elif found is header.get(METADATA):
            findings.strict(f"duplicate keys in {METADATA}: {listed(keys, 50)}", "the last value of each counts")
        elif found is not header:
            text = f"duplicate keys inside the entry of {owners.get(id(found), 'a tensor')}: {listed(keys, 50)}"
            if any(field in keys for field in _FIELDS):
                findings.add("fatal", text)
            else:
                findings.strict(text, "they are ignored")
    findings.problems.extend(cover)
