"""What one save does to a target and to whatever else lies there."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.checkpoints import INDEX, write_files
from tests.storage.saving import (
    LACKS,
    NAMING,
    SINGLE,
    Killed,
    checkpoint,
    leftovers,
    limited,
    save,
    seen_by_others,
    seen_by_us,
)

from shardferry.errors import CheckpointExistsError, CheckpointNotFoundError, InvalidInputError, StorageError
from shardferry.execute.open import open_checkpoint, survey_surroundings
from shardferry.format.oldfiles import Naming, is_checkpoint_file
from shardferry.format.savenames import journal_name, parse_sibling, sibling_name
from shardferry.plan.publish import choose_protocol
from shardferry.storage.journal import read_journal
from shardferry.storage.place import Place
from shardferry.storage.publish import Publication, claim_target, discard_files
from shardferry.storage.recover import recover
from shardferry.storage.renames import LocalFilesystem
from shardferry.storage.target import survey_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ONE, TWO, THREE = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))
OLD = checkpoint(ONE, TWO, THREE, seed=1)
NEW = checkpoint("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", seed=2)
NEW_WEIGHTS = {name: data for name, data in NEW.items() if name != INDEX}
# Every protocol that can replace.
REPLACING = [protocol for protocol in LACKS if protocol != "in place"]


def files_in(target: Path) -> set[str]:
    return {entry.name for entry in target.iterdir()}


def shard_names(target: Path) -> set[str]:
    return {name for name in files_in(target) if is_checkpoint_file(name, NAMING)}


@pytest.mark.parametrize("protocol", REPLACING)
def test_no_old_file_stays(tmp_path: Path, protocol: str) -> None:
    target = write_files(tmp_path / "out", OLD | {SINGLE: checkpoint(SINGLE, seed=3)[SINGLE]})
    assert save(limited(LACKS[protocol]), target, NEW) == ()
    assert (files_in(target), leftovers(target)) == (set(NEW), [])
    assert seen_by_us(target) == seen_by_others(target) == NEW_WEIGHTS


@pytest.mark.parametrize("protocol", REPLACING)
def test_a_log_held_open_keeps_growing(tmp_path: Path, protocol: str) -> None:
    target = write_files(tmp_path / "out", OLD | {"train.log": b"one\n", "runs/events": b"one\n"})
    with (target / "train.log").open("ab") as log, (target / "runs/events").open("ab") as events:
        save(limited(LACKS[protocol]), target, NEW)
        for file in (log, events):
            file.write(b"two\n")
    assert (target / "train.log").read_bytes() == (target / "runs/events").read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("protocol", [*REPLACING, "in place"])
def test_a_cache_is_never_written_through_a_link(tmp_path: Path, protocol: str) -> None:
    blobs = write_files(tmp_path / "blobs", {"config": b"{}", "weights": OLD[ONE]})
    target = write_files(tmp_path / "snapshots/abc", {"notes": b""})
    (target / "config.json").symlink_to("../../blobs/config")
    if protocol != "in place":
        (target / SINGLE).symlink_to("../../blobs/weights")
    place_names = {"config.json": b'{"a": 1}'} if protocol != "in place" else {}
    save(limited(LACKS[protocol]), target, checkpoint(SINGLE, seed=4) | place_names)
    assert (blobs / "config").read_bytes() == b"{}"
    assert (blobs / "weights").read_bytes() == OLD[ONE]
    assert not (target / SINGLE).is_symlink()


@pytest.mark.parametrize("protocol", REPLACING)
def test_a_linked_target_stays_a_link(tmp_path: Path, protocol: str) -> None:
    write_files(tmp_path / "step-10", OLD)
    (tmp_path / "latest").symlink_to("step-10")
    save(limited(LACKS[protocol]), tmp_path / "latest", NEW)
    assert (tmp_path / "latest").is_symlink()
    assert seen_by_us(tmp_path / "step-10") == NEW_WEIGHTS


def test_a_link_to_nothing_names_the_place_to_make(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("step-10")
    save(limited(), tmp_path / "latest", NEW)
    assert seen_by_us(tmp_path / "step-10") == NEW_WEIGHTS


def test_missing_parents_are_made(tmp_path: Path) -> None:
    save(limited(), tmp_path / "a/b/out", NEW)
    assert seen_by_us(tmp_path / "a/b/out") == NEW_WEIGHTS


@pytest.mark.parametrize("protocol", REPLACING)
def test_permissions_of_the_directory_stay(tmp_path: Path, protocol: str) -> None:
    target = write_files(tmp_path / "out", OLD)
    target.chmod(0o2750)
    save(limited(LACKS[protocol]), target, NEW)
    assert target.stat().st_mode & 0o7777 == 0o2750


@pytest.mark.parametrize("protocol", REPLACING)
def test_what_arrives_while_files_are_written_stays(tmp_path: Path, protocol: str) -> None:
    target = tmp_path / "out"

    def arrive(what: str) -> None:
        if what == "publish":
            write_files(target, {"late.json": b"{}", "late/events": b"here"})

    save(limited(LACKS[protocol], arrive), target, NEW)
    assert ((target / "late.json").read_bytes(), (target / "late/events").read_bytes()) == (b"{}", b"here")
    assert (seen_by_us(target), leftovers(target)) == (NEW_WEIGHTS, [])


@pytest.mark.parametrize("protocol", ["swap", "swap without links"])
def test_a_target_made_anew_in_the_gap_is_taken_in(tmp_path: Path, protocol: str) -> None:
    target = write_files(tmp_path / "out", OLD)
    late = iter([{"late.json": b"{}"}])

    def arrive(what: str) -> None:
        if what.startswith("rename ") and what.endswith(f"staging -> {target}") and not target.exists():
            write_files(target, next(late, {}))

    save(limited(LACKS[protocol], arrive), target, NEW)
    assert (target / "late.json").read_bytes() == b"{}"
    assert (seen_by_us(target), leftovers(target)) == (NEW_WEIGHTS, [])


@pytest.mark.parametrize("protocol", ["exchange", "swap"])
def test_the_later_version_of_a_file_replaced_meanwhile_stays(tmp_path: Path, protocol: str) -> None:
    target = write_files(tmp_path / "out", OLD | {"state.json": b"1"})

    def replace_file(what: str) -> None:
        if what.startswith("copy_mode"):
            return
        if f"staging/{journal_name('0001', 'published')}" in what and (target / "state.json").read_bytes() == b"1":
            (target / "state.tmp").write_bytes(b"2")
            os.utime(target / "state.tmp", (time.time() + 5, time.time() + 5))
            (target / "state.tmp").rename(target / "state.json")

    save(limited(LACKS[protocol], replace_file), target, NEW)
    assert ((target / "state.json").read_bytes(), leftovers(target)) == (b"2", [])


def test_a_late_file_that_is_there_twice_is_kept_and_told(tmp_path: Path) -> None:
    target = write_files(tmp_path / "out", OLD)
    retired = tmp_path / sibling_name("out", "0001", "retired")

    def arrive(what: str) -> None:
        if what.startswith("rename_new") and what.endswith(str(retired)):
            (target / "log").write_bytes(b"in the new one")
            (tmp_path / sibling_name("out", "0001", "staging") / "log").write_bytes(b"in the old one")

    (remark,) = save(limited(step=arrive), target, NEW)
    assert f"'{retired}/log' is kept" in remark
    assert seen_by_us(target) == NEW_WEIGHTS
    (retired / "log").unlink()
    assert save(limited(), target, OLD, number=2) == ()
    assert leftovers(target) == []


def test_new_files_in_a_folder_that_has_foreign_files(tmp_path: Path) -> None:
    target = write_files(tmp_path / "out", {"parts/notes": b"foreign", "parts/deep/notes": b"foreign"})
    new = checkpoint("parts/a.safetensors", "parts/deep/b.safetensors", seed=5)
    for number, protocol in enumerate(REPLACING):
        save(limited(LACKS[protocol]), target, new, number=number)
        assert seen_by_us(target) == {name: data for name, data in new.items() if name != INDEX}
        assert (target / "parts/deep/notes").read_bytes() == b"foreign"
        assert leftovers(target) == []


def test_an_index_that_cannot_be_read_is_replaced_with_the_numbered_files(tmp_path: Path) -> None:
    target = write_files(tmp_path / "out", {INDEX: b"{", ONE: b"", "other.safetensors": OLD[TWO]})
    save(limited(), target, NEW)
    assert files_in(target) == {*NEW, "other.safetensors"}


def test_a_directory_in_the_way_is_named_before_anything_is_made(tmp_path: Path) -> None:
    target = tmp_path / "out"
    (target / ONE).mkdir(parents=True)
    with pytest.raises(InvalidInputError, match=f"{ONE} is a directory"):
        save(limited(), target, OLD)
    assert (files_in(target), leftovers(target)) == ({ONE}, [])


def test_a_link_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    target = write_files(tmp_path / "out", {"x": b""})
    (target / "parts").symlink_to(tmp_path)
    with pytest.raises(InvalidInputError, match="parts is no directory"):
        save(limited(), target, checkpoint("parts/a.safetensors", seed=1))


@pytest.mark.parametrize("make", [lambda path: path.write_bytes(b""), lambda path: path.symlink_to(path)])
def test_a_path_that_can_hold_no_checkpoint_is_refused(tmp_path: Path, make: object) -> None:
    assert callable(make)
    make(tmp_path / "out")
    with pytest.raises(InvalidInputError, match="out is a "):
        survey_target(str(tmp_path / "out"), NAMING)


def test_refuse_leaves_a_checkpoint_as_it_is(tmp_path: Path) -> None:
    target = write_files(tmp_path / "out", OLD)
    with pytest.raises(CheckpointExistsError):
        save(limited(), target, NEW, on_existing="refuse")
    assert {name: (target / name).read_bytes() for name in files_in(target)} == OLD
    assert leftovers(target) == []


def test_another_variant_is_foreign(tmp_path: Path) -> None:
    target = write_files(tmp_path / "out", OLD)
    state = survey_target(str(target), Naming("model", "fp16"))
    assert (state.content, state.old_files) == ("foreign", ())


@pytest.mark.parametrize(
    "name", ["model.fp16-00001-of-00002.safetensors", "model-00001-of-00002.fp16.safetensors", "model.fp16.safetensors"]
)
def test_a_variants_own_files_are_known(name: str) -> None:
    assert is_checkpoint_file(name, Naming("model", "fp16"))
    assert not is_checkpoint_file(name, Naming())


def test_in_place_is_refused_over_a_checkpoint_before_anything_is_written(tmp_path: Path) -> None:
    target = write_files(tmp_path / "out", OLD)
    with pytest.raises(InvalidInputError, match="nothing can be renamed"):
        save(limited(LACKS["in place"]), target, NEW)
    assert {name: (target / name).read_bytes() for name in files_in(target)} == OLD


def test_a_config_that_is_there_is_written_anew_in_place_and_the_journal_knows_it(tmp_path: Path) -> None:
    target = write_files(tmp_path / "out", {"config.json": b"{}", "notes": b""})
    new = NEW | {"config.json": b'{"new": 1}'}
    with pytest.raises(Killed):
        save(limited(LACKS["in place"], kill_before("unlink", "publishing")), target, new)
    (journal,) = target.glob(".shardferry-*.published")
    found = read_journal(str(journal))
    assert found is not None
    assert found.files["config.json"] == len(new["config.json"])
    save(limited(LACKS["in place"]), target, new, number=2, on_existing="refuse")
    assert {name: (target / name).read_bytes() for name in files_in(target)} == new | {"notes": b""}


def kill_before(change: str, name: str) -> Callable[[str], None]:
    def step(what: str) -> None:
        if what.startswith(change) and what.endswith(name):
            raise Killed

    return step


def test_two_saves_to_one_path_exclude_each_other(tmp_path: Path) -> None:
    first = claim_target(limited(), str(tmp_path / "out"), NAMING, "0001", forward=True)
    with pytest.raises(StorageError, match=f"another save to the same path is running by process {os.getpid()}"):
        claim_target(limited(), str(tmp_path / "out"), NAMING, "0002", forward=True)
    first.lock.release()
    claim_target(limited(), str(tmp_path / "out"), NAMING, "0002", forward=True).lock.release()
    assert leftovers(tmp_path / "out") == []


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127, "a.shardferry-0001"])
def test_names_of_any_length_have_siblings(name: str) -> None:
    sibling = sibling_name(name, "0123456789abcdef", "staging")
    assert len(sibling.encode()) <= 255
    found = parse_sibling(sibling, name)
    assert found is not None
    assert tuple(found) == ("0123456789abcdef", "staging")
    assert parse_sibling(sibling, "other") is None


@pytest.mark.parametrize("protocol", [*REPLACING, "in place"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_an_error_at_any_step_publishes_nothing_and_leaves_nothing(tmp_path: Path, protocol: str, code: int) -> None:
    old = OLD | {"config.json": b"{}"} if protocol != "in place" else {"notes": b""}
    new = NEW | {"config.json": b'{"new": 1}'}
    for at in range(1000):
        target = write_files(tmp_path / str(at) / "out", old)
        steps = iter(range(1000))

        def fail(what: str, at: int = at, steps: Iterator[int] = steps) -> None:
            if what != "release the lock" and next(steps) == at:
                raise OSError(code, os.strerror(code), what)

        try:
            remarks = save(limited(LACKS[protocol], fail), target, new)
        except OSError:
            kept = {name: (target / name).read_bytes() for name in files_in(target)}
            assert kept == old
            assert leftovers(target) == []
        else:
            assert seen_by_others(target) == NEW_WEIGHTS
            if next(steps) <= at:
                return
            assert remarks or leftovers(target) == []
        if protocol != "in place":
            assert save(limited(LACKS[protocol]), target, OLD, number=2) == ()
            assert leftovers(target) == []


@pytest.mark.parametrize(
    ("change", "doing"),
    [
        ("make_directory", "making the staged files"),
        ("config.json", "writing what belongs beside the weights"),
        (INDEX, "finishing the staged files"),
        ("exchange", "publishing the staged files"),
    ],
)
@pytest.mark.parametrize(
    ("code", "remedy"),
    [(errno.ENOSPC, "Make room"), (errno.EACCES, "Let this user write"), (errno.EIO, "See what the system's log says")],
)
def test_what_the_filesystem_refuses_is_told_with_the_target_the_step_and_what_to_do(
    tmp_path: Path, change: str, doing: str, code: int, remedy: str
) -> None:
    target = write_files(tmp_path / "out", OLD)

    def fail(what: str) -> None:
        if change in what and "probe" not in what:
            raise OSError(code, os.strerror(code), what)

    text = f"cannot save to {target}: {doing} failed: .*{os.strerror(code)}.*{change}.*{remedy}"
    with pytest.raises(StorageError, match=text):
        save(limited((), fail), target, NEW | {"config.json": b"{}"})


def test_what_other_ranks_staged_can_be_removed_by_them(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "out"), str(tmp_path), "0001")
    assert Place.from_bytes(place.to_bytes()) == place
    publication = Publication(LocalFilesystem(), place)
    publication.create([ONE, TWO])
    write_files(tmp_path, {f"{os.path.basename(place.staging)}/{ONE}": b"half"})  # noqa: PTH119
    assert discard_files(place, [ONE, TWO]) == ()
    assert not os.path.lexists(place.path_of(ONE))
    assert publication.abort() == ()
    assert leftovers(tmp_path / "out") == []


def test_a_retired_directory_of_unknown_origin_is_kept(tmp_path: Path) -> None:
    target = write_files(tmp_path / "out", OLD)
    retired = write_files(tmp_path / sibling_name("out", "0009", "retired"), {"precious": b""})
    (remark,) = recover(limited(), survey_target(str(target), NAMING), forward=True)
    assert f"'{retired}' is kept" in remark


def test_a_staged_directory_without_its_mark_is_kept(tmp_path: Path) -> None:
    target = write_files(tmp_path / "out", OLD)
    staged = write_files(tmp_path / sibling_name("out", "0009", "staging"), {"precious": b""})
    (remark,) = recover(limited(), survey_target(str(target), NAMING), forward=True)
    assert f"'{staged}' is kept" in remark


def test_a_refusing_save_is_not_blocked_by_one_that_died_before_anybody_saw_its_files(tmp_path: Path) -> None:
    target = write_files(tmp_path / "out", {"config.json": b"{}"})

    def die(what: str) -> None:
        if what.startswith("exchange") and "probe" not in what:
            raise KeyboardInterrupt

    claim = claim_target(limited(), str(target), NAMING, "0001", forward=False)
    place = Place(claim.state.path, claim.state.home, "0001")
    publication = Publication(limited(step=die), place)
    publication.create(list(NEW))
    write_files(tmp_path, {f"{os.path.basename(place.staging)}/{name}": data for name, data in NEW_WEIGHTS.items()})  # noqa: PTH119
    publication.seal({name: len(data) for name, data in NEW_WEIGHTS.items()}, (INDEX, NEW[INDEX]))
    state = survey_target(str(target), NAMING)
    with pytest.raises(KeyboardInterrupt):
        publication.publish(state, choose_protocol(state, claim.capabilities))
    claim.lock.close()
    save(limited(), target, OLD, number=2, on_existing="refuse")
    assert seen_by_us(target) == {name: OLD[name] for name in (ONE, TWO, THREE)}


def test_opening_says_when_a_save_was_interrupted_while_it_put_files_in_place(tmp_path: Path) -> None:
    target = write_files(tmp_path / "out", OLD | {journal_name("0001", "publishing"): b""})
    with pytest.raises(CheckpointNotFoundError, match="Save to this path again"):
        open_checkpoint(target)


def test_opening_a_path_that_a_dead_save_has_emptied_says_so(tmp_path: Path) -> None:
    write_files(tmp_path / sibling_name("out", "0001", "retired"), OLD)
    with pytest.raises(CheckpointNotFoundError, match="running or was interrupted"):
        open_checkpoint(tmp_path / "out")


def test_what_lies_beside_a_checkpoint_is_told(tmp_path: Path) -> None:
    target = write_files(tmp_path / "out", OLD)
    assert survey_surroundings(target) == ()
    name = sibling_name("out", "0001", "staging")
    (tmp_path / name).mkdir()
    assert [(one.file, one.severity) for one in survey_surroundings(target)] == [(name, "verify")]


def test_a_reader_finds_a_checkpoint_at_every_moment_of_many_exchanges(tmp_path: Path) -> None:
    target = write_files(tmp_path / "out", checkpoint(SINGLE, seed=0))
    versions = [checkpoint(SINGLE, seed=seed)[SINGLE] for seed in range(20)]
    seen: list[bytes] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.append((target / SINGLE).read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for number, data in enumerate(versions):
        save(limited(), target, {SINGLE: data}, number=number)
    done.set()
    reader.join(timeout=60)
    assert not reader.is_alive()
    assert set(seen) <= set(versions)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A mount point with 256 KiB."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    made = subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", "size=256k", "none", mounted], check=False, capture_output=True
    )
    if made.returncode:
        pytest.skip("mounting needs root")
    yield mounted
    subprocess.run(["/bin/umount", "-l", mounted], check=True)


def test_a_mount_point_is_saved_to_file_by_file_with_nothing_beside_it(small_disk: Path) -> None:
    write_files(small_disk, OLD | {"notes": b"foreign"})
    state = survey_target(str(small_disk), NAMING)
    assert (state.movable, state.home) == (False, str(small_disk))
    save(limited(), small_disk, NEW)
    assert files_in(small_disk) == {*NEW, "notes"}
    assert seen_by_us(small_disk) == NEW_WEIGHTS


def test_a_full_disk_leaves_the_old_checkpoint(small_disk: Path) -> None:
    target = write_files(small_disk / "out", OLD)
    big = {name: data + bytes(200_000) for name, data in NEW_WEIGHTS.items()}
    with pytest.raises(OSError, match="No space left"):
        save(limited(), target, big | {INDEX: NEW[INDEX]})
    assert {name: (target / name).read_bytes() for name in files_in(target)} == OLD
    assert leftovers(target) == []


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A folder of root's, looked at by a user who may only write to `out` in it."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "out").mkdir()
        os.chown(folder / "out", 65534, 65534)
        os.seteuid(65534)
        try:
            yield folder
        finally:
            os.seteuid(0)


def test_a_directory_whose_parent_is_not_ours_is_saved_to_with_nothing_beside_it(nobody: Path) -> None:
    target = write_files(nobody / "out", OLD | {"notes": b"foreign"})
    assert survey_target(str(target), NAMING).home == str(target)
    save(limited(), target, NEW)
    assert files_in(target) == {*NEW, "notes"}
    assert seen_by_us(target) == NEW_WEIGHTS


def test_a_place_where_nothing_can_be_made_is_named(nobody: Path) -> None:
    with pytest.raises(StorageError, match=re.escape(f"{nobody}/.other.shardferry.lock")):
        save(limited(), nobody / "other", NEW)


def test_a_directory_that_a_sticky_parent_holds_in_place_is_saved_to_file_by_file(nobody: Path) -> None:
    os.seteuid(0)
    nobody.chmod(0o1777)
    (nobody / "out").chmod(0o777)
    os.chown(nobody / "out", 1, 1)
    os.seteuid(65534)
    target = write_files(nobody / "out", {"notes": b"foreign"})
    state = survey_target(str(target), NAMING)
    assert (state.movable, state.home) == (False, str(nobody))
    save(limited(), target, NEW)
    assert files_in(target) == {*NEW, "notes"}


@pytest.mark.parametrize("protocol", REPLACING)
def test_names_are_on_the_disk_before_the_change_and_the_change_before_anything_old_goes(
    tmp_path: Path, protocol: str
) -> None:
    target = write_files(tmp_path / "out", OLD)
    steps: list[str] = []
    save(limited(LACKS[protocol], steps.append), target, NEW)
    steps = steps[steps.index("publish") :]
    staging = tmp_path / sibling_name("out", "0001", "staging")
    change = f"-> {target}/{INDEX}" if protocol == "files" else f" {target}"
    changed = next(at for at, step in enumerate(steps) if str(staging) in step and step.endswith(change))
    if protocol == "files":
        assert steps[changed - 1] == f"sync_directory {target}"
        assert steps[changed + 1] == f"sync_directory {target}"
    else:
        assert f"sync_directory {staging}" in steps[:changed]
        assert f"sync_directory {tmp_path}" == steps[changed + 1]
    assert all(not step.startswith("unlink") for step in steps[:changed])


def test_the_index_is_written_after_everything_else_and_then_the_names_are_synced(tmp_path: Path) -> None:
    steps: list[str] = []
    save(limited(step=steps.append), tmp_path / "out", NEW | {"config.json": b"{}"})
    staging = tmp_path / sibling_name("out", "0001", "staging")
    index = steps.index(f"write_file {staging}/{INDEX}")
    assert f"write_file {staging}/config.json" in steps[:index]
    written = [step for step in steps[index + 1 :] if step.startswith("write_file")]
    assert written == [f"write_file {staging}/{journal_name('0001', 'published')}"]
    assert f"sync_directory {staging}/." in steps[index:]


@pytest.mark.parametrize(
    ("protocol", "words"),
    [("exchange", "exchange"), ("swap", "rename "), ("files", "rename_new"), ("files", "rename ")],
)
def test_what_is_no_longer_complete_is_undone(tmp_path: Path, protocol: str, words: str) -> None:
    target = write_files(tmp_path / "out", OLD)
    staging = tmp_path / sibling_name("out", "0001", "staging")

    def die(what: str) -> None:
        if what.startswith(words) and "probe" not in what:
            raise Killed

    with pytest.raises(Killed):
        save(limited(LACKS[protocol], die), target, NEW)
    os.truncate(staging / "model-00002-of-00002.safetensors", 5)
    assert recover(limited(LACKS[protocol]), survey_target(str(target), NAMING), forward=True) == ()
    assert {name: (target / name).read_bytes() for name in files_in(target)} == OLD


def test_a_lost_staged_file_does_not_take_the_old_one_of_its_name_away(tmp_path: Path) -> None:
    target = write_files(tmp_path / "out", OLD)
    staging = tmp_path / sibling_name("out", "0001", "staging")

    def die(what: str) -> None:
        if what.startswith("rename_new"):
            raise Killed

    with pytest.raises(Killed):
        save(limited(LACKS["files"], die), target, checkpoint(ONE, TWO, seed=6))
    (staging / TWO).unlink()
    assert recover(limited(LACKS["files"]), survey_target(str(target), NAMING), forward=True) == ()
    assert {name: (target / name).read_bytes() for name in files_in(target)} == OLD
