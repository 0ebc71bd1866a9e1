"""What one process of a JAX job does wrong, all hear of as an error that names it."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import shardferry.jax as sf

if TYPE_CHECKING:
    from pathlib import Path

    from .pool import JaxJobs

ROWS, COLUMNS = 256, 1024
LATE_S = 20


def make(folder: Path) -> str:
    array = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    save_file({"w": array, "v": array[:1]}, folder / "model.safetensors")
    return str(folder)


def target() -> dict[str, jax.ShapeDtypeStruct]:
    mesh = Mesh(np.array(jax.devices()), ("all",))
    cut, whole = NamedSharding(mesh, PartitionSpec("all")), NamedSharding(mesh, PartitionSpec())
    return {
        "w": jax.ShapeDtypeStruct((ROWS, COLUMNS), np.float32, sharding=cut),
        "v": jax.ShapeDtypeStruct((1, COLUMNS), np.float32, sharding=whole),
    }


def load_with_a_tree_of_its_own(path: str) -> None:
    wanted = target()
    if jax.process_index() == 1:
        wanted["w"] = jax.ShapeDtypeStruct((ROWS, COLUMNS), np.int64)
    sf.load(path, wanted)


def load_after_a_failure(path: str) -> list[int]:
    """Fail while the others wait in the exchange, then load well: what follows must not meet what was left behind."""
    nodes = [0] * jax.process_count()

    def fail(progress: sf.Progress) -> None:
        raise OSError(f"the cable of process {progress.rank} is out")

    try:
        sf.load(
            path,
            target(),
            read_once="always",
            node_of_rank=nodes,
            on_progress=fail if jax.process_index() == 1 else None,
        )
    except (OSError, RuntimeError) as error:
        assert "the cable of process 1 is out" in str(error)  # noqa: PT017 - each process has an error of its own
    else:
        raise AssertionError("the load succeeded")
    made = sf.load(path, target(), read_once="always", node_of_rank=nodes)
    total = jax.jit(lambda array: array.sum(dtype=np.uint32))(made["v"].astype(np.uint32))
    return [int(total)]


def save_with_a_full_disk(path: str) -> None:
    tree = {
        name: jax.jit(lambda s=s: jax.numpy.zeros(s.shape, s.dtype), out_shardings=s.sharding)()
        for name, s in target().items()
    }

    def fail(_: sf.Progress) -> None:
        raise OSError(28, "No space left on device")

    sf.save(path, tree, on_progress=fail if jax.process_index() == 1 else None)


def load_and_die(path: str) -> None:
    def die(_: sf.Progress) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    sf.load(path, target(), on_progress=die if jax.process_index() == 1 else None)


def load_late(path: str, late_s: float) -> float:
    """Process 1 is late before it calls."""
    if jax.process_index() == 1:
        time.sleep(late_s)
    sf.load(path, target(), timeout_s=3 * LATE_S)
    return time.monotonic()


def load_late_within(path: str) -> bool:
    """Process 1 is late within the load, where its first bytes are placed."""
    late: list[bool] = []

    def be_late(_: sf.Progress) -> None:
        if jax.process_index() == 1 and not late:
            late.append(True)
            time.sleep(LATE_S)

    nodes = [0] * jax.process_count()
    sf.load(path, target(), read_once="always", node_of_rank=nodes, on_progress=be_late, timeout_s=5)
    return bool(late)


def load_too_late(path: str) -> None:
    if jax.process_index() == 1:
        time.sleep(4)
    sf.load(path, target(), timeout_s=2)


def test_what_one_tree_has_wrong_all_hear_of(jax_job: JaxJobs, tmp_path: Path) -> None:
    outcomes = jax_job(2, 4).outcomes(load_with_a_tree_of_its_own, make(tmp_path))
    assert [outcome.error_type for outcome in outcomes] == ["RankFailedError", "InvalidInputError"]
    assert "rank 1 of 2" in outcomes[0].error
    assert "w: JAX would silently truncate int64" in outcomes[0].error


def test_a_failure_in_an_exchange_leaves_nothing_behind(jax_job: JaxJobs, tmp_path: Path) -> None:
    assert jax_job(4, 2).run(load_after_a_failure, make(tmp_path)) == [[COLUMNS * (COLUMNS - 1) // 2]] * 4


def test_a_save_that_fails_on_one_process_publishes_nothing(jax_job: JaxJobs, tmp_path: Path) -> None:
    outcomes = jax_job(2, 4).outcomes(save_with_a_full_disk, str(tmp_path / "out"))
    assert [outcome.error_type for outcome in outcomes] == ["RankFailedError", "OSError"]
    assert "No space left on device" in outcomes[0].error
    assert list(tmp_path.iterdir()) == []


def test_a_late_process_is_waited_for(jax_job: JaxJobs, tmp_path: Path) -> None:
    """Within a load later than the limit of one that gives no sign of life. Two jobs wait at the same time."""
    path = make(tmp_path)
    with ThreadPoolExecutor() as threads:
        before = threads.submit(jax_job(2, 4).run, load_late, path, LATE_S)
        within = threads.submit(jax_job(4, 2).run, load_late_within, path)
    assert max(before.result()) - min(before.result()) < LATE_S / 4
    assert within.result() == [False, True, False, False]


def test_a_process_that_comes_too_late_is_named_and_fails_too(jax_job: JaxJobs, tmp_path: Path) -> None:
    outcomes = jax_job(2, 4).outcomes(load_too_late, make(tmp_path))
    assert [outcome.error_type for outcome in outcomes] == ["RankFailedError"] * 2
    assert "rank 1 of 2" in outcomes[0].error
    jax_job(2, 4).run(load_late, make(tmp_path), 0)


def test_a_process_that_dies_is_named(jax_job: JaxJobs, tmp_path: Path) -> None:
    outcomes = jax_job(4, 2).outcomes(load_and_die, make(tmp_path))
    assert [outcome.status for outcome in outcomes] == ["raised", "died", "raised", "raised"]
    assert all("rank 1 of 4" in outcome.error for outcome in outcomes if outcome.status == "raised")
