"""What a store does wrong is made good by asking again, or is one clear error; two contents are never mixed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.tools.servers import Fault, Proxy, proxy

from shardferry.errors import CheckpointChangedError, CheckpointError, CheckpointNotFoundError, StorageError
from shardferry.execute.open import open_checkpoint
from shardferry.format.index import FileInfo
from shardferry.storage.client import OPEN_PATIENCE, PATIENCE, Patience
from shardferry.storage.location import locate
from shardferry.storage.object import ObjectFile, ObjectFiles
from shardferry.storage.objecttarget import WRITE_PATIENCE
from shardferry.storage.source import CHUNK_BYTES, ObjectSource, Pin
from shardferry.storage.url import redact_all

if TYPE_CHECKING:
    from pathlib import Path

    from tests.tools.s3 import Bucket

CONTENT = bytes(np.random.default_rng(3).integers(0, 256, 5_000_000, np.uint8))
SHORT = Patience(stall_s=0.5, request_s=1.0, retry_s=2.0)


@pytest.fixture
def stored(bucket: Bucket, faulty: Proxy) -> tuple[ObjectFile, Bucket]:
    """Give a file as it is after its header was read, reached through the proxy."""
    bucket.put("ckpt/a.safetensors", CONTENT)
    source = ObjectSource(f"s3://{bucket.name}/ckpt", SHORT)
    files = ObjectFiles(source, SHORT)
    pin = Pin(files.size("a.safetensors"), files.version("a.safetensors"))
    faulty.reset()
    return ObjectFile(source, "a.safetensors", pin, SHORT), bucket


def read(file: ObjectFile) -> tuple[bytes, int]:
    """Return the file's bytes, read in five pieces, and how many requests that took."""
    out = np.zeros(len(CONTENT), np.uint8)
    requests: list[int] = []
    for start in range(0, len(out), 1_000_000):
        file.read_into(out[start : start + 1_000_000], start, lambda _, count: requests.append(count))
    return out.tobytes(), sum(requests)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", every=2, code=503),
        Fault("status", every=3, code=500),
        Fault("status", every=2, code=429),
        Fault("status", every=2, code=408),
        Fault("reset", every=2),
        Fault("truncate", every=2),
        Fault("drip", every=3, times=1),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.code}",
)
def test_what_passes_is_asked_for_again(stored: tuple[ObjectFile, Bucket], faulty: Proxy, fault: Fault) -> None:
    faulty.fault = fault

    content, requests = read(stored[0])

    assert content == CONTENT
    assert requests == 5 + fault.done
    assert fault.done
    assert len(faulty.log) == requests


def test_a_broken_answer_is_continued_where_it_ended(stored: tuple[ObjectFile, Bucket], faulty: Proxy) -> None:
    faulty.fault = Fault("truncate", times=1)
    out = np.zeros(len(CONTENT), np.uint8)

    stored[0].read_into(out, 0, lambda *_: None)

    starts = [int(line.partition("bytes=")[2].partition("-")[0]) for line in faulty.log]
    assert out.tobytes() == CONTENT
    assert starts[0] == 0
    assert starts[1] > 0


def test_the_time_that_a_callback_takes_is_not_held_against_the_store(
    stored: tuple[ObjectFile, Bucket], faulty: Proxy
) -> None:
    breaking = faulty.fault = Fault("truncate", times=1)
    out = np.zeros(3 * CHUNK_BYTES, np.uint8)  # of the half that comes there is one chunk

    def take_long_before_two_failures(num_bytes: int, _: int) -> None:
        if num_bytes and faulty.fault is breaking:
            faulty.fault = Fault("status", times=1)
            time.sleep(SHORT.retry_s)

    stored[0].read_into(out, 0, take_long_before_two_failures)

    assert out.tobytes() == CONTENT[: len(out)]
    assert len(faulty.log) == 3


def test_every_request_is_made_again_once(stored: tuple[ObjectFile, Bucket], faulty: Proxy) -> None:
    bucket = stored[1]
    faulty.fault = Fault("status", times=1)

    files = ObjectFiles(ObjectSource(f"s3://{bucket.name}/ckpt", SHORT), SHORT._replace(retry_s=0.0))

    assert files.size("a.safetensors") == len(CONTENT)


@pytest.mark.parametrize("patience", [PATIENCE, OPEN_PATIENCE, WRITE_PATIENCE])
def test_a_store_is_given_up_within_the_time_that_a_caller_gives(patience: Patience) -> None:
    assert patience.within(600.0) == patience
    for timeout_s in (1.0, 30.0, 600.0):
        short = patience.within(timeout_s)
        assert short.retry_s + short.request_s <= timeout_s + 1e-9  # the last request begins before `retry_s`
        assert short.stall_s <= short.request_s <= short.retry_s


