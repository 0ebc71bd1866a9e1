"""What the machine and its cgroups leave free, told from their own files, here made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardferry.storage.room import cache_room
from shardferry.units import GIB, MIB

MEMINFO = f"MemTotal: {64 * MIB} kB\nMemAvailable: {40 * MIB} kB\nActive(file): {MIB} kB\nInactive(file): {MIB} kB\n"


def system(folder: Path, cgroup: str, mounts: str, **files: str) -> Path:
    """Make a machine of 64 GiB, of which 40 are available, with these cgroup files (`/` is written as `__`)."""
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name, text in files.items():
        path = folder / "sys/fs/cgroup" / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


V2 = "30 25 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = "35 31 0:32 / /sys/fs/cgroup rw - cgroup cgroup rw,memory\n"


def test_without_a_cgroup_the_machine_is_the_limit(tmp_path: Path) -> None:
    room = cache_room(system(tmp_path, "0::/\n", V2))
    assert room.num_bytes == 40 * GIB - int(6.4 * GIB)  # a tenth of all memory stays free
    assert room.cache_bytes == 2 * GIB
    assert "the machine has 40.0 GiB" in room.limit


def test_a_cgroups_limit_counts_and_its_page_cache_is_free(tmp_path: Path) -> None:
    files = {
        "jobDOTslice__memoryDOTmax": str(20 * GIB),
        "jobDOTslice__memoryDOThigh": "max",
        "jobDOTslice__memoryDOTcurrent": str(12 * GIB),
        "jobDOTslice__memoryDOTstat": f"anon {5 * GIB}\nactive_file {GIB}\ninactive_file {3 * GIB}\n",
    }
    room = cache_room(system(tmp_path, "0::/job.slice\n", V2, **files))
    assert room.num_bytes == 12 * GIB - 2 * GIB
    assert room.cache_bytes == 4 * GIB
    assert "job.slice may use 20.0 GiB and has 12.0 GiB left" in room.limit


def test_the_tightest_of_a_cgroup_and_those_around_it_counts(tmp_path: Path) -> None:
    files = {
        "outer__memoryDOTmax": str(10 * GIB),
        "outer__memoryDOTcurrent": str(9 * GIB),
        "outer__memoryDOTstat": "",
        "outer__inner__memoryDOTmax": str(20 * GIB),
        "outer__inner__memoryDOTcurrent": str(GIB),
        "outer__inner__memoryDOTstat": "",
    }
    assert cache_room(system(tmp_path, "0::/outer/inner\n", V2, **files)).num_bytes == 0
    files["outer__inner__memoryDOThigh"] = str(2 * GIB)
    files["outer__memoryDOTcurrent"] = "0"
    assert cache_room(system(tmp_path, "0::/outer/inner\n", V2, **files)).num_bytes == GIB - int(0.2 * GIB)


@pytest.mark.parametrize("limit", [8 * GIB, 9223372036854771712])
def test_the_first_version_of_cgroups_is_understood(tmp_path: Path, limit: int) -> None:
    files = {
        "job__memoryDOTlimit_in_bytes": str(limit),
        "job__memoryDOTusage_in_bytes": str(6 * GIB),
        "job__memoryDOTstat": f"active_file 1\ntotal_active_file {GIB}\ntotal_inactive_file {GIB}\n",
    }
    room = cache_room(system(tmp_path, "4:memory:/job\n0::/\n", V1, **files))
    assert room.num_bytes == (4 * GIB - int(0.8 * GIB) if limit == 8 * GIB else 40 * GIB - int(6.4 * GIB))


def test_a_container_that_sees_only_its_own_cgroup_is_understood(tmp_path: Path) -> None:
    mounts = "30 25 0:28 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    files = {"memoryDOTmax": str(GIB), "memoryDOTcurrent": "0", "memoryDOTstat": ""}
    for path in ("/docker/abc", "/somewhere/else", "/../.."):
        assert cache_room(system(tmp_path, f"0::{path}\n", mounts, **files)).num_bytes == GIB - int(0.1 * GIB)


def test_this_machine_can_be_asked() -> None:
    room = cache_room()
    total = int(Path("/proc/meminfo").read_text(encoding="ascii").split()[1]) * 1024
    assert 0 <= room.num_bytes < total
