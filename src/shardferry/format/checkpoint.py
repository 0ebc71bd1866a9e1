"""Reads the headers of a checkpoint's files and makes one index of them, with every problem there is.

The order: choose the files by their names (`fileset`), read the index file if there is one (`hubindex`), read and check
each header (`header`), join the tensors (`rankfiles` where they are stored in boxes), then compare what the files hold
with what the index promised. Only those files are opened. Nothing here decides whether a problem is acceptable.
"""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from shardferry.errors import CheckpointChangedError, CheckpointError, CheckpointNotFoundError
from shardferry.format.distcp import is_distcp, read_distcp
from shardferry.format.fileset import FileSet, is_rank_file, select_files, stray_files
from shardferry.format.header import Header, RawHeader, parse_header, read_raw_header
from shardferry.format.hubindex import HubIndex, read_hub_index
from shardferry.format.index import CheckpointIndex, FileInfo, TensorInfo
from shardferry.format.problem import Problem, listed, shown
from shardferry.format.rankfiles import SHARDING_INFO, merge_boxes, saved_offsets
from shardferry.format.savenames import inner_problems

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from shardferry.format.files import Files

# Guesses: a page each, and as many of a file as cost nothing beside the reading of it.
SAMPLE_BYTES, NUM_SAMPLES = 4096, 16
# What to do about another revision: of two folders of one node, or of two nodes.
_SAME = "Give every rank the same path, or fetch the same revision on every node."


def read_checkpoint(files: Files, entry: str | None, variant: str | None) -> tuple[CheckpointIndex, list[Problem]]:
    """Return the index of a checkpoint and everything that is wrong with it.

    Args:
        files: Where the checkpoint's files are.
        entry: The safetensors or index file to open; None chooses by the names in the folder.
        variant: The variant to choose there; None for the plain files.

    Raises:
        StorageError: If a file is there but cannot be read.
    """
    entries = () if entry is not None and not entry.endswith(".json") else files.names()
    if entry is None and is_distcp(entries):
        return read_distcp(files)
    chosen = _choose(entries, entry, variant)
    problems = [*chosen.problems, *inner_problems(entries)]
    hub_index = None
    if chosen.index is not None:
        hub_index, found = read_hub_index(files, chosen.index)
        problems += found
    names = tuple(sorted(set(hub_index.weight_map.values()))) if hub_index else chosen.names
    why = f"{shown(chosen.index)} does not name it" if chosen.index else "other files are read"
    for name in stray_files(entries, chosen.index, names) if names else ():
        text = f"{shown(name)} looks like a part of this checkpoint, but is not used: {why}"
        problems.append(Problem(text, name, "verify"))
    headers, found = _read_headers(files, names)
    problems += found
    tensors, found = _merge(headers, hub_index, chosen.index or "")
    problems += found
    if hub_index is not None and chosen.index is not None:
        problems += _compare(hub_index, chosen.index, headers, tensors)
    infos = {file: replace(header.info, version=files.version(file)) for file, header in headers.items()}
    return CheckpointIndex(files.root, tensors, infos, _merge_metadata(headers)), problems


def check_file(files: Files, name: str, expected: FileInfo) -> None:
    """Check that a file is the one whose header the index came from, by its size and its header's hash.

    Called by the first rank of a node and folder, whose copy of the file may be another revision.

    Raises:
        CheckpointChangedError: If size or header differ.
        CheckpointNotFoundError: If the file is not there.
        StorageError: If it cannot be read.
    """
    where = f"{files.root}/{shown(name)}"
    size = files.size(name)
    if size != expected.size:
        raise CheckpointChangedError(
            f"{where} has {size} bytes here, {expected.size} where the index was read: it is another revision"
            f" or an unfinished copy. {_SAME}"
        )
    digest = hashlib.sha256(files.read(name, 0, expected.header_bytes)).hexdigest()
    if digest != expected.header_sha256:
        raise CheckpointChangedError(
            f"{where} has another header here (sha256 {digest[:12]}...) than where the index was read"
            f" ({expected.header_sha256[:12]}...): it is another revision. {_SAME}"
        )


def sample_files(files: Files, index: CheckpointIndex, names: Collection[str]) -> dict[str, str]:
    """Return by file a hash of some of its data, for files whose sizes and headers are those of the index.

    It tells checkpoints with the same layout apart that differ in most of their values, as steps of a training do.

    Raises:
        CheckpointChangedError: If a file ends early.
        StorageError: If one cannot be read.
    """
    with ThreadPoolExecutor(files.concurrency) as pool:
        return dict(zip(names, pool.map(lambda name: _sample(files, name, index.files[name]), names), strict=True))


