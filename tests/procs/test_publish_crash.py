"""A process that saves is killed for real, and the next one goes on from what it finds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.checkpoints import INDEX, write_files
from tests.storage.saving import LACKS, checkpoint, leftovers, limited, save, seen_by_others, seen_by_us

from shardferry.errors import StorageError

ROOT = Path(__file__).parents[2]
ONE, TWO, THREE = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))
OLD = checkpoint(ONE, TWO, THREE, seed=1)
NEW = checkpoint("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", seed=2)
OLD_WEIGHTS, NEW_WEIGHTS = ({name: data for name, data in files.items() if name != INDEX} for files in (OLD, NEW))

# argv: what the filesystem lacks, the target, the first words of the change before which it stops, and how it stops.
PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from tests.procs.test_publish_crash import NEW
from tests.storage.saving import limited, save

lacks, target, words, ending = json.loads(sys.argv[1])

def stop(what):
    if what.startswith(words) and "probe" not in what:
        if ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        print("here", flush=True)
        sys.stdin.read()

save(limited(lacks, stop), Path(target), NEW)
print("saved")
"""


def start(protocol: str, target: Path, words: str, ending: str) -> subprocess.Popen[bytes]:
    arguments = json.dumps([sorted(LACKS[protocol]), str(target), words, ending])
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "PATH": ""},
    )


@pytest.mark.parametrize(
    ("protocol", "words", "visible"),
    [
        ("exchange", "write_file", OLD_WEIGHTS),
        ("exchange", "exchange", OLD_WEIGHTS),
        ("exchange", "rename_new", NEW_WEIGHTS),
        ("exchange", "unlink", NEW_WEIGHTS),
        ("swap", "rename ", None),
        ("files", "rename ", None),
        ("files", "remove_directory", NEW_WEIGHTS),
    ],
)
def test_a_killed_save_is_cleared_up_by_the_next(
    tmp_path: Path, protocol: str, words: str, visible: dict[str, bytes] | None
) -> None:
    target = write_files(tmp_path / "out", OLD | {"runs/events": b"foreign", "notes": b"foreign"})
    with start(protocol, target, words, "kill") as process:
        assert process.wait(timeout=60) == -9
    assert seen_by_others(target) == visible
    assert leftovers(target) != []
    verified = subprocess.run(
        [sys.executable, "-m", "shardferry.cli", "verify", target],
        check=False,
        capture_output=True,
        cwd=ROOT / "src",
        timeout=60,
    )
    assert (verified.returncode, b"interrupted" in verified.stdout + verified.stderr) == (1, True)
    assert save(limited(LACKS[protocol]), target, OLD, number=2) == ()
    assert seen_by_us(target) == OLD_WEIGHTS
    assert leftovers(target) == []
    assert {entry.name for entry in target.iterdir()} == {*OLD, "runs", "notes"}


def test_a_save_that_is_running_keeps_others_out_until_it_ends(tmp_path: Path) -> None:
    target = write_files(tmp_path / "out", OLD)
    with start("exchange", target, "exchange", "wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        with pytest.raises(StorageError, match=f"running by process {process.pid} on "):
            save(limited(), target, OLD, number=2)
        told, _ = process.communicate(timeout=60)
        assert told == b"saved\n"
    assert seen_by_us(target) == NEW_WEIGHTS
    assert leftovers(target) == []
