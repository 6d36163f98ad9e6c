"""File system type of a directory, from /proc/self/mountinfo. Linux only."""

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
"""File system types that other machines may mount. FUSE reports its subtype (`fuse.juicefs`)."""
_MAX_MOUNTINFO = 4 << 20


class Mount(NamedTuple):
    """A mounted file system; `options` are those of the file system (`soft`, `proto=rdma`), not of the mount point."""

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
    """Return the last mount of the device `major:minor`, which covers earlier ones. See proc(5)."""
    mount = None
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if separator and len(fields) >= 6 and len(tail) >= 2 and fields[2] == device:
            mount = Mount(tail[0], tail[1], tuple(tail[2].split(",")) if len(tail) > 2 else ())
    return mount


def mount_of(fd: int) -> Mount | None:
    """Return the file system of the directory `fd`; None if /proc does not list it."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            return parse(file.read(_MAX_MOUNTINFO), _device(fd))
    except OSError:
        return None


def _device(fd: int) -> str:
    number = os.fstat(fd).st_dev
    return f"{os.major(number)}:{os.minor(number)}"
