"""`shardferry warm`: the page cache of one node, from headers and a mesh, without a framework."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.checkpoints import file_of, tensor, write_files

from shardferry.cli.main import main
from shardferry.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.tools.mounts import MakeMounts, SlowMounts

RULES = ("--mesh", "fsdp=2,tp=2", "--shard", r".*\.weight=0@tp")


@pytest.fixture
def mounts(make_mounts: MakeMounts, tmp_path: Path) -> Iterator[SlowMounts]:
    tensors = [tensor(name, "U8", (8, MIB)) for name in ("a.weight", "b.weight")]
    write_files(tmp_path, {"model.safetensors": file_of([*tensors, tensor("norm", "U8", (256 * KIB,))])})
    with make_mounts(tmp_path) as mounts:
        yield mounts


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["warm", *arguments])
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def drop(mounts: SlowMounts) -> str:
    mounts.drop("model.safetensors")
    mounts.reset()
    return str(mounts.paths[0])


def test_a_node_warms_what_its_ranks_read(mounts: SlowMounts, capsys: pytest.CaptureFixture[str]) -> None:
    path = drop(mounts)
    options = (*RULES, "--ranks-per-node", "1", "--rank-of-node", "3", "--cost", "local", "--json")
    code, out, _ = run(capsys, path, *options)
    report = json.loads(out)
    assert (code, report["ranks"], report["useful"]) == (0, [3], True)
    assert report["bytes_wanted"] == 8 * MIB + 256 * KIB  # one of two halves, and the norm that no rule cuts
    assert [file["strategy"] for file in report["files"]] == ["spans"]
    assert report["bytes_absent"] == 0
    assert mounts.counts()["read_bytes"] == pytest.approx(8 * MIB, rel=0.1)


def test_without_a_mesh_everything_is_warmed_and_a_second_time_is_useless(
    mounts: SlowMounts, capsys: pytest.CaptureFixture[str]
) -> None:
    path = drop(mounts)
    code, out, _ = run(capsys, path)
    assert (code, "rank 0 of 1 read 16.2 MiB in 1 files" in out) == (0, True)
    assert out.endswith("all of it is in the page cache\n")
    code, out, _ = run(capsys, path)
    assert (code, out.splitlines()[-1]) == (0, "useless: all of it is in the page cache already")


def test_the_words_tell_the_ranks_and_what_decided(mounts: SlowMounts, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, drop(mounts), *RULES, "--ranks-per-node", "2", "--rank-of-node", "1", "--cost", "network_mount"
    )
    assert code == 0
    assert out.startswith("ranks 2 to 3 of 4 read 16.2 MiB")
    assert "model.safetensors: whole, 16.3 MiB" in out or "model.safetensors: whole, 16.2 MiB" in out
    assert "at 12.0 MiB a seek cost 28.2 MiB" in out
    assert "planned for preset network_mount" in out


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((*RULES, "--ranks-per-node", "2"), 2, "the job has 2 nodes: say with --rank-of-node which one this is"),
        ((*RULES, "--ranks-per-node", "2", "--rank-of-node", "2"), 2, "the job has nodes 0 to 1"),
        ((*RULES, "--cost", "nothing"), 1, "'nothing' is neither a preset"),
        (("--mesh", "tp"), 1, "write axes with their sizes"),
        (("--mesh", "tp=2", "--shard", "weight=0@tp"), 1, "cuts no tensor"),
    ],
)
def test_a_wrong_command_line_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], code: int, message: str
) -> None:
    write_files(tmp_path, {"model.safetensors": file_of([tensor("a.weight", "U8", (8, 8))])})
    found = run(capsys, str(tmp_path), *options)
    assert (found[0], message in found[2]) == (code, True), found[2]


def test_a_server_has_no_page_cache(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "https://127.0.0.1:1/model.safetensors")
    assert (code, "goes through no page cache that could be warmed" in err) == (1, True)


def test_no_framework_is_imported(tmp_path: Path) -> None:
    write_files(tmp_path, {"model.safetensors": file_of([tensor("a.weight", "U8", (8, 8))])})
    program = (
        "import sys; from shardferry.cli.main import main\n"
        "try: main(['warm', sys.argv[1]])\n"
        "except SystemExit as end: assert not end.code\n"
        "print(sorted({'torch', 'jax', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert run.stdout.endswith("[]\n")
