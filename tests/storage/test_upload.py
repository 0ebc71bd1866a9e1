"""An upload that does not go well: it ends in bounded time, and never counts as completed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.tools.servers import Fault, Proxy

from shardferry.errors import StorageError
from shardferry.storage.client import Patience, make_client
from shardferry.storage.upload import Room, Upload

if TYPE_CHECKING:
    from tests.tools.s3 import Bucket

IMPATIENT = Patience(stall_s=0.3, request_s=0.6, retry_s=0.6)


def started(client: Any, retry_s: float) -> Upload:  # noqa: ANN401 - also what is no client
    """Return an upload of 4 bytes that have been given to it."""
    room = Room(1 << 20, lambda _: None)
    upload = Upload(client, "a", "s3://bucket/a", size=4, room=room, is_confirmed=False, retry_s=retry_s)
    upload.write(np.zeros(4, np.uint8), lambda: None)
    return upload


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_upload_whose_thread_has_died_is_not_completed() -> None:
    with pytest.raises(StorageError, match="s3://bucket/a: the upload ended early"):
        started(object(), 1.0).complete()


def test_what_cannot_be_begun_is_begun_again_only_for_the_time_given(bucket: Bucket, faulty: Proxy) -> None:
    faulty.fault = Fault("stall", match="POST")
    upload = started(make_client(f"s3://{bucket.name}", IMPATIENT, retries=False), retry_s=0.0)

    with pytest.raises(StorageError, match="s3://bucket/a"):
        upload.settle(upload.raise_if_failed)

    assert faulty.requests("POST") == 1


def test_what_has_been_given_up_is_not_begun_again(bucket: Bucket, faulty: Proxy) -> None:
    faulty.fault = Fault("stall", match="POST")
    upload = started(make_client(f"s3://{bucket.name}", IMPATIENT, retries=False), retry_s=60.0)

    upload.abort()

    assert faulty.requests("POST") <= 1
    assert not bucket.uploads()
