"""Saves straight into a bucket: what is there afterwards, and what is not there after a failure."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING, Literal

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from tests.tools.servers import Fault, Proxy

import shardferry.torch as sf
from shardferry.cli.main import commands
from shardferry.errors import CheckpointExistsError, CheckpointNotFoundError, InvalidInputError, StorageError
from shardferry.execute.open import open_checkpoint
from shardferry.format.oldfiles import Naming
from shardferry.format.savenames import marker_bytes
from shardferry.storage import objecttarget, upload

if TYPE_CHECKING:
    from tests.tools.azure import Container
    from tests.tools.google import GoogleBucket
    from tests.tools.s3 import Bucket

INDEX = "model.safetensors.index.json"
MARKER = marker_bytes("1f2e", "gpu-7", "2026-01-31 12:00:00 UTC")
MIB = 1 << 20
# Also of a single object: the names are in the body.
REMOVAL = r"POST .*\?delete"


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return 20 MiB in four tensors of odd sizes, a scalar and an empty one."""
    made = torch.Generator().manual_seed(seed)
    large = {f"layer.{at}": torch.rand((5 * MIB + at) // 4, generator=made) for at in range(4)}
    return {**large, "scalar": torch.tensor(seed), "empty": torch.empty(0, 3)}


def stored(bucket: Bucket, folder: str = "ckpt") -> dict[str, bytes]:
    keys = (key for key in bucket.objects() if key.startswith(f"{folder}/"))
    return {key.removeprefix(f"{folder}/"): bucket.get(key) for key in keys}


def loaded(bucket: Bucket) -> dict[str, torch.Tensor]:
    """Return what the index leads to, read by safetensors."""
    files = stored(bucket)
    names = {"model.safetensors"} if INDEX not in files else set(json.loads(files[INDEX])["weight_map"].values())
    return {name: value for file in names for name, value in load_bytes(files[file]).items()}


def assert_equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_bucket_gets_the_same_bytes_as_a_folder(bucket: Bucket, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("ckpt")
    report = sf.save_state_dict(tensors(), f"s3://{bucket.name}/ckpt", max_shard_size="8MB")
    sf.save_state_dict(tensors(), folder, max_shard_size="8MB")

    assert stored(bucket) == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert report.protocol == "upload"
    assert not report.warnings
    assert not bucket.uploads()


def test_one_file_has_no_index_and_is_what_safetensors_writes(bucket: Bucket) -> None:
    sf.save_state_dict(tensors(), f"s3://{bucket.name}/ckpt")

    assert stored(bucket) == {"model.safetensors": save_bytes(tensors(), {"format": "pt"})}


def test_what_was_saved_can_be_loaded(bucket: Bucket) -> None:
    sf.save_state_dict(tensors(), f"s3://{bucket.name}/ckpt", max_shard_size="8MB")
    empty = {name: torch.empty_like(value, device="meta") for name, value in tensors().items()}

    sf.load_state_dict(empty, f"s3://{bucket.name}/ckpt")

    assert_equal(empty, tensors())


def test_a_container_of_azure_is_saved_to_and_loaded_from(container: Container) -> None:
    url = f"az://{container.name}/ckpt"
    sf.save_state_dict(tensors(1), url, max_shard_size="8MB")
    with pytest.raises(CheckpointExistsError, match="already holds a checkpoint"):
        sf.save_state_dict(tensors(2), url)

    report = sf.save_state_dict(tensors(2), url, max_shard_size="8MB", on_existing="replace")

    assert not report.warnings  # conditional writes are honoured
    assert container.objects() == [f"ckpt/{name}" for name in (*report.files, INDEX)]
    empty = {name: torch.empty_like(value, device="meta") for name, value in tensors().items()}
    sf.load_state_dict(empty, url)
    assert_equal(empty, tensors(2))


def test_old_files_of_a_container_of_azure_are_removed(container: Container) -> None:
    url = f"az://{container.name}/ckpt"
    sf.save_state_dict(tensors(1), url, max_shard_size="8MB")

    report = sf.save_state_dict(tensors(2), url, max_shard_size="12MB", on_existing="replace")

    assert container.objects() == [f"ckpt/{name}" for name in (*report.files, INDEX)]


def test_google_takes_a_save_and_another_in_its_place(google_bucket: GoogleBucket) -> None:
    """There a write asks for the version of what it replaces, and not for the ETag."""
    url = f"gs://{google_bucket.name}/ckpt"
    sf.save_state_dict(tensors(1), url, max_shard_size="8MB")

    report = sf.save_state_dict(tensors(2), url, max_shard_size="12MB", on_existing="replace")

    assert not report.warnings  # conditional writes are honoured
    assert sorted(google_bucket.kept) == [f"ckpt/{name}" for name in (*report.files, INDEX)]
    files = {name: google_bucket.kept[f"ckpt/{name}"].data for name in report.files}
    assert_equal({name: value for data in files.values() for name, value in load_bytes(data).items()}, tensors(2))


@pytest.mark.parametrize("on_existing", ["refuse", "replace"])
def test_parts_under_way_stay_within_the_budget(bucket: Bucket, on_existing: Literal["refuse", "replace"]) -> None:
    big = {name: torch.full((50 * MIB,), at, dtype=torch.uint8) for at, name in enumerate("vw")}
    if on_existing == "replace":
        bucket.put("ckpt/model-00001-of-00002.safetensors", b"old")

    report = sf.save_state_dict(
        big, f"s3://{bucket.name}/ckpt", max_shard_size="60MB", budget_bytes=64 * MIB, on_existing=on_existing
    )

    assert 8 * MIB < report.total.peak_extra_bytes <= 64 * MIB
    assert_equal(loaded(bucket), big)


@pytest.mark.parametrize(("before", "after"), [("8MB", "1GB"), ("1GB", "8MB"), ("8MB", "8MB"), ("6MB", "12MB")])
def test_a_replaced_checkpoint_leaves_nothing_of_the_old_one(bucket: Bucket, before: str, after: str) -> None:
    url = f"s3://{bucket.name}/ckpt"
    sf.save_state_dict(tensors(1), url, max_shard_size=before)
    bucket.put("ckpt/notes.txt", b"mine")

    with pytest.raises(CheckpointExistsError, match="already holds a checkpoint"):
        sf.save_state_dict(tensors(2), url, max_shard_size=after)
    assert_equal(loaded(bucket), tensors(1))
    report = sf.save_state_dict(tensors(2), url, max_shard_size=after, on_existing="replace")

    assert_equal(loaded(bucket), tensors(2))
    index = [INDEX] if len(report.files) > 1 else []
    assert sorted(stored(bucket)) == sorted([*report.files, *index, "notes.txt"])


@pytest.mark.parametrize("old", [None, "8MB"])
@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", every=2, times=3, match="PUT"),
        Fault("reset", every=2, times=2, match="POST"),
        Fault("lost", times=1, match=r"POST .*uploadId=", code=500),
        Fault("lost", times=1, match=r"PUT .*index\.json", code=500),
        Fault("lost", first=2, times=1, match=r"PUT .*index\.json", code=500),
    ],
    ids=["part", "create", "complete", "marker", "index"],
)
def test_what_passes_is_tried_again(bucket: Bucket, faulty: Proxy, fault: Fault, old: str | None) -> None:
    url = f"s3://{bucket.name}/ckpt"
    if old:
        sf.save_state_dict(tensors(1), url, max_shard_size=old)
    fault.seen = fault.done = 0
    faulty.fault = fault

    sf.save_state_dict(tensors(), url, max_shard_size="8MB", on_existing="replace")

    assert fault.done
    assert_equal(loaded(bucket), tensors())
    if fault.match != "POST":  # nobody knows the upload whose beginning was not answered
        assert not bucket.uploads()


@pytest.mark.parametrize("old", [None, "8MB", "1GB"])
@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", first=1, match="PUT .*partNumber", code=403),
        Fault("status", match=r"PUT .*index\.json", code=403),
        Fault("status", first=1, times=1, match=r"PUT .*index\.json", code=403),
        Fault("status", match=r"POST .*uploadId=", code=403),
    ],
    ids=["part", "marker", "second marker", "complete"],
)
def test_a_failed_save_leaves_no_upload_and_the_old_checkpoint(
    bucket: Bucket, faulty: Proxy, fault: Fault, old: str | None
) -> None:
    url = f"s3://{bucket.name}/ckpt"
    if old:
        sf.save_state_dict(tensors(1), url, max_shard_size=old)
    before = stored(bucket)
    fault.seen = fault.done = 0
    faulty.fault = fault

    with pytest.raises(StorageError, match="access was denied"):
        sf.save_state_dict(tensors(2), url, max_shard_size="8MB", on_existing="replace")

    assert stored(bucket) == before
    assert not bucket.uploads()


