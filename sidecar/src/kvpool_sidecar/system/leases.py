"""File leases (fcntl(2)) that show whether a file is in use."""

from __future__ import annotations

import fcntl
import os

__all__ = ["is_open_elsewhere"]


def is_open_elsewhere(fd: int) -> bool:
    """Return whether another open file of the inode exists, in any process: then the kernel refuses a write lease.

    `fd` may be a descriptor of memfd_create or with O_PATH, which do not count. A mapping counts as an open file; pages
    in a pipe do not.
    """
    try:
        probe = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except BlockingIOError:  # a holder has a lease itself
        return True
    try:
        fcntl.fcntl(probe, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(probe, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    finally:
        os.close(probe)
    return False
