"""What a path names, without asking anybody: local folders, URLs, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from shardferry.errors import InvalidInputError
from shardferry.execute.open import open_checkpoint
from shardferry.storage.location import is_remote, local_path, locate
from shardferry.storage.url import parse_url

if TYPE_CHECKING:
    from pathlib import Path

    from tests.tools.s3 import Bucket


@pytest.mark.parametrize(
    ("path", "root", "entry"),
    [
        ("s3://bucket/a/b/", "s3://bucket/a/b", None),
        ("s3://bucket", "s3://bucket", None),
        ("gs://bucket/a/model.safetensors", "gs://bucket/a", "model.safetensors"),
        ("az://container/a/model.safetensors.index.json", "az://container/a", "model.safetensors.index.json"),
        ("https://host:8443/a%20b/my%20model.safetensors?sig=1", "https://host:8443/a%20b", "my model.safetensors"),
        ("HTTP://host/a", "http://host/a", None),
    ],
)
def test_urls_name_a_folder_or_a_file_in_one(path: str, root: str, entry: str | None) -> None:
    where = locate(path)

    assert (where.root.lower() if path.isupper() else where.root, where.entry) == (root, entry)
    assert not where.is_local
    assert is_remote(path)


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    url = f"file://{str(folder).replace(' ', '%20')}"

    assert locate(url).root == str(folder)
    assert locate(url).is_local
    assert local_path(url) == str(folder)
    assert not is_remote(url)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("ftp://host/a", "checkpoints are not read from ftp://"),
        ("s3:///a", "names no bucket or host"),
        ("file://host/a", "only files of this machine"),
    ],
)
def test_other_urls_are_refused_with_what_there_is(path: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        locate(path)


def test_where_a_local_path_is_needed_a_url_is_refused_without_its_secrets() -> None:
    with pytest.raises(InvalidInputError, match=r"^s3://bucket/a is not on a file system of this machine"):
        local_path("s3://key:secret@bucket/a")


def test_a_signed_urls_query_goes_to_every_file_of_its_folder() -> None:
    assert parse_url("https://h/a/model.safetensors?sig=1#x").folder == "https://h/a?sig=1"


def test_credentials_are_used_although_an_index_does_not_show_them(web: tuple[str, Path]) -> None:
    root = locate(f"{web[0].replace('//', '//me:pw@')}/f?sig=1").root

    again = locate(root)

    assert root == f"{web[0]}/f"
    assert again.files._source._url.endswith("/f?sig=1")  # type: ignore[attr-defined] # noqa: SLF001 - nobody else tells


FORKING = """
import os, sys
from shardferry.storage.location import locate
locate(sys.argv[1]).files.size("a.safetensors")
child = os.fork()
if child == 0:
    try:
        locate(sys.argv[1]).files.size("a.safetensors")
    except OSError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_forked_child_is_told_instead_of_waiting_for_ever(bucket: Bucket) -> None:
    bucket.put("ckpt/a.safetensors", b"12345678")
    command = [sys.executable, "-c", FORKING, f"s3://{bucket.name}/ckpt"]

    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=dict(os.environ))

    assert "was forked from" in done.stdout
    assert "spawn or forkserver" in done.stdout


def test_without_the_extra_a_url_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setenv("AWS_REGION", "another-client-than-any-before")

    with pytest.raises(InvalidInputError, match=r"pip install 'shardferry\[cloud\]'"):
        open_checkpoint("s3://bucket/a/model.safetensors")
