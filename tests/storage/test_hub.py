"""Models of the Hub: the local cache where it holds one, else ranges of the files where the Hub says they are."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants
from tests.checkpoints import file_of, tensor
from tests.storage.hub_server import COMMIT, TOKEN, Hub, hub_server

from shardferry.errors import CheckpointNotFoundError, InvalidInputError, StorageError
from shardferry.execute.open import open_checkpoint
from shardferry.storage.client import Patience
from shardferry.storage.hub import HubSource
from shardferry.storage.hubpath import HubPath, parse_hub_path
from shardferry.storage.location import locate
from shardferry.storage.object import ObjectFiles

if TYPE_CHECKING:
    from collections.abc import Iterator

WEIGHTS = file_of([tensor("w", "F32", (300, 1000)), tensor("b", "I8", (5,))])
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 1200\n"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Give a Hub that `huggingface_hub` asks; these constants are what HF_ENDPOINT and the like set when it starts."""
    with hub_server({"config.json": b"{}", "model.safetensors": WEIGHTS, "old/model.safetensors": POINTER}) as state:
        monkeypatch.setattr(constants, "ENDPOINT", state.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", state.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        huggingface_hub.close_session()
        yield state
    huggingface_hub.close_session()


def cache(root: Path, commit: str = COMMIT) -> Path:
    """Put a model into a cache, as `huggingface_hub` lays one out."""
    folder = root / "models--org--model"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    (snapshot / "model.safetensors").write_bytes(WEIGHTS)
    return snapshot


@pytest.mark.parametrize(
    "path", ["hf://org/model", "org/model", "hf://org/model@main", "hf://org/model/model.safetensors"]
)
def test_a_model_is_read_by_ranges_from_where_the_hub_says(hub: Hub, path: str) -> None:
    where = locate(path)
    index = open_checkpoint(path)

    assert set(index.tensors) == {"w", "b"}
    assert index.root == f"hf://org/model@{COMMIT}"
    out = np.zeros(100, np.uint8)
    with where.open_store(index.files).open("model.safetensors") as file:
        file.read_into(out, 5000, lambda *_: None)
    assert out.tobytes() == WEIGHTS[5000:5100]
    assert hub.tokens == [None] * len(hub.tokens)
    assert not where.is_local


def test_the_hub_is_asked_once_per_file_and_again_when_the_url_has_expired(hub: Hub) -> None:
    index = open_checkpoint("hf://org/model")
    hub.log.clear()
    hub.expire_after = 3
    out = np.zeros(1000, np.uint8)

    with locate(index.root).open_store(index.files).open("model.safetensors") as file:
        for start in range(0, 7000, 1000):
            file.read_into(out, start, lambda *_: None)
            assert out.tobytes() == WEIGHTS[start : start + 1000]

    assert sum("resolve" in line for line in hub.log) == 3


def test_a_gated_model_needs_a_token_which_only_the_hub_gets(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
    with pytest.raises(StorageError, match="org/gated is gated: ask for access"):
        open_checkpoint("hf://org/gated")

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert set(open_checkpoint("hf://org/gated").tensors) == {"w", "b"}
    assert hub.tokens == [None] * len(hub.tokens)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("hf://org/none", "no such model"),
        ("hf://org/model@v9", "no such branch, tag or commit"),
        ("hf://org/model/none.safetensors", "none.safetensors is missing"),
    ],
)
def test_what_the_hub_does_not_have_is_missing(hub: Hub, path: str, said: str) -> None:
    assert hub.url
    with pytest.raises(CheckpointNotFoundError, match=said):
        open_checkpoint(path)


def test_a_pointer_in_the_place_of_a_large_file_is_recognised(hub: Hub) -> None:
    assert hub.url
    with pytest.raises(ValueError, match="LFS pointer"):
        open_checkpoint("hf://org/model/old/model.safetensors")


@pytest.mark.parametrize("path", ["org/model", "hf://org/model", f"hf://org/model@{COMMIT}", "hf://org/model@main"])
def test_the_local_cache_is_taken_without_asking(hub: Hub, path: str) -> None:
    snapshot = cache(Path(constants.HF_HUB_CACHE))

    where = locate(path)

    assert where.root == str(snapshot)
    assert where.is_local
    assert not hub.log


def test_offline_only_the_cache_is_looked_at(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    with pytest.raises(CheckpointNotFoundError, match="HF_HUB_OFFLINE"):
        open_checkpoint("hf://org/model")
    with pytest.raises(CheckpointNotFoundError, match="org/model"):
        open_checkpoint("org/model")
    assert not hub.log


def test_a_folder_of_that_name_wins(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "org" / "model" / "model.safetensors").write_bytes(WEIGHTS)
    monkeypatch.chdir(tmp_path)

    assert locate("org/model").root == str(tmp_path / "org" / "model")
    assert not hub.log


@pytest.mark.parametrize("path", ["hf://org", "hf://../x", "hf://org/na me", "hf://org/name@"])
def test_a_path_that_names_no_model_is_refused(path: str) -> None:
    with pytest.raises(InvalidInputError, match="hf://org/name"):
        locate(path)


def test_names_and_revisions_are_told_apart() -> None:
    assert parse_hub_path("org/name@refs") == HubPath("org/name", "refs", None)
    assert parse_hub_path("org/name/file.safetensors") is None
    assert parse_hub_path("./org/name") is None


@pytest.mark.parametrize("revision", ["main", COMMIT], ids=["description", "file"])
def test_a_hub_that_does_not_answer_is_an_error_in_bounded_time(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, revision: str
) -> None:
    assert hub.url
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        patience = Patience(stall_s=0.2, request_s=0.4, retry_s=0.4)
        files = ObjectFiles(HubSource(HubPath("org/model", revision, None), patience), patience)
        began = time.monotonic()

        with pytest.raises(StorageError, match=r"hf://org/model.*gave up after \d+ failed requests"):
            files.size("model.safetensors")

        assert time.monotonic() - began < 8


def test_the_command_line_reads_from_the_endpoint_of_the_environment(hub: Hub) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "shardferry.cli", "verify", "hf://org/model"]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)

    assert done.stdout == "ok (files read: 1, tensors found: 2)\n", done.stderr
