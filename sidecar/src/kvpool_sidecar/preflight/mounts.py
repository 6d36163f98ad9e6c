"""What kind of file system a directory is on, by /proc/self/mountinfo. Linux only."""

from __future__ import annotations

import os
from typing import NamedTuple

__all__ = ["NETWORK", "Mount", "mount_of", "parse"]

NETWORK = frozenset(
    {
        "nfs",
        "nfs4",
        "ceph",
        "lustre",
        "glusterfs",
        "beegfs",
        "gpfs",
        "cifs",
        "smb3",
        "virtiofs",
        "9p",
        "afs",
        "orangefs",
    }
)
"""Types whose files other machines may see, too. What FUSE carries tells by its subtype (`fuse.juicefs`)."""
_MAX_MOUNTINFO = 4 << 20


class Mount(NamedTuple):
    """`options` are those of the file system itself (`soft`, `proto=rdma`), not of the mount point."""

    fs_type: str
    source: str
    options: tuple[str, ...]

    @property
    def is_network(self) -> bool:
        return self.fs_type in NETWORK or self.fs_type.startswith("fuse.")

    @property
    def is_memory(self) -> bool:
        return self.fs_type in ("tmpfs", "ramfs")


def parse(text: str, device: str) -> Mount | None:
    """The mount of the device `major:minor`; of several the last, which covers the others. proc(5)."""
    found = None
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        here, there = left.split(), right.split()
        if separator and len(here) >= 6 and len(there) >= 2 and here[2] == device:
            found = Mount(there[0], there[1], tuple(there[2].split(",")) if len(there) > 2 else ())
    return found


def mount_of(fd: int) -> Mount | None:
    """The file system that the directory `fd` is on; None where /proc does not tell."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            return parse(file.read(_MAX_MOUNTINFO), _device(fd))
    except OSError:
        return None


def _device(fd: int) -> str:
    number = os.fstat(fd).st_dev
    return f"{os.major(number)}:{os.minor(number)}"
