"""Bring a block's file into the page cache in large folios, so that each later read of it costs half as much or less.

Read-ahead that begins with read(2) or posix_fadvise(2) fills the page cache with single pages, also if the read is
refused (RWF_NOWAIT). A mapping with MADV_HUGEPAGE is filled in folios of up to 2 MiB where the file system supports
them (ext4 from Linux 6.16, XFS from 5.18), unless pages of the file are there already. Elsewhere it is a plain read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ends_in_memory", "fill"]

_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)
_MADV_POPULATE_READ = 22  # Linux 5.14
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)

_libc = ctypes.CDLL(None, use_errno=True)  # ctypes releases the GIL, which mmap.madvise keeps during the whole read
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value


def fill(fd: int, offset: int, size: int) -> bool:
    """Read these bytes of the file into the page cache. May block for as long as the drive does.

    `offset` is a multiple of the page size, for large folios of 2 MiB. False if this is not possible here, or the read
    fails: the caller reads the bytes in another way. Thread-safe. The mapping is touched by system calls alone, so a
    file that shrinks raises no SIGBUS.
    """
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
    if address in (None, _MAP_FAILED):
        return False
    try:
        _libc.madvise(address, size, _MADV_HUGEPAGE)  # fails without transparent huge pages: single pages then
        return bool(_libc.madvise(address, size, _MADV_POPULATE_READ) == 0)
    finally:
        _libc.munmap(address, size)


def ends_in_memory(fd: int, size: int, preadv: Callable[..., int] = os.preadv) -> bool:
    """Return whether the last byte of a block's file of `size` bytes is in the page cache; True if that is unknown.

    The header is one page, so the last page of a block of whole folios is a folio of its own: asking for it starts the
    read of a single page, but of none that `fill` would bring in as part of a large folio.
    """
    if not _NOWAIT:
        return True
    try:
        return preadv(fd, (bytearray(1),), size - 1, _NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError:  # not supported: the read itself decides
        return True
