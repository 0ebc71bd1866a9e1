"""The index file of a sharded Hugging Face checkpoint: which file holds which name.

Its rules are those of the Hub's own loader (relative paths below the folder, only `.safetensors`), with unique keys on
top. It is a promise, not the truth: what the files hold counts, and `checkpoint.py` compares the two.
"""

from __future__ import annotations

from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, NamedTuple

from shardferry.errors import CheckpointError
from shardferry.format.impostor import impostor
from shardferry.format.problem import Findings, Problem, listed, shown
from shardferry.format.savenames import PUBLISHING, STALE_S, describe_marker
from shardferry.format.strictjson import BadJsonError, Json, json_kind, parse_object
from shardferry.units import MIB

if TYPE_CHECKING:
    from shardferry.format.files import Files

# The Hub's tools stop here, which an index with one line per expert can exceed.
HUB_INDEX_BYTES = 10 * MIB
# A guess: room for two million tensors, and memory for it on any machine that reads such a model.
MAX_INDEX_BYTES = 256 * MIB


class HubIndex(NamedTuple):
    """What an index file says.

    Attributes:
        weight_map: File of every tensor name, file names normalised (no `.` and no empty segments).
        total_size: The `total_size` of its metadata, None if it has none.
    """

    weight_map: dict[str, str]
    total_size: Json


def read_hub_index(files: Files, name: str) -> tuple[HubIndex | None, list[Problem]]:
    """Return what the index file says, None if it can't be used, and everything that is wrong with it.

    Raises:
        StorageError: If it cannot be read.
    """
    findings = Findings(name)
    try:
        size = files.size(name)
    except CheckpointError as error:
        return None, [Problem(str(error), name, "missing")]
    if size > MAX_INDEX_BYTES:
        findings.add("fatal", f"an index of {size} bytes is above the cap of {MAX_INDEX_BYTES} bytes")
        return None, findings.problems
    return parse_hub_index(files.read(name, 0, size), name)


def parse_hub_index(raw: bytes, name: str) -> tuple[HubIndex | None, list[Problem]]:
    """Return what an index file's bytes say, None if they can't be used, and everything that is wrong with them."""
    findings = Findings(name)
    try:
        content, twins = parse_object(raw)
    except BadJsonError as error:
        what = None if raw.lstrip()[:1] == b"{" else impostor(raw)
        findings.add("fatal", f"the index {error}" + (f"; it is {what}" if what else ""))
        return None, findings.problems
    for _, keys in twins:
        findings.strict(f"duplicate keys in the index: {listed(keys, 50)}", "the last value of each counts")
    if PUBLISHING in content and "weight_map" not in content:
        begun = describe_marker(content[PUBLISHING])
        findings.add(
            "missing",
            f"a save is putting its objects in place, or was interrupted while it did ({begun}). If none is running, "
            f"save to this path again: at once if this object is removed, else after {STALE_S / 60:.0f} minutes",
        )
        return None, findings.problems
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict):
        what = json_kind(weight_map) if "weight_map" in content else "absent"
        findings.add("fatal", f'"weight_map" must be an object of tensor and file names, it is {what}')
        return None, findings.problems
    metadata = content.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return HubIndex(_checked_map(weight_map, findings), total_size), findings.problems


def refuse_file_name(file: str) -> str | None:
    """Return why a checkpoint's file must not have this name, None if it may; the rules are alike on every system."""
    windows = PureWindowsPath(file)  # takes both separators
    if windows.drive or windows.root:
        return "is an absolute path: only files in the checkpoint's folder are opened"
    if ".." in windows.parts:
        return "leads out of the folder by '..': only files in the checkpoint's folder are opened"
    if "\\" in file or "\0" in file:
        return "holds a character no portable file name has"
    if not file.endswith(".safetensors"):
        return "is no safetensors file: its name must end in .safetensors"
    return None


def _checked_map(weight_map: dict[str, Json], findings: Findings) -> dict[str, str]:
    """Return the entries with an acceptable file name; each distinct name is looked at once."""
    normal: dict[str, str | None] = {}
    checked: dict[str, str] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            findings.add("fatal", f"tensor {shown(tensor)!r}: the file name must be a string, not {json_kind(file)}")
            continue
        if file not in normal:
            wrong = refuse_file_name(file)
            normal[file] = None if wrong else str(PurePosixPath(file))
            if wrong:
                findings.add("fatal", f"tensor {shown(tensor)!r}: the file {shown(file)!r} {wrong}")
        name = normal[file]
        if name is not None:
            checked[tensor] = name
    return checked
