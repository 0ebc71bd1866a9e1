"""A bucket of a real S3 server, seen with boto3: what the tests compare with."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import boto3
from botocore.config import Config

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY, SECRET, REGION = "test-key", "test-secret-0123456789", "us-east-1"


class Bucket:
    """One bucket, and the environment in which obstore finds it."""

    def __init__(self, endpoint: str, name: str) -> None:
        """Make the bucket."""
        self.name = name
        self._s3: Any = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name=REGION,
            config=Config(s3={"addressing_style": "path"}),
        )
        self._s3.create_bucket(Bucket=name)

    @staticmethod
    def environment(endpoint: str) -> dict[str, str]:
        """Return the variables that make obstore use a server."""
        return {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": REGION,
        }

    def put(self, key: str, data: bytes) -> None:
        self._s3.put_object(Bucket=self.name, Key=key, Body=data)

    def get(self, key: str) -> bytes:
        data: bytes = self._s3.get_object(Bucket=self.name, Key=key)["Body"].read()
        return data

    def delete(self, key: str) -> None:
        self._s3.delete_object(Bucket=self.name, Key=key)

    def objects(self) -> list[str]:
        return sorted(each["Key"] for each in self._s3.list_objects_v2(Bucket=self.name).get("Contents", []))

    def uploads(self) -> list[str]:
        """Return the objects whose uploads have begun and not ended."""
        return [each["Key"] for each in self._s3.list_multipart_uploads(Bucket=self.name).get("Uploads", [])]


@contextmanager
def reaching(endpoint: str) -> Iterator[None]:
    """Let obstore use a server in this block, in a process that did not inherit the variables for it."""
    with mock.patch.dict(os.environ, Bucket.environment(endpoint)):
        yield