@pytest.mark.parametrize("spared", range(4))
def test_old_files_are_not_touched_before_every_part_has_arrived(bucket: Bucket, faulty: Proxy, spared: int) -> None:
    url = f"s3://{bucket.name}/ckpt"
    sf.save_state_dict(tensors(1), url, max_shard_size="8MB")
    faulty.reset()
    faulty.fault = Fault("status", first=spared, match="PUT .*partNumber", code=403)

    with pytest.raises(StorageError, match=r"model-0000\d-of-00004.safetensors: access was denied"):
        sf.save_state_dict(tensors(2), url, max_shard_size="8MB", on_existing="replace")

    changes = [line for line in faulty.log if line.startswith(("PUT", "POST", "DELETE"))]
    assert all("?uploads=" in line or "uploadId=" in line for line in changes), changes
    assert not any(line.startswith("POST") and "uploadId=" in line for line in changes)
    assert_equal(loaded(bucket), tensors(1))


def test_a_save_that_fails_between_completions_leaves_nothing_new(bucket: Bucket, faulty: Proxy) -> None:
    faulty.fault = Fault("status", first=2, match=r"POST .*uploadId=", code=403)

    with pytest.raises(StorageError, match="access was denied"):
        sf.save_state_dict(tensors(), f"s3://{bucket.name}/ckpt", max_shard_size="8MB")

    assert not stored(bucket)
    assert not bucket.uploads()


