"""A container of an Azure blob server that runs here (Azurite), and the environment in which obstore finds it."""

from __future__ import annotations

import base64
import hashlib
import hmac
from email.utils import formatdate
from http.client import HTTPConnection
from urllib.parse import urlsplit

import obstore
from obstore.store import AzureStore

# The account and key that every emulator has:
# https://learn.microsoft.com/azure/storage/common/storage-connect-azurite
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
VERSION = "2023-11-03"


class Container:
    """One container."""

    def __init__(self, endpoint: str, name: str) -> None:
        """Make the container."""
        self.name = name
        _create(endpoint, name)
        self._client = AzureStore(
            name,
            account_name=ACCOUNT,
            account_key=KEY,
            endpoint=f"{endpoint}/{ACCOUNT}",
            client_options={"allow_http": True},
        )

    @staticmethod
    def environment(endpoint: str) -> dict[str, str]:
        """Return the variables that make obstore use a server."""
        return {
            "AZURE_STORAGE_ENDPOINT": f"{endpoint}/{ACCOUNT}",
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        }

    def put(self, key: str, data: bytes) -> None:
        obstore.put(self._client, key, data)

    def get(self, key: str) -> bytes:
        return bytes(obstore.get(self._client, key).bytes())

    def objects(self) -> list[str]:
        return sorted(each["path"] for page in obstore.list(self._client) for each in page)


def _create(endpoint: str, name: str) -> None:
    """Make a container, which obstore cannot: a request signed as the service documents it (Shared Key)."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": VERSION}
    lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in headers.items())]
    signed = "\n".join([*lines, f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"])
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)).decode()
    connection = HTTPConnection(urlsplit(endpoint).netloc, timeout=60)
    connection.request(
        "PUT",
        f"/{ACCOUNT}/{name}?restype=container",
        headers={**headers, "Authorization": f"SharedKey {ACCOUNT}:{signature}", "Content-Length": "0"},
    )
    answer = connection.getresponse()
    assert answer.status == 201, answer.read()
    connection.close()
