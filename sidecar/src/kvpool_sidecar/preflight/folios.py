"""Finds out, by doing it, whether a file system keeps files in the page cache in large folios.

The same file is filled twice, page by page and by a mapping with MADV_HUGEPAGE, and read from memory each time. Large
folios save half of the processor time or more; without them both ways cost the same.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import NamedTuple

from kvpool.transport import page_cache

__all__ = ["Folios", "measure"]

_BYTES = 1 << 20
_READS = 25
_GAIN = 1.15  # less is noise


class Folios(NamedTuple):
    """Processor time of a read from single pages over that of a read from the same file as `page_cache.fill` fills it.

    0: not measured.
    """

    gain: float

    @property
    def are_large(self) -> bool:
        return self.gain >= _GAIN


def measure(fd: int) -> Folios:
    """Write 1 MiB at the start of the scratch file `fd` and read it from memory. OSError. Takes about 20 ms."""
    with mmap.mmap(-1, _BYTES) as buffer:
        buffer.write(os.urandom(_BYTES))
        os.pwrite(fd, buffer, 0)
        _drop(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        for at in range(0, _BYTES, mmap.PAGESIZE):
            os.pread(fd, mmap.PAGESIZE, at)
        single = _seconds(fd, buffer)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)
        _drop(fd)
        if not page_cache.fill(fd, 0, _BYTES):
            return Folios(0)
        return Folios(single / _seconds(fd, buffer))


def _drop(fd: int) -> None:
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _seconds(fd: int, buffer: mmap.mmap) -> float:
    """Return the processor time of one read from memory: the fastest, because other work only adds to it."""
    times = []
    for _ in range(_READS):
        began = time.thread_time()
        os.preadv(fd, [buffer], 0)
        times.append(time.thread_time() - began)
    return max(min(times), 1e-9)