@pytest.mark.parametrize("size", ["8MB", "1GB"])
@pytest.mark.parametrize("old", [False, True], ids=["fresh", "the same again"])
def test_of_two_saves_at_the_same_time_one_is_refused_and_nothing_is_mixed(
    bucket: Bucket, faulty: Proxy, size: str, *, old: bool
) -> None:
    """The other one has come and gone when the first wants to begin: the index is as it was, or there is none."""
    url = f"s3://{bucket.name}/ckpt"
    if old:
        sf.save_state_dict(tensors(1), url, max_shard_size=size)
    faulty.before(
        rf"PUT .*{INDEX}",
        lambda: sf.save_state_dict(tensors(2), url, max_shard_size=size, on_existing="replace"),
    )

    with pytest.raises(CheckpointExistsError, match="another save has published here"):
        sf.save_state_dict(tensors(3), url, max_shard_size=size, on_existing="replace")

    assert_equal(loaded(bucket), tensors(2))
    assert (INDEX in stored(bucket)) == (size == "8MB")
    assert not bucket.uploads()


@pytest.mark.parametrize("on_existing", ["refuse", "replace"])
def test_a_save_that_completes_its_uploads_keeps_every_other_one_out(
    bucket: Bucket, faulty: Proxy, on_existing: Literal["refuse", "replace"]
) -> None:
    url = f"s3://{bucket.name}/ckpt"
    refused: list[str] = []

    def other() -> None:
        before = stored(bucket)
        with pytest.raises(StorageError) as caught:
            sf.save_state_dict(tensors(1), url, max_shard_size="8MB", on_existing=on_existing)
        refused.append(str(caught.value))
        assert stored(bucket) == before

    faulty.before(r"POST .*00002-of-00004.*uploadId=", other)
    sf.save_state_dict(tensors(2), url, max_shard_size="8MB")

    assert "a save is publishing here, or was interrupted" in refused[0]
    assert f"begun on host {socket.gethostname()} at 20" in refused[0]
    assert f"remove {url}/{INDEX} to go on at once" in refused[0]
    assert_equal(loaded(bucket), tensors(2))


