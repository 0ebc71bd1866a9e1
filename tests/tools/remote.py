"""Fixtures of the servers; `pytest_plugins` of the tests' root takes them in."""

from __future__ import annotations

import secrets
import shutil
from typing import TYPE_CHECKING

import pytest
from tests.tools import servers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.tools.azure import Container
    from tests.tools.google import GoogleBucket
    from tests.tools.s3 import Bucket


@pytest.fixture(scope="session")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Give the URL of an nginx and the folder that it serves."""
    if servers.find_nginx() is None:
        pytest.skip(servers.HOW_TO_GET_NGINX)
    root, home = tmp_path_factory.mktemp("served"), tmp_path_factory.mktemp("nginx")
    with servers.nginx(root, home) as url:
        yield url, root


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Give the endpoint of an S3 server."""
    with servers.s3_server(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def azure_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Give the endpoint of an Azure blob server."""
    if shutil.which("azurite-blob") is None:
        pytest.skip(servers.HOW_TO_GET_AZURITE)
    with servers.azure_server(tmp_path_factory.mktemp("azure")) as endpoint:
        yield endpoint


@pytest.fixture
def container(azure_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Container:
    """Give an empty container that obstore finds by the environment."""
    from tests.tools.azure import Container  # noqa: PLC0415 - obstore is an extra

    for name, value in Container.environment(azure_endpoint).items():
        monkeypatch.setenv(name, value)
    return Container(azure_endpoint, f"container-{secrets.token_hex(4)}")


@pytest.fixture
def google_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleBucket]:
    """Give an empty bucket as Google has it, which obstore finds by the environment."""
    from tests.tools.google import google_server  # noqa: PLC0415 - as its siblings

    with google_server() as bucket:
        for name, value in bucket.environment().items():
            monkeypatch.setenv(name, value)
        yield bucket


@pytest.fixture
def bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Give an empty bucket that obstore finds by the environment."""
    from tests.tools.s3 import Bucket  # noqa: PLC0415 - boto3 takes its time

    for name, value in Bucket.environment(s3_endpoint).items():
        monkeypatch.setenv(name, value)
    return Bucket(s3_endpoint, f"bucket-{secrets.token_hex(4)}")


@pytest.fixture
def faulty(s3_endpoint: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[servers.Proxy]:
    """Give a proxy through which obstore reaches the bucket."""
    assert bucket.name
    with servers.proxy(s3_endpoint) as state:
        monkeypatch.setenv("AWS_ENDPOINT_URL", state.url)
        yield state
