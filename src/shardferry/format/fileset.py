"""Which files of a folder make up the checkpoint, from their names alone.

Names are those of the Hugging Face libraries: `model.safetensors`, `model.safetensors.index.json`, numbered shard files
`model-00001-of-00003.safetensors`, the same with a variant (`model.fp16.safetensors`), the stems of diffusers and of
adapters, and the rank files of PyTorch's distributed checkpoints. An index decides if there is one; beside it nothing
else is opened. Without one and without a single file, every safetensors file counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from shardferry.format.problem import Findings, Problem, listed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

# In the order in which a folder that holds several is understood: a merged model may keep its adapter beside it.
STEMS = ("model", "diffusion_pytorch_model", "adapter_model")
ENDING = ".safetensors"

_NUMBERED = re.compile(r"(.+)-([0-9]{1,9})-of-([0-9]{1,9})((?:\.[^.]+)?)\.safetensors", re.DOTALL)
_RANK_FILE = re.compile(r"shard-[0-9]+-model-([0-9]{1,9})-of-([0-9]{1,9})\.safetensors")
_VARIANT = re.compile(
    rf"(?:{'|'.join(STEMS)})(?:\.(?!safetensors)(?P<before>[^.]+?)(?:-\d+-of-\d+)?|-\d+-of-\d+\.(?P<after>[^.]+))"
    r"\.safetensors(?:\.index\.json)?"
)
_INDEX_VARIANT = re.compile(r"\.index\.(.+)\.json$")
# Lines about absent numbers of one set: a name can claim a billion files.
_MAX_ABSENT = 1000


@dataclass(frozen=True, slots=True)
class FileSet:
    """The files to open.

    Attributes:
        index: Name of the index file, None if there is none to go by.
        names: The safetensors files, in order; empty with an index, which names them itself.
        problems: What the names alone say is wrong.
    """

    index: str | None
    names: tuple[str, ...]
    problems: tuple[Problem, ...]


class _Numbered(NamedTuple):
    prefix: str
    number: int
    total: int
    width: int
    variant: str | None


def is_rank_file(name: str) -> bool:
    """Return whether the name is one that PyTorch's distributed writer gives to the part of one rank.

    Examples:
        >>> is_rank_file("shard-00002-model-00001-of-00001.safetensors")
        True
    """
    return _RANK_FILE.fullmatch(name) is not None


def select_files(entries: Sequence[str], variant: str | None) -> FileSet:
    """Return the files that make up the checkpoint in a folder with these entries.

    Args:
        entries: Names of what lies directly in the folder.
        variant: The variant asked for, e.g. `"fp16"`; None for the plain files.
    """
    names = sorted(name for name in entries if not name.startswith("."))
    stem, others = _stems(names, variant)
    found = Findings("")
    if stem is not None:
        single, index = _single_name(stem, variant), _index_name(stem, variant)
        if others:
            found.add(
                "warning", f"{stem} files are read, those of {listed(others, 5)} are not: name a file to read them"
            )
        if single in names and index in names:
            found.add(
                "fatal", f"{single} and {index} are both there, readers take one or the other: name the one meant"
            )
        if index in names:
            return FileSet(index, (), _named(found))
        if single in names:
            return FileSet(None, (single,), _named(found))
    else:
        indexes = [name for name in names if name.endswith(_index_name("", variant))]
        if len(indexes) > 1:
            found.add("fatal", f"there are {len(indexes)} indexes, {listed(indexes, 5)}: name the one meant")
        if indexes:
            return FileSet(indexes[0], (), _named(found))
    pool = _pool(names, stem, variant)
    if not pool:
        found.add("missing", _nothing_found(names, variant))
    _check_numbers(pool, found)
    return FileSet(None, tuple(pool), _named(found))


def likely_names(variant: str | None) -> tuple[str, ...]:
    """Return the names by which a checkpoint is found where nothing can be listed.

    Examples:
        >>> likely_names(None)[:2]
        ('model.safetensors.index.json', 'model.safetensors')
    """
    return tuple(name for stem in STEMS for name in (_index_name(stem, variant), _single_name(stem, variant)))


def stray_files(entries: Sequence[str], index: str | None, used: Collection[str]) -> list[str]:
    """Return numbered shard files that the checkpoint does not use although they look like a part of it.

    A set with an index of its own and the files of another variant are not strays.

    Args:
        entries: Names of what lies directly in the folder.
        index: The index that was gone by, if any.
        used: The safetensors files that make up the checkpoint.
    """
    match = _INDEX_VARIANT.search(index or "")
    variant = match[1] if match else None
    others = {name for name in entries if name != index and _index_name("", variant) in name}
    return [
        name
        for name in sorted(set(entries).difference(used))
        if not name.startswith(".")
        and (file := _parse_numbered(name)) is not None
        and file.variant == variant
        and file.prefix + _index_name("", variant) not in others
    ]


def _named(found: Findings) -> tuple[Problem, ...]:
    """Return the problems of the folder, whose messages need no file name in front."""
    return tuple(problem._replace(message=problem.message.removeprefix(": ")) for problem in found.problems)


def _single_name(stem: str, variant: str | None) -> str:
    return f"{stem}.{variant}{ENDING}" if variant else f"{stem}{ENDING}"


def _index_name(stem: str, variant: str | None) -> str:
    return f"{stem}{ENDING}.index.{variant}.json" if variant else f"{stem}{ENDING}.index.json"


def _parse_numbered(name: str) -> _Numbered | None:
    match = _NUMBERED.fullmatch(name)
    if match is None:
        return None
    prefix, number, total, tail = match.groups()
    variant = tail[1:] or None  # model-00001-of-00002.fp16.safetensors, as older diffusers write it
    stem, _, before = prefix.rpartition(".")
    if variant is None and stem in STEMS and before != ENDING[1:]:  # model.fp16-00001-of-00002.safetensors
        prefix, variant = stem, before
    return _Numbered(prefix, int(number), int(total), len(number), variant)


def _stems(names: list[str], variant: str | None) -> tuple[str | None, list[str]]:
    """Return the stem that the folder is read as, and other full models beside it."""
    numbered = {file.prefix for file in map(_parse_numbered, names) if file is not None and file.variant == variant}
    whole = [s for s in STEMS if _single_name(s, variant) in names or _index_name(s, variant) in names]
    present = [s for s in STEMS if s in whole or s in numbered]
    return (present[0] if present else None), [s for s in present[1:] if s != "adapter_model"]


def _pool(names: list[str], stem: str | None, variant: str | None) -> list[str]:
    """Return the safetensors files of a folder without an index and without a single file."""
    files = [name for name in names if name.endswith(ENDING)]
    if variant:
        return [name for name in files if name.endswith(f".{variant}{ENDING}") or _has_variant(name, variant)]
    rank_files = [name for name in files if is_rank_file(name)]
    if rank_files and stem is None:
        return rank_files
    return [name for name in files if _may_belong(name, stem)]


def _may_belong(name: str, stem: str | None) -> bool:
    """Return whether a file of an unindexed folder is a part of the model that `stem` names."""
    if is_rank_file(name) or _VARIANT.fullmatch(name):
        return False
    file = _parse_numbered(name)
    prefix = file.prefix if file else name.removesuffix(ENDING)
    return prefix == stem or prefix not in STEMS


def _has_variant(name: str, variant: str) -> bool:
    file = _parse_numbered(name)
    return file is not None and file.variant == variant


def _nothing_found(names: list[str], variant: str | None) -> str:
    looked = listed([_single_name(STEMS[0], variant), _index_name(STEMS[0], variant)], 2)
    text = f"no safetensors file found in the folder (looked for {looked} and others ending in {ENDING})"
    matches = [match for match in map(_VARIANT.fullmatch, names) if match]
    variants = sorted({match["before"] or match["after"] for match in matches})
    if variants:
        text += f"; there are files of variant {listed(variants, 5)}: ask for it (variant=, --variant) or name the file"
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles:
        text += f"; {listed(pickles, 3)} may hold pickled weights: convert them to safetensors first"
    if "snapshots" in names:
        text += "; this looks like a model's cache folder: open one of the folders in snapshots/"
    return text


def _check_numbers(pool: list[str], found: Findings) -> None:
    """Record every number that the names of numbered files promise and the folder lacks."""
    sets: dict[str, list[tuple[_Numbered, str]]] = {}
    for name in pool:
        file = _parse_numbered(name)
        rank_file = _RANK_FILE.fullmatch(name)
        if rank_file:  # every rank writes to some of the output files: only those can be told to be absent
            number, total = rank_file.groups()
            file = _Numbered("shard-*-model", int(number), int(total), len(number), None)
        if file is not None:
            sets.setdefault(file.prefix, []).append((file, name))
    for prefix, members in sets.items():
        totals = sorted({file.total for file, _ in members})
        if len(totals) > 1:
            found.add("fatal", f"{prefix}-*: files of several sets are mixed, of {listed(map(str, totals), 5)} files")
            continue
        absent = list(islice(_absent(members), _MAX_ABSENT))
        for name in absent:
            found.add("missing", f"{name} is missing: the other files' names say that there are {totals[0]}")


def _absent(members: list[tuple[_Numbered, str]]) -> Iterator[str]:
    present = {file.number for file, _ in members}
    file, name = members[0]
    first = 0 if 0 in present else 1  # some writers count from 0
    digits = f"-{file.number:0{file.width}d}-of-"
    for number in range(first, first + file.total):
        if number not in present:
            other = name.replace(digits, f"-{number:0{file.width}d}-of-")
            yield re.sub(r"^shard-\d+-", "shard-*-", other) if is_rank_file(name) else other