def _sample(files: Files, name: str, info: FileInfo) -> str:
    step = max(SAMPLE_BYTES, (info.size - info.header_bytes) // NUM_SAMPLES)
    digest = hashlib.sha256()
    for start in range(info.header_bytes, info.size, step):
        digest.update(files.read(name, start, min(start + SAMPLE_BYTES, info.size)))
    return digest.hexdigest()


def _choose(entries: Sequence[str], entry: str | None, variant: str | None) -> FileSet:
    if entry is None:
        return select_files(entries, variant)
    if entry.endswith(".json"):
        return FileSet(entry, (), ())
    return FileSet(None, (entry,), ())


def _read_headers(files: Files, names: Sequence[str]) -> tuple[dict[str, Header], list[Problem]]:
    """Return the usable headers by file, in the order of `names`, and the problems of all of them."""
    headers: dict[str, Header] = {}
    problems: list[Problem] = []
    for name, raw in _raw_headers(files, names):
        if isinstance(raw, Problem):
            problems.append(raw)
            continue
        header, found = parse_header(raw.raw, raw.size, name)
        problems += found
        if header is not None:
            headers[name] = header
    return headers, problems


def _raw_headers(files: Files, names: Sequence[str]) -> Iterator[tuple[str, RawHeader | Problem]]:
    """Yield the raw header of each file, reading a few files ahead."""
    if len(names) == 1:
        yield names[0], _raw_header(files, names[0])
        return
    waiting: deque[tuple[str, Future[RawHeader | Problem]]] = deque()
    rest = iter(names)
    with ThreadPoolExecutor(files.concurrency) as pool:
        waiting.extend((name, pool.submit(_raw_header, files, name)) for name in islice(rest, files.concurrency))
        while waiting:
            name, future = waiting.popleft()
            raw = future.result()
            waiting.extend((later, pool.submit(_raw_header, files, later)) for later in islice(rest, 1))
            yield name, raw


def _raw_header(files: Files, name: str) -> RawHeader | Problem:
    try:
        return read_raw_header(files, name)
    except CheckpointNotFoundError as error:
        return Problem(str(error), name, "missing")
    except CheckpointError as error:
        return Problem(str(error), name, "fatal")


def _merge(
    headers: Mapping[str, Header], hub_index: HubIndex | None, index: str
) -> tuple[dict[str, TensorInfo], list[Problem]]:
    """Return the tensors of all files by name, and the names that several files hold."""
    problems = [
        Problem(f"{name}: a rank file without {SHARDING_INFO}: where its boxes belong cannot be known", name, "fatal")
        for name, header in headers.items()
        if is_rank_file(name) and header.tensors and SHARDING_INFO not in header.metadata
    ]
    if any(SHARDING_INFO in header.metadata for header in headers.values()):
        placed = {}
        for file, header in headers.items():
            placed[file], found = saved_offsets(header, file)
            problems += found
        tensors, found = merge_boxes(headers, placed)
        return tensors, problems + found
    tensors = {}
    for header in headers.values():
        expected = len(tensors) + len(header.tensors)
        tensors.update(header.tensors)
        if len(tensors) != expected:
            tensors, found = _merge_with_twins(headers, hub_index, index)
            return tensors, problems + found
    return tensors, problems


def _merge_with_twins(
    headers: Mapping[str, Header], hub_index: HubIndex | None, index: str
) -> tuple[dict[str, TensorInfo], list[Problem]]:
    """Return the tensors of files that share names: the index says which file's counts, without one nothing does."""
    holders: dict[str, list[TensorInfo]] = {}
    for header in headers.values():
        for name, info in header.tensors.items():
            holders.setdefault(name, []).append(info)
    tensors: dict[str, TensorInfo] = {}
    problems = []
    for name, infos in holders.items():
        promised = hub_index.weight_map.get(name) if hub_index else None
        tensors[name] = next((info for info in infos if info.file == promised), infos[0])
        if len(infos) == 1:
            continue
        text = f"tensor {shown(name)!r} is a duplicate, held by {listed([info.file for info in infos], 10)}"
        if promised == tensors[name].file:
            choice = f"with strict=False (--no-strict) the one in {shown(promised)} counts, as {shown(index)} says"
            problems.append(Problem(f"{text}; {choice}", infos[0].file, "strict"))
        else:
            problems.append(Problem(f"{text}. Remove the wrong file or name the one meant", infos[0].file, "fatal"))
    return tensors, problems


def _merge_metadata(headers: Mapping[str, Header]) -> dict[str, str]:
    merged: dict[str, str] = {}
    for header in headers.values():
        for key, value in header.metadata.items():
            if key != SHARDING_INFO:  # describes the boxes of one file, which the tensors' parts now hold
                merged.setdefault(key, value)
    return merged


def _compare(
    hub_index: HubIndex, index: str, headers: Mapping[str, Header], tensors: Mapping[str, TensorInfo]
) -> list[Problem]:
    """Return where the index differs from what the files hold."""
    problems = []
    for name, file in hub_index.weight_map.items():
        info = tensors.get(name)
        held = info is not None and (info.file == file or any(part.file == file for part in info.parts))
        if not held and file in headers and name not in headers[file].tensors:
            problems.append(_broken_promise(index, name, file, info))
    for file, header in headers.items():
        extra = [name for name in header.tensors if name not in hub_index.weight_map]
        if extra:
            text = f"{shown(file)} holds names that {shown(index)} does not list: {listed(extra, 50)}"
            problems.append(Problem(text, file, "warning"))
    if all(file in headers for file in hub_index.weight_map.values()):
        problems += _compare_total(hub_index, index, tensors)
    return problems


def _broken_promise(index: str, name: str, file: str, info: TensorInfo | None) -> Problem:
    text = f"{shown(index)}: tensor {shown(name)!r} is not in {shown(file)}, where the index puts it"
    if info is None:
        choice = "it is left out"
        text += ", and in no other file of the index: it is missing"
    else:
        choice = "it is read from there"
        text += f"; {shown(info.file)} holds it. Correct the index"
    return Problem(f"{text}; with strict=False (--no-strict) {choice}", file, "strict")


def _compare_total(hub_index: HubIndex, index: str, tensors: Mapping[str, TensorInfo]) -> list[Problem]:
    if hub_index.total_size is None:
        return []
    held = _sum_bytes(tensors.values())
    if hub_index.total_size == held:
        return []
    if hub_index.total_size == _sum_bytes(tensors[name] for name in hub_index.weight_map if name in tensors):
        return []
    text = f"{shown(index)}: total_size is {shown(str(hub_index.total_size))}, the tensors have {held} bytes"
    return [Problem(text, index, "warning")]


def _sum_bytes(tensors: Iterable[TensorInfo]) -> int:
    return sum(tensor.num_bytes for tensor in tensors)
