"""Which tensors go into which file of a checkpoint that is about to be written.

Pure, and a function of names, dtypes, shapes and the size asked for alone: ranks need not tell each other, and files do
not depend on who writes them. Tensors follow each other in natural order of their names, so that a layer lies in one
file or in two neighbours. A tensor above the limit has a file of its own. Each run of tensors between such two takes as
few files as the limit allows, cut where each is nearest to its even share. Packing the largest tensors first would give
files of still more equal sizes, but scatter every layer over all of them.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from json.encoder import encode_basestring, encode_basestring_ascii
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from shardferry.errors import InvalidInputError
from shardferry.format.header import LENGTH_BYTES, MAX_HEADER_BYTES
from shardferry.format.hubindex import HUB_INDEX_BYTES, MAX_INDEX_BYTES, refuse_file_name
from shardferry.format.oldfiles import Naming
from shardferry.format.problem import shown
from shardferry.format.writer import FileLayout, TensorSpec, check_tensors, lay_out_file, metadata_entry, tensor_entry
from shardferry.plan.match import natural_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# The names of transformers.
PLAIN = Naming()
SINGLE_NAME = PLAIN.single
INDEX_NAME = PLAIN.index

# Digits are bounded because converting thousands of them takes time without bound.
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})\s*(?:([kmgt]?)(i?)b)?\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """The files of a checkpoint to be written.

    Attributes:
        files: In natural order of their names; never none, and none without a tensor unless there are no tensors.
        index_name: Name of the index file, None if there is to be none.
        index: Its content.
        total_size: Bytes of all tensors, without headers.
        warnings: What is odd about it, a sentence each.
        naming: How its files are called.
    """

    files: tuple[FileLayout, ...]
    index_name: str | None
    index: bytes | None
    total_size: int
    warnings: tuple[str, ...]
    naming: Naming = PLAIN


class _Costs(NamedTuple):
    """Running sums over tensors in order: item i is what the first i take, so there is one item more than tensors."""

    data: Sequence[int]
    header: Sequence[int]


class _Caps(NamedTuple):
    """Bytes that the tensors of one file may take at most."""

    data: int
    header: int


def parse_size(size: int | str) -> int:
    """Return a size in bytes; units are bytes whatever their case.

    Raises:
        InvalidInputError: If it is no positive size.

    Examples:
        >>> parse_size("5GB"), parse_size("1.5 gib"), parse_size(4096)
        (5000000000, 1610612736, 4096)
    """
    num_bytes = 0
    if isinstance(size, int) and not isinstance(size, bool):
        num_bytes = size
    elif isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        number, power, binary = match.groups(default="")
        if power or not binary:  # "iB" is no unit
            base = 1024 if binary else 1000
            num_bytes = int(Fraction(number) * base ** _POWERS[power.lower()])
    if num_bytes <= 0:
        raise InvalidInputError(
            f"max_shard_size is {size!r}; it must be a positive number of bytes, or text like '5GB', '1.5 GiB' or "
            "'800mb' (units in any case: B; decimal KB, MB, GB, TB; binary KiB, MiB, GiB, TiB)"
        )
    return num_bytes


def lay_out_checkpoint(
    tensors: Mapping[str, TensorSpec],
    *,
    max_shard_bytes: int,
    metadata: Mapping[str, str],
    files_like: Mapping[str, str] | None,
    hub_limits: bool,
    naming: Naming = PLAIN,
) -> CheckpointLayout:
    """Return the files that these tensors are to be written to, with all headers and the index.

    Args:
        tensors: In any order, which does not matter.
        max_shard_bytes: A file holds at most this many bytes of tensors, or a single tensor. Positive.
        metadata: Strings for the header of every file.
        files_like: File of each tensor of another checkpoint, to keep its assignment whatever the sizes; a tensor it
            does not name goes where its neighbour in natural order is. None cuts by size.
        hub_limits: Whether to refuse what the Hub's tools cannot read, instead of warning about it.
        naming: How the files are called.

    Raises:
        InvalidInputError: If a tensor, the metadata or a file name cannot be written, or a header or the index would
            be above its cap.
    """
    check_tensors(tensors, metadata)
    names = sorted(sorted(tensors), key=natural_key)  # sorted twice: layers "1" and "01" have equal keys
    if files_like is None or not names:
        groups = _named(_cut_by_size(names, tensors, max_shard_bytes, metadata), naming)
    else:
        groups = _group_like(names, files_like, naming)
    files = tuple(lay_out_file(file, {name: tensors[name] for name in held}, metadata) for file, held in groups.items())
    total_size = sum(spec.num_bytes for spec in tensors.values())
    if list(groups) == [naming.single]:
        return CheckpointLayout(files, None, None, total_size, (), naming)
    index = _index({name: file for file, held in groups.items() for name in held}, total_size)
    warnings = _check_index(index, naming.index, hub_limits=hub_limits)
    return CheckpointLayout(files, naming.index, index, total_size, warnings, naming)


def _cut_by_size(
    names: Sequence[str], tensors: Mapping[str, TensorSpec], max_shard_bytes: int, metadata: Mapping[str, str]
) -> list[Sequence[str]]:
    """Return the tensors of every file, in natural order, cut by size."""
    sizes = [tensors[name].num_bytes for name in names]
    widest = sum(sizes)  # no offset has more digits
    # Every name has its own length, but there are tens of specs; 2 quotes are counted in both, a comma in neither.
    rest = {spec: len(tensor_entry("", spec, widest, widest)) - 1 for spec in set(tensors.values())}
    entries = (len(encode_basestring(name).encode()) + rest[tensors[name]] for name in names)
    costs = _Costs([0, *accumulate(sizes)], [0, *accumulate(entries)])
    around = len(metadata_entry(metadata).encode()) + 2 * LENGTH_BYTES  # the braces and the padding with it
    caps = _Caps(max_shard_bytes, MAX_HEADER_BYTES - around)
    cuts = [0]
    for start, stop in _runs(sizes, max_shard_bytes):
        cuts += _cut_run(costs, start, stop, caps)
    return [names[a:b] for a, b in pairwise(cuts)] or [names]


def _named(pieces: Sequence[Sequence[str]], naming: Naming) -> dict[str, Sequence[str]]:
    if len(pieces) == 1:
        return {naming.single: pieces[0]}
    return {f"{naming.stem}-{at:05d}-of-{len(pieces):05d}.safetensors": held for at, held in enumerate(pieces, start=1)}


def _runs(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Yield the half-open ranges of tensors that are cut by themselves: one above the limit, or those between such."""
    begin = 0
    for at, size in enumerate(sizes):
        if size > limit:
            if begin < at:
                yield begin, at
            yield at, at + 1
            begin = at + 1
    if begin < len(sizes):
        yield begin, len(sizes)


