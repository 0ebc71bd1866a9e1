"""Tensors stored in boxes: the rank files that PyTorch's distributed checkpoint writes in the Hugging Face format.

Each rank's file holds the rank's own boxes under the tensors' names, with local shapes. The header's metadata entry
`DCP_SHARDING_INFO` is JSON, `{name: {"saved_offsets": [...]}}`, and says where each box begins. No file holds the
global shape, so a tensor ends where its last box ends: a box missing at the end cannot be seen, gaps and overlaps
inside can.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from shardferry.format.index import Part, TensorInfo
from shardferry.format.problem import Findings, Problem, shown
from shardferry.format.strictjson import BadJsonError, json_kind, parse_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardferry.format.header import Header

SHARDING_INFO = "DCP_SHARDING_INFO"


def saved_offsets(header: Header, file: str) -> tuple[dict[str, tuple[int, ...]], list[Problem]]:
    """Return where the boxes of a file begin in their tensors, for the names its sharding information places."""
    findings = Findings(file)
    text = header.metadata.get(SHARDING_INFO)
    if text is None:
        return {}, []
    try:
        info, twins = parse_object(text.encode())
    except BadJsonError as error:
        findings.add("fatal", f"{SHARDING_INFO} {error}")
        return {}, findings.problems
    if twins:
        findings.add("fatal", f"{SHARDING_INFO}: duplicate keys {', '.join(map(shown, twins[0].keys))}")
    placed: dict[str, tuple[int, ...]] = {}
    for name, tensor in header.tensors.items():
        entry = info.get(name)
        offsets = entry.get("saved_offsets") if isinstance(entry, dict) else None
        numbers = [n for n in offsets if type(n) is int and 0 <= n < 2**63] if isinstance(offsets, list) else []
        if isinstance(offsets, list) and len(numbers) == len(offsets) == len(tensor.shape):
            placed[name] = tuple(numbers)
        else:
            given = "nothing" if name not in info else json_kind(info[name])
            findings.add(
                "fatal",
                f'tensor {shown(name)!r}: {SHARDING_INFO} must give "saved_offsets" of {len(tensor.shape)} unsigned'
                f" integers, one per dim; it gives {given if offsets is None else 'others'}",
            )
    return placed, findings.problems


def assemble(name: str, pieces: Sequence[tuple[TensorInfo, tuple[int, ...]]]) -> tuple[TensorInfo, list[Problem]]:
    """Return the tensor that the boxes of all files make up, and what keeps them from being one.

    Args:
        name: The tensor's name, for messages.
        pieces: Each stored box and where it begins, in elements per dim; at least one.
    """
    first = pieces[0][0]
    findings = Findings(first.file)
    where = f"tensor {shown(name)!r}"
    for info, _ in pieces[1:]:
        if info.dtype != first.dtype or len(info.shape) != len(first.shape):
            findings.add(
                "fatal",
                f"{where} is {first.dtype} with {len(first.shape)} dims here, {info.dtype} with"
                f" {len(info.shape)} dims in {shown(info.file)}",
            )
            return first, findings.problems
    parts = sorted((Part(i.file, i.span, offsets, i.shape) for i, offsets in pieces), key=_by_offsets)
    shape = tuple(max(p.offsets[d] + p.shape[d] for p in parts) for d in range(len(first.shape)))
    filled = [p for p in parts if math.prod(p.shape)] or parts[:1]
    clash = _first_overlap(filled)
    if clash:
        findings.add("fatal", f"{where}: the boxes {_box(clash[0])} and {_box(clash[1])} overlap")
    elif sum(math.prod(p.shape) for p in filled) != math.prod(shape):
        findings.add("fatal", f"{where}: {_gap(filled, shape)}: a rank's file is missing")
    whole = filled[0]
    several = tuple(filled) if len(filled) > 1 else ()
    return TensorInfo(first.dtype, shape, whole.file, whole.span, several), findings.problems


def merge_boxes(
    headers: Mapping[str, Header], offsets: Mapping[str, Mapping[str, tuple[int, ...]]]
) -> tuple[dict[str, TensorInfo], list[Problem]]:
    """Return the tensors of files of which some hold boxes.

    Args:
        headers: By file.
        offsets: By file, then by name, what `saved_offsets` gave; a name without an entry is a whole tensor.
    """
    pieces: dict[str, list[tuple[TensorInfo, tuple[int, ...]]]] = {}
    for file, header in headers.items():
        for name, info in header.tensors.items():
            pieces.setdefault(name, []).append((info, offsets[file].get(name, (0,) * len(info.shape))))
    tensors: dict[str, TensorInfo] = {}
    problems: list[Problem] = []
    for name, boxes in pieces.items():
        tensors[name], found = assemble(name, boxes)
        problems += found
    return tensors, problems


def _by_offsets(part: Part) -> tuple[tuple[int, ...], str]:
    return part.offsets, part.file


def _box(part: Part) -> str:
    ranges = ", ".join(f"{start}:{start + size}" for start, size in zip(part.offsets, part.shape, strict=True))
    return f"[{ranges}] of {shown(part.file)}"


def _first_overlap(parts: list[Part]) -> tuple[Part, Part] | None:
    """Return two boxes that share an element; `parts` hold elements and are sorted by offsets.

    Boxes on a common grid, the only ones PyTorch writes, are told in linear time; others are swept along dim 0.
    """
    for one, two in pairwise(parts):
        if one.offsets == two.offsets:
            return one, two
    if _on_grid(parts):
        return None
    active: list[Part] = []
    for part in parts:
        active = [p for p in active if p.offsets[0] + p.shape[0] > part.offsets[0]]
        for other in active:
            if _meet(part, other):
                return other, part
        active.append(part)
    return None


def _on_grid(parts: list[Part]) -> bool:
    """Return whether in no dim a box reaches beyond the next beginning of any box; distinct ones are disjoint then."""
    for dim in range(len(parts[0].shape)):
        starts = sorted({p.offsets[dim] for p in parts})
        following = dict(pairwise(starts))
        if any(p.offsets[dim] + p.shape[dim] > following.get(p.offsets[dim], 2**64) for p in parts):
            return False
    return True


def _meet(one: Part, two: Part) -> bool:
    ranges = zip(one.offsets, one.shape, two.offsets, two.shape, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in ranges)


def _gap(parts: list[Part], shape: tuple[int, ...]) -> str:
    """Return where a tensor is not covered, as exactly as looking at one dim at a time can tell."""
    for dim in range(len(shape)):
        end = 0
        for start, stop in _ranges(parts, dim):
            if start > end:
                return f"a gap, elements {end} to {start} of dim {dim} are in no file"
            end = max(end, stop)
    held = sum(math.prod(p.shape) for p in parts)
    return f"a gap, its {len(parts)} boxes cover {held} of {math.prod(shape)} elements of shape {list(shape)}"


def _ranges(parts: Iterable[Part], dim: int) -> list[tuple[int, int]]:
    return sorted((p.offsets[dim], p.offsets[dim] + p.shape[dim]) for p in parts)
