"""Large folios: files whose page cache is filled as cheaply as the kernel can copy from it, and how much of one is so.

A file that was filled page by page costs two to three times the processor time at each later read. The true limit
therefore reads files that were filled in large folios (mmap(2), MADV_HUGEPAGE and MADV_POPULATE_READ of madvise(2)).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["copy_large", "drop", "fill_large", "folio_pages", "large_share", "large_share_of"]

_MADV_POPULATE_READ = 22  # Linux 5.14
_PAGE = mmap.PAGESIZE
_PRESENT = 1 << 63
_PFN = (1 << 55) - 1
_TAIL = 1 << 16  # not the first page of its folio, /proc/kpageflags
_LARGE_PAGES = 16  # from here on the kernel's work per folio is small beside the copying
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def drop(fd: int) -> None:
    """Take the file's pages out of the page cache, as far as the kernel lets go of them."""
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def fill_large(fd: int, size: int) -> None:
    """Read the file into the page cache, in large folios where kernel and file system have them. OSError."""
    with _Mapping(fd, size) as address:
        _libc.madvise(address, size, mmap.MADV_HUGEPAGE)  # refused without CONFIG_READ_ONLY_THP_FOR_FS: small folios
        if _libc.madvise(address, size, _MADV_POPULATE_READ) != 0:
            raise OSError(ctypes.get_errno(), "MADV_POPULATE_READ")


def copy_large(files: Sequence[Path], directory: Path) -> list[Path]:
    """Copies of `files` that are in the page cache in large folios. The files themselves are not in it afterwards."""
    directory.mkdir()
    copies = [directory / str(number) for number in range(len(files))]
    for file, copy in zip(files, copies, strict=True):
        shutil.copyfile(file, copy)
        for one in (file, copy):
            fd = os.open(one, os.O_RDONLY)
            try:
                drop(fd)
                if one is copy:
                    fill_large(fd, os.fstat(fd).st_size)
            finally:
                os.close(fd)
    return copies


def large_share_of(files: Sequence[Path]) -> float | None:
    """Share of the bytes of `files` that are in the page cache in folios of 64 KiB or more; None if unknown.

    Files of which nothing is cached do not count: they were never read.
    """
    total = large = 0
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            found = _folios(fd, size)
        finally:
            os.close(fd)
        if found is None:
            return None
        if found:
            total, large = total + _pages(size), large + _large(found)
    return large / total if total else 0.0


def large_share(fd: int, size: int) -> float | None:
    """Share of the file's pages that are in the page cache in folios of 64 KiB or more.

    None if the kernel does not show it: /proc/kpageflags is for root. What is not cached is not read.
    """
    found = _folios(fd, size)
    return None if found is None else _large(found) / _pages(size)


def _pages(size: int) -> int:
    return -(-size // _PAGE)


def _large(found: Sequence[int]) -> int:
    return sum(pages for pages in found if pages >= _LARGE_PAGES)


def _folios(fd: int, size: int) -> list[int] | None:
    """Pages of each folio of the file that is in the page cache; None if the kernel does not show it."""
    pages = _pages(size)
    try:
        with open("/proc/kpageflags", "rb", 0) as flags, open("/proc/self/pagemap", "rb", 0) as own:
            with _Mapping(fd, size) as address:
                here = _resident(address, size)
                view = (ctypes.c_char * size).from_address(address)
                for n in range(pages):
                    if here[n]:
                        view[n * _PAGE]  # enters the page into this process's table
                entries = struct.unpack(f"{pages}Q", os.pread(own.fileno(), pages * 8, address // _PAGE * 8))
            frames = [entry & _PFN for n, entry in enumerate(entries) if here[n] and entry & _PRESENT]
            if frames and not any(frames):
                return None  # their numbers are hidden
            return folio_pages((frame, _flags(flags.fileno(), frame)) for frame in frames)
    except PermissionError:
        return None


def folio_pages(frames: Iterable[tuple[int, int]]) -> list[int]:
    """Sizes of the folios that frames (number, flags) of consecutive pages of a file are in. Pure."""
    found: list[int] = []
    last = -1
    for frame, flags in frames:
        if found and flags & _TAIL and frame == last + 1:
            found[-1] += 1
        else:
            found.append(1)
        last = frame
    return found


def _flags(flags: int, frame: int) -> int:
    return int(struct.unpack("Q", os.pread(flags, 8, frame * 8))[0])


def _resident(address: int, size: int) -> bytes:
    found = (ctypes.c_ubyte * _pages(size))()
    if _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found) != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return bytes(byte & 1 for byte in found)


class _Mapping:
    """A read-only mapping of a file; the address of its first byte."""

    def __init__(self, fd: int, size: int) -> None:
        self._size = size
        self._address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if self._address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap")

    def __enter__(self) -> int:
        assert self._address is not None
        return int(self._address)

    def __exit__(self, *_: object) -> None:
        _libc.munmap(self._address, self._size)
