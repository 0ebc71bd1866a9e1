"""The checkpoints of PyTorch's distributed checkpoint in its own format: `.metadata` and `__RANK_N.distcp` files.

`.metadata` is a pickle that says of every tensor its shape and boxes, and of every box the file and the range that
holds it. That range is what `torch.save` writes (`torchfile`). So a box is a run of bytes in a file, and the checkpoint
is an index like any other: nothing of it is loaded by torch, and torch need not be there. Pickles are read by
`pickled`, which calls nothing.

Described from torch 2.13 (`torch.distributed.checkpoint.metadata`, `filesystem`).
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, NamedTuple

from shardferry.errors import CheckpointNotFoundError
from shardferry.format.dtypes import tensor_bytes
from shardferry.format.index import CheckpointIndex, FileInfo, TensorInfo
from shardferry.format.pickled import BadPickleError, Pairs, Record, read_pickle
from shardferry.format.problem import Findings, Problem, listed, shown
from shardferry.format.rankfiles import assemble
from shardferry.format.torchfile import (
    DTYPES,
    BadArchiveError,
    Place,
    as_shape,
    dtype_named,
    read_stored_tensor,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardferry.format.files import Files

METADATA_NAME = ".metadata"
ENDING = ".distcp"
# A guess: 500 bytes a box, and a model of 100,000 tensors in 5 boxes each.
MAX_METADATA_BYTES = 256 << 20

_OURS = re.compile(r"torch\.distributed\.checkpoint\.(?:metadata|filesystem|planner|storage)\.\w+")
_OTHERS = re.compile(
    r"torch\.(?:Size|serialization\._get_layout)|collections\.OrderedDict|pathlib\.(?:Posix|PurePosix)?Path"
)


class _Box(NamedTuple):
    """A box that the metadata describes.

    Attributes:
        offsets: Where it begins in its tensor.
        sizes: Its shape.
        place: The archive that holds it.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


# The record of where a box is stored, by the name of its tensor and its offsets.
_Places = dict[tuple[str, tuple[int, ...]], Record]


def is_distcp(entries: Sequence[str]) -> bool:
    """Return whether the entries of a folder are those of such a checkpoint, and of no other."""
    return METADATA_NAME in entries and not any(name.endswith(".safetensors") for name in entries)


def read_distcp(files: Files) -> tuple[CheckpointIndex, list[Problem]]:
    """Return the index of such a checkpoint and everything that is wrong with it.

    What is no tensor (step counts, settings) has no place in a safetensors file: it is left out, with a warning.

    Raises:
        StorageError: If a file is there but cannot be read.
    """
    reading = _Reading(files)
    try:
        reading.read()
    except BadPickleError as error:
        reading.findings.add("fatal", str(error))
    except CheckpointNotFoundError as error:
        reading.findings.problems.append(Problem(str(error), METADATA_NAME, "missing"))
    infos = {name: reading.infos[name] for name in sorted(reading.infos)}
    order = {name: at for at, name in enumerate(infos)}
    tensors = dict(sorted(reading.tensors.items(), key=lambda item: (order[item[1].file], item[1].span)))
    return CheckpointIndex(files.root, tensors, infos, {}), reading.findings.problems


