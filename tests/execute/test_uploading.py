"""Saves to a bucket whose lease runs out by a clock of the tests: renewed, lost to another save, never long enough."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from tests.tools.servers import Fault

from shardferry.errors import CheckpointExistsError, RankFailedError, StorageError
from shardferry.execute.meter import Meter
from shardferry.execute.uploading import Uploading
from shardferry.format.savenames import STALE_S
from shardferry.format.writer import TensorSpec
from shardferry.plan.packing import lay_out_checkpoint
from shardferry.plan.streams import plan_owners
from shardferry.storage import objecttarget
from shardferry.storage.objecttarget import LEASE_S, REQUEST_S, WRITE_PATIENCE
from shardferry.testing.groups import rank_outcomes, run_ranks
from shardferry.transport.solo import SoloGroup
from shardferry.transport.together import together
from shardferry.units import MIB

if TYPE_CHECKING:
    from tests.tools.s3 import Bucket
    from tests.tools.servers import Proxy

    from shardferry.transport.base import Group

NAMES = "abcd"
LAYOUT = lay_out_checkpoint(
    {name: TensorSpec("U8", (1000,)) for name in NAMES},
    max_shard_bytes=1000,
    metadata={},
    files_like=None,
    hub_limits=False,
)
INDEX = "model.safetensors.index.json"
MARKER_OR_INDEX = rf"PUT .*{INDEX}"


def completion(number: int) -> str:
    return rf"POST .*0000{number}-of-00004.*uploadId="


class Clock:
    """Stands still but for what a test adds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def run_out(self) -> None:
        self.now += LEASE_S


def save(group: Group, url: str, fill: int, clock: Clock) -> None:
    """Save four files of one tensor each, all of whose bytes are `fill`."""
    owners = plan_owners(LAYOUT.files, group.world_size)
    uploading = Uploading(group, url, LAYOUT, owners, clock)
    uploading.begin("replace", lambda _: None)

    def send() -> bytes:
        with uploading.open_files(Meter(64 * MIB)) as files:
            for file in LAYOUT.files:
                if owners[file.name] == group.rank:
                    data = np.full(file.size - len(file.header), fill, np.uint8)
                    files.get(file.name).write(data, len(file.header), lambda *_: None)
            files.sync()
        return b""

    with uploading.released():
        together(group, "write tensors", send)
        uploading.publish()


def contents(fill: int) -> dict[str, bytes]:
    """Return what is in the bucket after such a save."""
    files = {f"ckpt/{file.name}": file.header + bytes([fill]) * (file.size - len(file.header)) for file in LAYOUT.files}
    assert LAYOUT.index is not None
    return files | {f"ckpt/{INDEX}": LAYOUT.index}


def stored(bucket: Bucket) -> dict[str, bytes]:
    return {key: bucket.get(key) for key in bucket.objects()}


def test_what_begins_within_the_lease_has_ended_when_another_save_may_begin() -> None:
    longest = WRITE_PATIENCE.retry_s + objecttarget.LONGEST_PAUSE_S + WRITE_PATIENCE.request_s

    assert longest == REQUEST_S
    assert 60 < LEASE_S <= STALE_S - 2 * longest  # the last parts, then the completion


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_lease_that_runs_out_between_completions_is_renewed(bucket: Bucket, faulty: Proxy, world_size: int) -> None:
    url, clock = f"s3://{bucket.name}/ckpt", Clock()
    faulty.before(completion(1), clock.run_out)

    run_ranks(world_size, lambda group: save(group, url, 1, clock))

    steps = [line for line in faulty.log if re.search(rf"{MARKER_OR_INDEX}|POST .*uploadId=", line)]
    puts = [at for at, line in enumerate(steps) if line.startswith("PUT")]
    assert len(puts) == 4  # the first marker, twice, the second, and the index
    assert puts[:2] == [0, 1]
    assert puts[2] - puts[1] <= 1 + world_size  # of every rank at most one completion in the first lease
    assert puts[3] == len(steps) - 1
    assert stored(bucket) == contents(1)


@pytest.mark.parametrize("fill", [1, 2], ids=["of equal content", "of other content"])
def test_a_save_that_was_taken_over_completes_and_removes_nothing_more(
    bucket: Bucket, faulty: Proxy, monkeypatch: pytest.MonkeyPatch, fill: int
) -> None:
    """It stood still between two completions for so long that another one came and went."""
    url, clock = f"s3://{bucket.name}/ckpt", Clock()

    def stand_still() -> None:
        clock.run_out()
        monkeypatch.setattr(objecttarget, "STALE_S", 0.0)
        faulty.before(MARKER_OR_INDEX, lambda: save(SoloGroup(), url, fill, Clock()))

    faulty.before(completion(2), stand_still)

    with pytest.raises(CheckpointExistsError, match="another save has taken over while this one published"):
        save(SoloGroup(), url, 1, clock)

    assert stored(bucket) == contents(fill)
    assert not bucket.uploads()


def test_a_store_that_takes_longer_for_a_marker_than_it_keeps_others_out_ends_the_save_on_all(
    bucket: Bucket, faulty: Proxy
) -> None:
    url, clock = f"s3://{bucket.name}/ckpt", Clock()
    save(SoloGroup(), url, 1, clock)
    faulty.before(MARKER_OR_INDEX, clock.run_out)

    failed = rank_outcomes(2, lambda group: save(group, url, 2, clock))

    assert [type(each) for each in failed] == [StorageError, RankFailedError]
    assert all(f"more than the {LEASE_S:.0f} s in which another save can be kept out" in str(each) for each in failed)
    assert stored(bucket) == contents(1)
    assert not bucket.uploads()


class LeavesWhilePublishing:
    """A rank that is told of nothing any more when rank 0 puts the index."""

    def __init__(self, group: Group, is_published: threading.Event) -> None:
        self._group, self._is_published = group, is_published

    def __getattr__(self, name: str) -> object:
        return getattr(self._group, name)

    def exchange(self, step: str, payload: bytes) -> tuple[bytes, ...]:
        if step == "publish":
            assert self._is_published.wait(60)
            raise ConnectionAbortedError
        return self._group.exchange(step, payload)


def test_a_rank_that_does_not_know_how_publishing_ended_removes_nothing(bucket: Bucket, faulty: Proxy) -> None:
    url, is_published = f"s3://{bucket.name}/ckpt", threading.Event()
    # The marker, the marker again, the index.
    faulty.before(
        MARKER_OR_INDEX,
        lambda: faulty.before(MARKER_OR_INDEX, lambda: faulty.before(MARKER_OR_INDEX, is_published.set)),
    )

    def work(group: Group) -> None:
        one = LeavesWhilePublishing(group, is_published) if group.rank else group
        save(cast("Group", one), url, 1, Clock())

    failed = rank_outcomes(2, work)

    assert [type(each) for each in failed] == [RankFailedError, ConnectionAbortedError]
    assert stored(bucket) == contents(1)


def test_a_save_of_which_only_the_last_answer_is_lost_leaves_what_the_index_names(
    bucket: Bucket, faulty: Proxy
) -> None:
    url = f"s3://{bucket.name}/ckpt"
    # After the marker, put twice: the index, and a look whether it stands.
    faulty.fault = Fault("lost", match=f"(PUT|GET) .*{INDEX}", first=2, times=2, code=403)

    with pytest.raises(StorageError, match="access was denied"):
        save(SoloGroup(), url, 1, Clock())

    assert stored(bucket) == contents(1)
