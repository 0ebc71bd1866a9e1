"""Which machine a rank runs on.

Ranks on one kernel share its page cache, so what matters is the kernel and not the host name: two containers of one
machine have two names and one boot id, and containers of two machines may have one name. The boot id of the Linux
kernel is a random number drawn at boot. Virtual machines resumed from one snapshot share it although they are apart; a
caller who runs such a fleet says which rank is on which node.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import NamedTuple

BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


class Host(NamedTuple):
    """A machine: its name for messages, and an id that two machines never share."""

    name: str
    kernel: str


def this_host() -> Host:
    """Return the machine that this process runs on."""
    name = platform.node() or "unknown"
    try:
        kernel = BOOT_ID_PATH.read_text().strip()
    except OSError:
        kernel = name  # no Linux kernel, or /proc is hidden: the name is all there is
    return Host(name, kernel)


def host_identities(hosts: list[Host]) -> tuple[str, ...]:
    """Return one string per rank, equal exactly where the kernels are equal.

    It starts with the name that the lowest rank on that kernel has.

    Examples:
        >>> host_identities([Host("pod-1", "aa"), Host("pod-2", "aa"), Host("gpu-3", "bb")])
        ('pod-1/aa', 'pod-1/aa', 'gpu-3/bb')
    """
    names: dict[str, str] = {}
    for host in hosts:
        names.setdefault(host.kernel, host.name)
    return tuple(f"{names[host.kernel]}/{host.kernel}" for host in hosts)