def test_a_failed_save_removes_no_object_of_another(bucket: Bucket, faulty: Proxy) -> None:
    url = f"s3://{bucket.name}/ckpt"
    first = "ckpt/model-00001-of-00004.safetensors"
    faulty.fault = Fault("status", match=r"POST .*00003-of-00004.*uploadId=", code=403)
    faulty.before(r"POST .*00003-of-00004.*uploadId=", lambda: bucket.put(first, b"of another"))

    with pytest.raises(StorageError, match="access was denied"):
        sf.save_state_dict(tensors(), url, max_shard_size="8MB")

    assert stored(bucket) == {first.removeprefix("ckpt/"): b"of another"}


def test_what_another_has_written_over_an_old_file_stays(bucket: Bucket, faulty: Proxy) -> None:
    """When the new index stands the next save may begin, while old files are still being removed."""
    url = f"s3://{bucket.name}/ckpt"
    sf.save_state_dict(tensors(1), url, max_shard_size="8MB")
    reused = "ckpt/model-00003-of-00004.safetensors"
    faulty.before(REMOVAL, lambda: bucket.put(reused, b"of another"))

    sf.save_state_dict(tensors(2), url, max_shard_size="12MB", on_existing="replace")

    assert stored(bucket).pop(reused.removeprefix("ckpt/")) == b"of another"
    assert_equal(loaded(bucket), tensors(2))


def test_old_files_that_cannot_be_removed_are_told_of_and_the_save_succeeds(bucket: Bucket, faulty: Proxy) -> None:
    url = f"s3://{bucket.name}/ckpt"
    sf.save_state_dict(tensors(1), url, max_shard_size="8MB")
    faulty.fault = Fault("status", match=REMOVAL, code=403)

    with pytest.warns(UserWarning, match=r"an old file is left: .*of-00004.safetensors: access was denied"):
        sf.save_state_dict(tensors(2), url, max_shard_size="12MB", on_existing="replace")

    assert_equal(loaded(bucket), tensors(2))


def test_a_store_that_takes_no_conditions_is_remarked_upon(bucket: Bucket, faulty: Proxy) -> None:
    faulty.fault = Fault("unconditional", match="PUT")

    with pytest.warns(UserWarning, match="does not honour conditional writes"):
        sf.save_state_dict(tensors(), f"s3://{bucket.name}/ckpt", max_shard_size="8MB")

    assert_equal(loaded(bucket), tensors())


