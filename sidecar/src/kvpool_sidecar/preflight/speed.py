"""Measures the speed of a file system without the page cache, with little data and in little time."""

from __future__ import annotations

import errno
import mmap
import os
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CHUNK", "MAX_BYTES", "MAX_S", "Speed", "measure", "takes_direct_io"]

CHUNK = 4 << 20
MAX_BYTES = 256 << 20
MAX_S = 1.0
"""Time limit for writing, and reopened for reading, so that a measurement takes at most 2 s."""
_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.ENOSYS}


class Speed(NamedTuple):
    """Megabytes (10^6 bytes) per second; 0 if too little data was transferred. `written` in bytes."""

    write_mb_s: float
    read_mb_s: float
    written: int
    direct: bool


def takes_direct_io(fd: int) -> bool:
    """Return whether the file `fd` accepts aligned writes with O_DIRECT. Overwrites 4 KiB. OSError for other errors."""
    try:
        reopened = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as e:
        if e.errno in _NO_DIRECT:
            return False
        raise
    try:
        with mmap.mmap(-1, 4096) as page:
            return os.pwrite(reopened, page, 0) == 4096
    except OSError as e:
        if e.errno in _NO_DIRECT:
            return False
        raise
    finally:
        os.close(reopened)


def measure(fd: int, *, direct: bool, max_bytes: int = MAX_BYTES, max_s: float = MAX_S) -> Speed:
    """Write the file `fd` from its start and read it back. OSError if that fails; a full drive ends it early."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    reopened = os.open(f"/proc/self/fd/{fd}", flags)
    try:
        with mmap.mmap(-1, CHUNK) as chunk:  # page-aligned, as O_DIRECT requires
            chunk.write(os.urandom(CHUNK))  # random data, because drives may compress
            written, elapsed = _timed(lambda at: _write(reopened, chunk, at), max_bytes, max_s)
            started = time.monotonic()
            os.fdatasync(reopened)
            elapsed += time.monotonic() - started
            os.posix_fadvise(reopened, 0, 0, os.POSIX_FADV_DONTNEED)
            got, read_elapsed = _timed(lambda at: os.preadv(reopened, [chunk], at), written, max_s)
    finally:
        os.close(reopened)
    return Speed(_rate(written, elapsed), _rate(got, read_elapsed), written, direct)


def _timed(step: Callable[[int], int], max_bytes: int, max_s: float) -> tuple[int, float]:
    """Call `step(offset)` chunk by chunk; return the bytes moved and the seconds taken."""
    started, at = time.monotonic(), 0
    while at + CHUNK <= max_bytes and time.monotonic() - started < max_s:
        moved = step(at)
        at += max(0, moved)
        if moved < CHUNK:
            break
    return at, time.monotonic() - started


def _write(fd: int, chunk: mmap.mmap, at: int) -> int:
    try:
        return os.pwrite(fd, chunk, at)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            return 0
        raise


def _rate(count: int, seconds: float) -> float:
    return count / seconds / 1e6 if count and seconds > 0 else 0.0
