"""What the kernel says about where a file lies."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Filesystems on a disk or in the memory of this machine alone.
LOCAL_FILESYSTEMS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs"})
# Filesystems whose files are pages of memory anyway.
MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
# Filesystems whose files come from another machine, or from this machine's host, by the names the kernel has for them.
NETWORK_FILESYSTEMS = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "afs", "coda"),
        *(
            "lustre",
            "gpfs",
            "beegfs",
            "fhgfs",
            "ceph",
            "gfs2",
            "ocfs2",
            "orangefs",
            "pvfs2",
            "panfs",
            "wekafs",
            "quobyte",
        ),
    }
)
# A daemon serves what FUSE shows, nearly always over a network; these show local disks.
LOCAL_FUSE = frozenset(
    {"fuseblk", "fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.bindfs", "fuse.ntfs-3g", "fuse.squashfuse"}
)


class Mount(NamedTuple):
    """A mounted filesystem.

    Attributes:
        type: Of the filesystem, e.g. `"ext4"`, `"nfs4"`, `"fuse.sshfs"`; `"unknown"` if the kernel does not say.
        source: What is mounted: a device, `server:/export`, or any word the filesystem took.
        root: What of it is seen at the mount point: `"/"`, or a folder of it in a bind mount.
        point: Where it is mounted.
    """

    type: str
    source: str
    root: str
    point: str

    @property
    def is_network(self) -> bool:
        """Whether bytes come from elsewhere, as far as the type tells; an overlay is taken for a local disk."""
        return self.type in NETWORK_FILESYSTEMS or (self.type.startswith("fuse") and self.type not in LOCAL_FUSE)


UNKNOWN_MOUNT = Mount("unknown", "", "", "")


def filesystem_type(descriptor: int) -> str:
    """Return the type of the filesystem an open file lies on, e.g. `"ext4"`; `"unknown"` if not listed."""
    return mount_of(descriptor).type


def mount_of(descriptor: int) -> Mount:
    """Return the mount through which a file or directory was opened; `UNKNOWN_MOUNT` if the kernel does not say.

    By the mount's number, not the device's: files of btrfs and of overlays have device numbers that no mount has. Not
    remembered: numbers of mounts and devices go to the next that is mounted.
    """
    try:
        number = re.search(rb"^mnt_id:\s*(\d+)", Path(f"/proc/self/fdinfo/{descriptor}").read_bytes(), re.MULTILINE)
        table = Path("/proc/self/mountinfo").read_bytes()
    except OSError:
        return UNKNOWN_MOUNT
    row = number and re.search(rb"^%b (.*)$" % number[1], table, re.MULTILINE)
    # proc_pid_mountinfo(5): id, parent, major:minor, root, point, options, optional fields, "-", type, source, ...
    fields, _, rest = row[1].partition(b" - ") if row else (b"", b"", b"")
    if not rest:
        return UNKNOWN_MOUNT
    _, _, root, point, *_ = map(_unescaped, fields.split(b" "))
    type_, source, *_ = map(_unescaped, rest.split(b" "))
    return Mount(type_, source, root, point)


def _unescaped(field: bytes) -> str:
    """Return a field of the table as it was before spaces and backslashes in it became octal numbers."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8) & 0xFF]), field))
