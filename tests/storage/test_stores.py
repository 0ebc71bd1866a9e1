"""Every place of files passes the same tests: memory, a folder, a web server, an S3 server, an Azure server."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from shardferry.storage.files import LocalFiles, MemoryFiles
from shardferry.storage.local import LocalStore
from shardferry.storage.location import locate
from shardferry.storage.memory import MemoryStore
from shardferry.testing.stores import Held, StoreTests

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.tools.azure import Container
    from tests.tools.s3 import Bucket


def write(folder: Path, contents: Mapping[str, bytes]) -> None:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


class TestMemory(StoreTests):
    def place(self, contents: Mapping[str, bytes]) -> Held:
        return Held(MemoryFiles(contents), lambda _: MemoryStore(contents))


class TestLocal(StoreTests):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def place(self, contents: Mapping[str, bytes]) -> Held:
        write(self.path, contents)
        return Held(LocalFiles(str(self.path)), lambda _: LocalStore(self.path))


class TestHttp(StoreTests):
    @pytest.fixture(autouse=True)
    def served(self, web: tuple[str, Path]) -> None:
        name = secrets.token_hex(4)
        self.url, self.path = f"{web[0]}/{name}", web[1] / name

    def place(self, contents: Mapping[str, bytes]) -> Held:
        write(self.path, contents)
        where = locate(self.url)
        return Held(where.files, where.open_store)


class TestS3(StoreTests):
    @pytest.fixture(autouse=True)
    def stored(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def place(self, contents: Mapping[str, bytes]) -> Held:
        for name, content in contents.items():
            self.bucket.put(f"ckpt/{name}", content)
        where = locate(f"s3://{self.bucket.name}/ckpt")
        return Held(where.files, where.open_store)

    def test_only_what_lies_directly_in_the_folder_is_listed(self) -> None:
        held = self.place({"a.safetensors": b"1", "sub/b.safetensors": b"2", ".git/c": b"3"})

        assert held.files.names() == (".git", "a.safetensors", "sub")


class TestAzure(StoreTests):
    @pytest.fixture(autouse=True)
    def stored(self, container: Container) -> None:
        self.container = container

    def place(self, contents: Mapping[str, bytes]) -> Held:
        for name, content in contents.items():
            self.container.put(f"ckpt/{name}", content)
        where = locate(f"az://{self.container.name}/ckpt")
        return Held(where.files, where.open_store)