def _cut_run(costs: _Costs, start: int, stop: int, caps: _Caps) -> list[int]:
    """Return where the files of tensors [start, stop) end: as few as fit, each cut nearest to its even share.

    Filling every file as far as it goes, from the front, finds how few they can be and how late each can end; from the
    back, how early. Between the two every cut can be completed. Where the limit leaves no choice a file differs from
    the even share by more than half a tensor, but by less than the largest: found by trying 300,000 small cases, not
    proved.
    """
    latest = [start]
    while latest[-1] < stop:
        latest.append(_furthest(costs, latest[-1], stop, caps))
    earliest = [stop]
    while earliest[-1] > start:
        earliest.append(_earliest(costs, start, earliest[-1], caps))
    earliest.reverse()
    num_files = len(latest) - 1
    first, total = costs.data[start], costs.data[stop] - costs.data[start]
    cuts = [start]
    for at in range(1, num_files):
        low = max(earliest[at], cuts[-1] + 1)
        high = min(latest[at], _furthest(costs, cuts[-1], stop, caps))
        cuts.append(_closest(costs.data, first + Fraction(at * total, num_files), low, high))
    return [*cuts[1:], stop]


def _furthest(costs: _Costs, begin: int, stop: int, caps: _Caps) -> int:
    """Return where a file that begins at tensor `begin` ends at the latest; one tensor always fits."""
    ends = (
        bisect_right(sums, sums[begin] + cap, begin + 1, stop + 1) - 1 for sums, cap in zip(costs, caps, strict=True)
    )
    return max(begin + 1, min(ends))


