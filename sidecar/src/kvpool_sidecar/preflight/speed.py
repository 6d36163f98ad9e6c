"""How fast a file system writes and reads, past the page cache, with little data and in little time."""

from __future__ import annotations

import errno
import mmap
import os
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CHUNK", "MOST_BYTES", "MOST_S", "Speed", "measure", "takes_direct_io"]

CHUNK = 4 << 20
MOST_BYTES = 256 << 20
MOST_S = 1.0
"""For writing; reading has as much again, so that a whole measurement takes at most 2 s."""
_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.ENOSYS}


class Speed(NamedTuple):
    """Megabytes (10^6 bytes) per second; 0 where too little came to say. `written` in bytes."""

    write_mb_s: float
    read_mb_s: float
    written: int
    direct: bool


def takes_direct_io(fd: int) -> bool:
    """Does the file `fd` take aligned writes with O_DIRECT? 4 KiB of it are written over. OSError for anything else."""
    try:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as e:
        if e.errno in _NO_DIRECT:
            return False
        raise
    try:
        with mmap.mmap(-1, 4096) as page:
            return os.pwrite(again, page, 0) == 4096
    except OSError as e:
        if e.errno in _NO_DIRECT:
            return False
        raise
    finally:
        os.close(again)


def measure(fd: int, *, direct: bool, most_bytes: int = MOST_BYTES, most_s: float = MOST_S) -> Speed:
    """Write the file `fd` from its start, read it back. OSError if that fails; a drive that is full ends it early."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    again = os.open(f"/proc/self/fd/{fd}", flags)
    try:
        with mmap.mmap(-1, CHUNK) as chunk:  # page-aligned, as O_DIRECT wants it
            chunk.write(os.urandom(CHUNK))  # drives that compress must not look faster than they are
            written, took = _timed(lambda at: _write(again, chunk, at), most_bytes, most_s)
            started = time.monotonic()
            os.fdatasync(again)
            took += time.monotonic() - started
            os.posix_fadvise(again, 0, 0, os.POSIX_FADV_DONTNEED)
            got, read_took = _timed(lambda at: os.preadv(again, [chunk], at), written, most_s)
    finally:
        os.close(again)
    return Speed(_rate(written, took), _rate(got, read_took), written, direct)


def _timed(step: Callable[[int], int], most_bytes: int, most_s: float) -> tuple[int, float]:
    """Bytes that `step(offset)` moved, a chunk at a time, and how long that took."""
    started, at = time.monotonic(), 0
    while at + CHUNK <= most_bytes and time.monotonic() - started < most_s:
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