@pytest.mark.parametrize("kind", ["drip", "trickle", "status"])
def test_what_does_not_pass_is_an_error_in_bounded_time(
    stored: tuple[ObjectFile, Bucket], faulty: Proxy, kind: str
) -> None:
    faulty.fault = Fault(kind)
    began = time.monotonic()

    with pytest.raises(StorageError, match=r"ckpt/a\.safetensors: gave up after \d+ failed requests"):
        read(stored[0])

    assert time.monotonic() - began < 5 * (SHORT.retry_s + SHORT.request_s)


@pytest.mark.parametrize("kind", ["etag", "length"])
def test_an_answer_about_another_object_is_a_change(
    stored: tuple[ObjectFile, Bucket], faulty: Proxy, kind: str
) -> None:
    faulty.fault = Fault(kind, first=2)

    with pytest.raises(CheckpointChangedError, match=r"ckpt/a\.safetensors has changed since it was opened"):
        read(stored[0])


def test_an_object_that_was_overwritten_is_a_change(stored: tuple[ObjectFile, Bucket]) -> None:
    file, bucket = stored
    bucket.put("ckpt/a.safetensors", CONTENT[::-1])  # of the same size: only its ETag tells

    with pytest.raises(CheckpointChangedError, match=r"ckpt/a\.safetensors has changed since it was opened"):
        read(file)


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        (404, CheckpointChangedError, "missing: no such object; it was there when the checkpoint was opened"),
        (403, StorageError, r"access was denied \(403\).*credentials"),
        (401, StorageError, "access was denied"),
    ],
)
def test_what_asking_again_cannot_help_is_an_error_at_once(
    stored: tuple[ObjectFile, Bucket], faulty: Proxy, code: int, error: type[Exception], said: str
) -> None:
    faulty.fault = Fault("status", code=code, first=1)

    with pytest.raises(error, match=said):
        read(stored[0])

    assert len(faulty.log) == 2


def test_a_missing_folder_and_a_missing_bucket_are_said_to_be_missing(bucket: Bucket) -> None:
    with pytest.raises(CheckpointNotFoundError, match=rf"s3://{bucket.name}/none holds no object"):
        locate(f"s3://{bucket.name}/none").files.names()
    with pytest.raises(CheckpointNotFoundError, match="s3://no-such-bucket/x"):
        locate("s3://no-such-bucket/x").files.names()


def test_hundreds_of_headers_take_one_small_request_each(bucket: Bucket, faulty: Proxy) -> None:
    for at in range(20):
        bucket.put(f"many/{at}.safetensors", CONTENT[:300_000])
    files = locate(f"s3://{bucket.name}/many").files

    for at in range(20):
        assert files.size(f"{at}.safetensors") == 300_000
        assert files.read(f"{at}.safetensors", 0, 128 * 1024) == CONTENT[: 128 * 1024]

    assert faulty.requests("GET") == 20
    assert faulty.sent == 20 * 128 * 1024


def test_opening_a_tensor_file_asks_for_nothing(bucket: Bucket, faulty: Proxy) -> None:
    store = locate(f"s3://{bucket.name}/x").open_store({"a.safetensors": FileInfo(10, 8, "", '"tag"')})

    with store.open("a.safetensors") as file:
        assert file.size == 10

    assert not faulty.log


def test_neither_messages_nor_roots_show_credentials(web: tuple[str, object]) -> None:
    address = web[0].partition("//")[2]
    where = locate(f"http://me:hidden@{address}/none?X-Amz-Signature=hidden#hidden")

    with pytest.raises(CheckpointNotFoundError) as caught:
        where.files.names()

    assert where.root == f"http://{address}/none"
    assert "hidden" not in str(caught.value)
    assert "hidden" not in redact_all("GET https://a:hidden@b/c?hidden: failed, then gs://x/y?hidden")


def test_a_web_server_that_ignores_ranges_is_named(web: tuple[str, Path]) -> None:
    (web[1] / "whole.safetensors").write_bytes(CONTENT)
    with proxy(web[0]) as state:
        state.fault = Fault("whole")
        files = ObjectFiles(ObjectSource(state.url, SHORT), SHORT)

        with pytest.raises(StorageError, match=r"whole\.safetensors: the server does not answer requests for a part"):
            files.size("whole.safetensors")


def test_a_refusal_does_not_show_the_query_of_a_signed_url(web: tuple[str, Path]) -> None:
    (web[1] / "broken.safetensors").write_bytes(b"12345678 no header")

    with pytest.raises(CheckpointError, match=r"broken\.safetensors") as caught:
        open_checkpoint(f"{web[0]}/broken.safetensors?X-Amz-Signature=hidden")

    assert "hidden" not in str(caught.value)