class _Reading:
    """One checkpoint while it is read."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.findings = Findings(METADATA_NAME)
        self.tensors: dict[str, TensorInfo] = {}
        self.infos: dict[str, FileInfo] = {}

    def read(self) -> None:
        """Read the metadata and look at every archive.

        Raises:
            BadPickleError: If the metadata is not what it should be.
            CheckpointNotFoundError: If a file is missing.
        """
        size = self.files.size(METADATA_NAME)
        if size > MAX_METADATA_BYTES:
            raise BadPickleError(f"has {size} bytes; more than {MAX_METADATA_BYTES} are not read")
        metadata = read_pickle(self.files.read(METADATA_NAME, 0, size), _expected)
        if not isinstance(metadata, Record) or not metadata.name.endswith(".Metadata"):
            raise BadPickleError("does not describe a distributed checkpoint")
        places = _places(metadata)
        others = []
        for name, entry in _pairs(metadata.attribute("state_dict_metadata")):
            if not isinstance(name, str) or not isinstance(entry, Record):
                raise BadPickleError("has an entry that is no tensor's")
            if entry.name.endswith(".TensorStorageMetadata"):
                self.read_tensor(name, entry, places)
            elif entry.name.endswith(".BytesStorageMetadata"):
                others.append(name)
            else:
                raise BadPickleError(f"has an entry of the unknown kind {shown(entry.name)}")
        if others:
            text = f"{len(others)} entries are no tensors and are left out: {listed(others, 5)}"
            self.findings.add("warning", text)

    def read_tensor(self, name: str, entry: Record, places: _Places) -> None:
        """Add a tensor, or say why it cannot be read."""
        where, properties = f"tensor {shown(name)!r}", entry.attribute("properties")
        state = properties.state if isinstance(properties, Record) else None
        dtype = dtype_named(state[0]) if isinstance(state, tuple) and state else None
        if dtype is None:
            self.findings.add("fatal", f"{where} has a dtype that is not supported")
            return
        pieces = []
        for box in _boxes(name, entry, places):
            try:
                pieces.append((self.locate(dtype, box), box.offsets))
            except BadArchiveError as error:
                self.findings.add(
                    "fatal", f"{where}: its box at {list(box.offsets)}, in {shown(box.place.file)}, {error}"
                )
                return
        if not pieces:
            self.findings.add("fatal", f"{where} has no boxes")
            return
        info, problems = assemble(name, pieces)
        shape = as_shape(entry.attribute("size"))
        if not problems and info.shape != shape:
            self.findings.add("fatal", f"{where} has shape {list(shape)}, but its boxes make {list(info.shape)}")
        self.findings.problems += problems
        self.tensors[name] = info

    def locate(self, dtype: str, box: _Box) -> TensorInfo:
        """Return where the bytes of a box lie.

        Raises:
            BadArchiveError: If they are not there.
        """
        file, start, num_bytes = box.place
        if file not in self.infos:  # it has no header that could tell two revisions apart
            self.infos[file] = FileInfo(self.files.size(file), 0, hashlib.sha256(b"").hexdigest())
        size = self.infos[file].size
        if start + num_bytes > size:
            raise BadArchiveError(f"ends at byte {start + num_bytes}, but the file has {size}")
        stored = read_stored_tensor(self.files, box.place)
        if (stored.dtype, stored.sizes) != (dtype, box.sizes):
            raise BadArchiveError(f"is {stored.dtype} {list(stored.sizes)}, not {dtype} {list(box.sizes)}")
        if not stored.in_order:
            raise BadArchiveError("is a transposed view, not stored in the order of its elements: save it contiguous")
        return TensorInfo(dtype, box.sizes, file, (stored.start, stored.start + tensor_bytes(dtype, box.sizes)))


def _places(metadata: Record) -> _Places:
    """Return where every box is stored, by the name of its tensor and its offsets."""
    places: _Places = {}
    for key, value in _pairs(metadata.attribute("storage_data")):
        if isinstance(key, Record) and isinstance(value, Record) and isinstance(key.attribute("fqn"), str):
            offset = key.attribute("offset")
            if offset is not None:
                places[key.attribute("fqn"), as_shape(offset)] = value
    return places


def _boxes(name: str, entry: Record, places: _Places) -> Iterator[_Box]:
    chunks = entry.attribute("chunks")
    if not isinstance(chunks, list):
        raise BadPickleError(f"tensor {shown(name)!r} has no list of boxes")
    for chunk in chunks:
        if not isinstance(chunk, Record):
            raise BadPickleError(f"tensor {shown(name)!r} has a box that is none")
        offsets, sizes = as_shape(chunk.attribute("offsets")), as_shape(chunk.attribute("sizes"))
        place = places.get((name, offsets))
        if place is None:
            raise BadPickleError(f"tensor {shown(name)!r}: nothing says where its box at {list(offsets)} is stored")
        if place.attribute("transform_descriptors"):
            raise BadPickleError(f"tensor {shown(name)!r} is stored transformed (compressed, for example)")
        file, start, length = (place.attribute(key) for key in ("relative_path", "offset", "length"))
        if type(start) is not int or type(length) is not int or min(start, length) < 0 or len(sizes) != len(offsets):
            raise BadPickleError(f"tensor {shown(name)!r}: its box at {list(offsets)} has no place in a file")
        if not isinstance(file, str) or re.fullmatch(r"[^/\\\0]+", file) is None or not file.endswith(ENDING):
            raise BadPickleError(
                f"tensor {shown(name)!r} is stored in {shown(str(file))!r}, no name of a {ENDING} file"
            )
        yield _Box(offsets, sizes, Place(file, start, length))


def _expected(name: str) -> bool:
    return bool(_OURS.fullmatch(name) or _OTHERS.fullmatch(name)) or (name.startswith("torch.") and name[6:] in DTYPES)


def _pairs(value: object) -> Pairs:
    if not isinstance(value, Pairs):
        raise BadPickleError("does not describe a distributed checkpoint")
    return value