def _earliest(costs: _Costs, start: int, end: int, caps: _Caps) -> int:
    """Return where a file that ends before tensor `end` begins at the earliest; one tensor always fits."""
    begins = (bisect_left(sums, sums[end] - cap, start, end) for sums, cap in zip(costs, caps, strict=True))
    return min(end - 1, max(begins))


def _closest(sums: Sequence[int], wanted: Fraction, low: int, high: int) -> int:
    """Return the position in [low, high] whose sum is closest to `wanted`, the first of equally close ones."""
    above = bisect_left(sums, wanted, low, high + 1)
    candidates = [at for at in (above - 1, above) if low <= at <= high]
    return min(candidates, key=lambda at: abs(sums[at] - wanted))


def _group_like(names: Sequence[str], files_like: Mapping[str, str], naming: Naming) -> dict[str, Sequence[str]]:
    """Return the tensors of every file as another checkpoint has them, files in natural order."""
    known = [name for name in names if name in files_like]
    if not known:
        raise InvalidInputError(
            f"files_like names none of the {len(names)} tensors, e.g. not {shown(names[0])!r}: give a checkpoint of the"
            " same model, or none"
        )
    groups: dict[str, list[str]] = {}
    file = files_like[known[0]]
    for name in names:
        file = files_like.get(name, file)
        groups.setdefault(file, []).append(name)
    normal: dict[str, list[str]] = {}
    for file, held in groups.items():
        wrong = refuse_file_name(file)
        if wrong:
            raise InvalidInputError(f"files_like: tensor {shown(held[0])!r}: the file {shown(file)!r} {wrong}")
        normal.setdefault(str(PurePosixPath(file)), []).extend(held)
    if len(normal) > 1 and naming.single in normal:
        raise InvalidInputError(
            f"files_like puts tensors into {naming.single} and {len(normal) - 1} more files: readers that find this "
            "name open nothing else. Rename the file in the other checkpoint, or don't keep its files"
        )
    return {file: normal[file] for file in sorted(sorted(normal), key=natural_key)}


def _index(file_of: Mapping[str, str], total_size: int) -> bytes:
    """Return the index file as transformers writes it: `json.dumps(..., indent=2, sort_keys=True)` and a new line.

    Put together by hand, because Python's own encoder takes seconds to indent a million lines.
    """
    quoted = {file: encode_basestring_ascii(file) for file in set(file_of.values())}
    lines = ",\n".join(f"    {encode_basestring_ascii(name)}: {quoted[file_of[name]]}" for name in sorted(file_of))
    text = f'{{\n  "metadata": {{\n    "total_size": {total_size}\n  }},\n  "weight_map": {{\n{lines}\n  }}\n}}\n'
    return text.encode()


def _check_index(index: bytes, name: str, *, hub_limits: bool) -> tuple[str, ...]:
    """Return a warning about an index that not everybody can read."""
    if len(index) <= HUB_INDEX_BYTES:
        return ()
    text = f"{name} takes {len(index)} bytes; the Hub's tools refuse to read more than {HUB_INDEX_BYTES}"
    if hub_limits or len(index) > MAX_INDEX_BYTES:
        raise InvalidInputError(f"{text}. Nothing was written; fewer tensors (experts merged) or shorter names help")
    return (text,)
