"""Opens a checkpoint: a path becomes an index, an error that lists everything wrong, or warnings.

Nothing but headers and an index file is read. This is the only place that decides, from the caller's `strict`, what a
problem means.
"""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardferry.errors import CheckpointNotFoundError, CheckpointWarning, InvalidInputError, StorageError
from shardferry.format.checkpoint import read_checkpoint
from shardferry.format.problem import Problem, refusal, remarks
from shardferry.format.savenames import outer_problems
from shardferry.storage.files import LocalFiles
from shardferry.storage.location import Location, is_remote, local_path, locate
from shardferry.storage.url import redact

if TYPE_CHECKING:
    from shardferry.format.index import CheckpointIndex


def open_checkpoint(
    path: str | os.PathLike[str], *, strict: bool = True, variant: str | None = None, timeout_s: float = math.inf
) -> CheckpointIndex:
    """Return the index of a checkpoint after reading and checking every header; no tensor is read.

    Args:
        path: A safetensors file; a folder with or without an index, a snapshot of the Hugging Face cache, a folder of
            PyTorch's rank files; or an index file. A folder with both `model.safetensors` and an index is refused:
            name one of the two. A URL of one of these: `file://`, `s3://`, `gs://`, `az://`, `http(s)://`,
            `hf://org/name[@revision]`. A bare `org/name` that is no path is looked for in the local Hugging Face cache,
            then on the Hub.
        strict: False goes on where the format forbids what common readers load; every such choice becomes a warning.
        variant: Which variant to open of a folder that holds several, e.g. `"fp16"` for `model.fp16.safetensors`.
        timeout_s: Within this a server that does not answer is an error; what is set by default is a minute and a half.

    Returns:
        Every tensor's dtype, shape, file and bytes. What is odd but harmless is in its `warnings`, and warned about.

    Raises:
        CheckpointNotFoundError: If there is no checkpoint, or files of it are missing; all are listed.
        CheckpointError: If files break the format or the index does not fit them; everything found is listed.
        StorageError: If a file is there but cannot be read.
        InvalidInputError: If `variant` is given for a single file.
    """
    index, problems = survey_checkpoint(path, variant=variant, timeout_s=timeout_s)
    error = refusal(problems, redact(os.fspath(path)), strict=strict)
    if error is not None:
        raise error
    texts = remarks(problems)
    for text in texts:
        warnings.warn(text, CheckpointWarning, stacklevel=2)
    return replace(index, warnings=texts)


def survey_checkpoint(
    path: str | os.PathLike[str], *, variant: str | None, timeout_s: float = math.inf
) -> tuple[CheckpointIndex, tuple[Problem, ...]]:
    """Return what can be made of a checkpoint and everything that is wrong with it, acceptable or not.

    The index must not be used for loading while a problem of severity `fatal` or `missing` is among them.

    Raises:
        CheckpointNotFoundError: If there is nothing at `path`.
        StorageError: If a file is there but cannot be read.
        InvalidInputError: If `variant` is given for a single file.
    """
    where = locate(path, variant, timeout_s=timeout_s)
    check_there(where)
    if where.entry is not None and variant is not None:
        file = f"{where.root}/{where.entry}"
        raise InvalidInputError(f"variant={variant!r} chooses among the files of a folder, but {file} is a file")
    index, problems = read_checkpoint(where.files, where.entry, variant)
    return index, tuple(problems)


def survey_surroundings(path: str | os.PathLike[str]) -> tuple[Problem, ...]:
    """Return what lies beside a checkpoint and shows that a save to it is running or was interrupted.

    Nothing does in an object store: what a save puts there is inside.
    """
    if is_remote(path):
        return ()
    try:
        where = Path(local_path(path)).resolve()
        return tuple(outer_problems(LocalFiles(str(where.parent)).names(), where.name))
    except (CheckpointNotFoundError, StorageError, ValueError):
        return ()  # who may not list the parent sees the checkpoint all the same; ValueError: a NUL in the path


def check_there(where: Location) -> None:
    """Check that the file a path names is there; a folder is taken to be.

    Raises:
        CheckpointNotFoundError: If it is not; says what an interrupted save has left in its place.
        StorageError: If it cannot be looked at.
    """
    if where.entry is None:
        return
    try:
        where.files.size(where.entry)
    except CheckpointNotFoundError as error:
        beside = survey_surroundings(f"{where.root}/{where.entry}")
        if not beside:
            raise
        raise CheckpointNotFoundError(f"{error}; beside it, {beside[0].message}") from error
