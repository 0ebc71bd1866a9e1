"""Torch's own distributed checkpoints open like any other, and nothing in them is executed, however hostile."""

from __future__ import annotations

import pickle
import struct
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import shardferry
from shardferry.errors import CheckpointError, CheckpointNotFoundError, CheckpointWarning
from shardferry.format.pickled import BadPickleError, read_pickle

if TYPE_CHECKING:
    from pathlib import Path

STATE = {
    "model.w": torch.arange(12.0).reshape(3, 4),
    "model.half": torch.arange(5).bfloat16(),
    "f8": torch.arange(6).float().to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3),
    "none": torch.zeros(0, 2),
    "flag": torch.tensor([True, False]),
    "big": torch.arange(3000.0),
}


def write(folder: Path, state: dict[str, object]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("dcp") / "saved", dict(STATE))


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_tensor_is_found_where_its_bytes_are(saved: Path) -> None:
    index = shardferry.open_checkpoint(saved)
    assert set(index.tensors) == set(STATE)
    for name, info in index.tensors.items():
        assert info.shape == tuple(STATE[name].shape)
        start, stop = info.span
        assert (saved / info.file).read_bytes()[start:stop] == tensor_bytes(STATE[name]), name


def test_what_is_no_tensor_is_left_out_with_a_warning(tmp_path: Path) -> None:
    folder = write(tmp_path / "out", {"w": torch.ones(2), "step": 5, "settings": {"a": "b"}})
    with pytest.warns(CheckpointWarning, match="2 entries are no tensors and are left out: step, settings.a"):
        index = shardferry.open_checkpoint(folder)
    assert list(index.tensors) == ["w"]


def test_a_transposed_tensor_is_refused_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "out", {"t": torch.ones(3, 4).t()})
    with pytest.raises(CheckpointError, match=r"'t': its box at .* transposed view"):
        shardferry.open_checkpoint(folder)


def test_a_missing_or_short_file_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "out", {"w": torch.ones(2), "v": torch.ones(300)})
    (data,) = folder.glob("*.distcp")
    whole = data.read_bytes()
    data.write_bytes(whole[:-10])
    with pytest.raises(
        CheckpointError, match=f"in {data.name}, ends at byte {len(whole)}, but the file has {len(whole) - 10}"
    ):
        shardferry.open_checkpoint(folder)
    data.unlink()
    with pytest.raises(CheckpointNotFoundError, match=data.name):
        shardferry.open_checkpoint(folder)


@pytest.mark.filterwarnings("ignore::shardferry.errors.CheckpointWarning")
def test_no_damage_to_the_metadata_does_more_than_an_error(saved: Path, tmp_path: Path) -> None:
    metadata = (saved / ".metadata").read_bytes()
    for file in saved.glob("*.distcp"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for at in range(0, len(metadata), 3):
        for change in (metadata[:at], metadata[:at] + bytes([metadata[at] ^ 0x41]) + metadata[at + 1 :]):
            (tmp_path / ".metadata").write_bytes(change)
            with suppress(CheckpointError):
                shardferry.open_checkpoint(tmp_path)


@pytest.mark.filterwarnings("ignore::shardferry.errors.CheckpointWarning")
def test_no_damage_to_an_archive_does_more_than_an_error(saved: Path, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes((saved / ".metadata").read_bytes())
    (file,) = saved.glob("*.distcp")
    data = file.read_bytes()
    for at in range(0, len(data), 37):
        (tmp_path / file.name).write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        with suppress(CheckpointError):
            shardferry.open_checkpoint(tmp_path)


class Runs:
    """Would run a program when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("executed",)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (pickle.dumps(Runs()), "names 'builtins.print'"),
        (b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.", "names 'os.system'"),
        (b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b".", "instruction"),  # reserves a byte array
        (b"\x80\x04]\x8e" + struct.pack("<Q", 1 << 60) + b".", "instruction"),
        (b"\x80\x04X\xff\xff\xff\xffabc.", "ends at byte"),
        (b"\x80\x04R.", "takes 2 values"),
        (b"\x80\x04K\x01K\x02R.", "no function"),
        (b"\x80\x04h\x05.", "makes no sense"),
        (b"\x80\x04t.", "makes no sense"),
        (b"", "ends at byte"),
    ],
)
def test_a_pickle_that_does_more_than_describe_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(BadPickleError, match=words):
        read_pickle(data, lambda name: name == "torch.Size")


def test_a_pickle_cannot_take_more_time_or_memory_than_it_has_bytes() -> None:
    doubled = b")" + b"".join(b"\x94h" + bytes([at]) + b"\x86" for at in range(60))  # 2**60 when it is hashed
    pairs = read_pickle(b"\x80\x04}" + doubled + b"K\x01s.", lambda _: False)
    assert pairs[0][1] == 1
    far = b"\x80\x04Nr\xff\xff\xff\xff."  # an array indexed by it would take 32 GiB
    assert read_pickle(far, lambda _: False) is None