def test_a_store_that_has_no_conditions_is_remarked_upon(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")

    with pytest.warns(UserWarning, match="does not honour conditional writes"):
        sf.save_state_dict(tensors(), f"s3://{bucket.name}/ckpt", max_shard_size="8MB")

    assert_equal(loaded(bucket), tensors())


def interrupted(bucket: Bucket) -> str:
    """Leave what a save leaves that was killed between two completions."""
    bucket.put(f"ckpt/{INDEX}", MARKER)
    bucket.put("ckpt/model-00001-of-00003.safetensors", save_bytes({"old": torch.zeros(3)}))
    return f"s3://{bucket.name}/ckpt"


def test_an_interrupted_save_is_recognised_by_readers_and_by_verify(bucket: Bucket) -> None:
    url = interrupted(bucket)

    with pytest.raises(CheckpointNotFoundError, match="a save is putting its objects in place, or was interrupted"):
        open_checkpoint(url)
    result = CliRunner().invoke(commands, ["verify", url])
    assert "begun on host gpu-7 at 2026-01-31 12:00:00 UTC" in result.stdout


@pytest.mark.parametrize("on_existing", ["refuse", "replace"])
def test_an_interrupted_save_is_taken_over_when_it_is_old(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, on_existing: Literal["refuse", "replace"]
) -> None:
    url = interrupted(bucket)
    before = stored(bucket)
    with pytest.raises(StorageError, match=r"If none is running, save again in \d+ s, or remove s3://.*index\.json to"):
        sf.save_state_dict(tensors(), url, on_existing=on_existing)
    assert stored(bucket) == before
    monkeypatch.setattr(objecttarget, "STALE_S", 0.0)

    with pytest.warns(UserWarning, match="took over from a save that was interrupted"):
        sf.save_state_dict(tensors(), url, on_existing=on_existing)

    assert list(stored(bucket)) == ["model.safetensors"]


def test_an_interrupted_saves_marker_may_be_removed_to_go_on_at_once(bucket: Bucket) -> None:
    url = interrupted(bucket)
    bucket.delete(f"ckpt/{INDEX}")

    sf.save_state_dict(tensors(), url, on_existing="replace")

    assert list(stored(bucket)) == ["model.safetensors"]


def test_the_age_of_a_marker_does_not_depend_on_this_machines_clock(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = interrupted(bucket)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 800)  # S3 refuses requests of a clock that is off by 900 s

    with pytest.raises(StorageError, match=r"interrupted \d{1,2} s ago"):
        sf.save_state_dict(tensors(), url)


@pytest.mark.parametrize("url", ["http://127.0.0.1/x", "hf://org/name"])
def test_what_cannot_be_written_to_is_refused(url: str) -> None:
    with pytest.raises(InvalidInputError, match="nothing can be saved to"):
        sf.save_state_dict(tensors(), url)


def test_a_store_that_does_not_answer_is_an_error_within_the_time_given(bucket: Bucket, faulty: Proxy) -> None:
    faulty.fault = Fault("stall", match="PUT .*partNumber")

    with pytest.raises(StorageError, match=r"ckpt/model-0000\d-of-00004\.safetensors"):
        sf.save_state_dict(tensors(), f"s3://{bucket.name}/ckpt", max_shard_size="6MB", timeout_s=4)

    assert not stored(bucket)


def test_the_verbs_of_the_command_line_take_urls(bucket: Bucket) -> None:
    url = f"s3://{bucket.name}"
    sf.save_state_dict(tensors(), f"{url}/ckpt", max_shard_size="8MB")
    bucket.put("ckpt/config.json", b"{}")

    repacked = CliRunner().invoke(
        commands, ["repack", f"{url}/ckpt", f"{url}/new", "--max-shard-size", "12MB", "--json"]
    )
    compared = CliRunner().invoke(commands, ["diff", f"{url}/ckpt", f"{url}/new"])
    shown = CliRunner().invoke(commands, ["inspect", f"{url}/new", "--json"])

    assert json.loads(repacked.stdout)["protocol"] == "upload"
    assert "config.json" in stored(bucket, "new")
    assert compared.stdout.startswith("same:")
    assert json.loads(shown.stdout)["path"] == f"{url}/new"
    assert not bucket.uploads()


def test_parts_fit_the_limits_of_s3() -> None:
    for size in (1, 8 * MIB - 1, 8 * MIB + 1, 16 * MIB - 1, 80 << 30, (80 << 30) + 1, 5 << 40):
        part = upload.part_bytes_of(size)
        assert part == size or part >= upload.MIN_PART_BYTES
        assert -(-size // part) <= upload.MAX_PARTS
        assert size % part < upload.MAX_PARTS  # what is sent last
    assert Naming().index == INDEX
