"""Memory files (memfd_create) that pods fill and that never change afterwards: system calls of the landing zone.

A file gets its full length and F_SEAL_GROW before a pod sees it, and F_SEAL_WRITE when the pod commits it: the kernel
then refuses writes through every descriptor and mapping. F_SEAL_SHRINK is never set, so the sidecar can free the memory
although others hold the file. A holder may therefore cut the file at any time. Nothing here touches a mapping except
system calls: touching a page beyond the end would end the process (SIGBUS).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from typing import TYPE_CHECKING

from kvpool.errors import CorruptBlockError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["HUGE_BYTES", "copy_to", "create", "open_for_pod", "reclaim", "seal", "seals"]

HUGE_BYTES = 2 << 20
_NOEXEC_SEAL = 0x0008  # MFD_NOEXEC_SEAL, Linux 6.3
_F_SEAL_EXEC = 0x0020
_MADV_COLLAPSE = 25  # Linux 6.1
_BIRTH = fcntl.F_SEAL_GROW
_COMMITTED = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_PIECE = 16 << 20  # per write to a drive
_SMALL_BYTES = HUGE_BYTES - 4096  # up to here copying costs less than mapping pages of 4 KiB
_MAX_BUFFERS = 16
_NOT_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP}

_libc = ctypes.CDLL(None, use_errno=True)  # ctypes releases the GIL, which mmap.madvise keeps
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value
_PROT_NONE, _MAP_FIXED = 0, 0x10


def create(size: int) -> tuple[int, bool]:
    """Create a file of `size` bytes whose memory is allocated; return its descriptor and whether it has large folios.

    OSError without memory or descriptors.
    """
    fd = _memfd()
    try:
        os.fchmod(fd, 0o600)  # other users cannot open it again by /proc
        os.ftruncate(fd, size)
        huge = size >= HUGE_BYTES and _collapse(fd, size // HUGE_BYTES * HUGE_BYTES)
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _BIRTH)
    except BaseException:
        os.close(fd)
        raise
    return fd, huge


def open_for_pod(fd: int) -> int:
    """Return a new write-only open file for a pod: it can neither read nor map it, nor splice from it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)


def seals(fd: int) -> int:
    """Return the seals."""
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS)


def seal(fd: int, size: int) -> None:
    """Make the file immutable for every holder. RefusedError if a holder could still write or has changed the file.

    May wait 0.2 s in the kernel for pages that a holder has pinned.
    """
    if seals(fd) & ~_F_SEAL_EXEC != _BIRTH:
        raise RefusedError("a holder of the file has added seals")
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _COMMITTED)
    except OSError as e:
        raise RefusedError(f"the file is mapped or pinned for writing: {e.strerror}") from None
    if os.fstat(fd).st_size != size:  # after the seals: it can only shrink from now on
        raise CorruptBlockError("the file was cut")


def reclaim(fd: int) -> bool:
    """Free the memory although others hold the file. False if a holder has sealed it against that."""
    try:
        os.ftruncate(fd, 0)
    except OSError:
        return False
    return True


def copy_to(target: int, source: int, size: int, start: bytes = b"") -> None:
    """Write the `size` bytes of the sealed file `source` to `target`, past the page cache where `target` supports it.

    `start` replaces the first bytes. CorruptBlockError if a holder has cut the file; OSError of the target.
    """
    if os.fstat(source).st_size != size:
        raise CorruptBlockError("the file was cut")
    direct = size % mmap.PAGESIZE == 0 and _set_direct(target)
    if size <= _buffers.size:
        with _buffers.borrow() as buffer:
            if os.preadv(source, [buffer[:size]], 0) != size:
                raise CorruptBlockError("the file was cut")
            buffer[: len(start)] = start
            _write(target, buffer[:size], direct=direct)
        return
    with _mapped(source, size) as view:
        _write(target, view, direct=direct)
    if start:
        with _buffers.borrow() as buffer:  # past the page cache, too: a page there would keep the others from folios
            buffer[: len(start)] = start
            _write(target, buffer[: len(start)], direct=direct)


class _Buffers:
    """Page-aligned buffers of `size` bytes. At most `limit` exist at a time; further borrowers wait. Thread-safe."""

    def __init__(self, size: int, limit: int) -> None:
        self.size = size
        self._free: list[memoryview] = []
        self._places = threading.BoundedSemaphore(limit)

    @contextlib.contextmanager
    def borrow(self) -> Iterator[memoryview]:
        with self._places:
            buffer = self._free.pop() if self._free else memoryview(mmap.mmap(-1, self.size))
            try:
                yield buffer
            finally:
                self._free.append(buffer)


_buffers = _Buffers(_SMALL_BYTES, _MAX_BUFFERS)


@contextlib.contextmanager
def _mapped(source: int, size: int) -> Iterator[memoryview]:
    """Map the file for reading by system calls only, aligned so that a large folio is one entry of the page table."""
    reader = os.open(f"/proc/self/fd/{source}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        base, place = _map_aligned(reader, size)
    finally:
        os.close(reader)
    try:
        yield memoryview((ctypes.c_char * size).from_address(place)).cast("B")
    finally:
        _libc.munmap(base, size + HUGE_BYTES)


def _map_aligned(fd: int, size: int) -> tuple[int, int]:
    """Return start of a reservation of `size` + 2 MiB and, within it, of the read-only mapping. OSError."""
    base = _libc.mmap(None, size + HUGE_BYTES, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if base in (None, _MAP_FAILED):
        raise OSError(ctypes.get_errno(), "mmap")
    place = -(-base // HUGE_BYTES) * HUGE_BYTES
    if _libc.mmap(place, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != place:
        error = ctypes.get_errno()
        _libc.munmap(base, size + HUGE_BYTES)
        raise OSError(error, "mmap")
    return base, place


def _write(target: int, view: memoryview, *, direct: bool) -> None:
    done = 0
    while done < len(view):
        try:
            count = os.pwrite(target, view[done : done + _PIECE], done)
        except OSError as e:
            if direct and e.errno in _NOT_DIRECT:
                direct = False
                _clear_direct(target)
                continue
            if e.errno == errno.EFAULT:
                raise CorruptBlockError("the file was cut") from None
            raise
        done += count


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("kvpool-landing", flags | _NOEXEC_SEAL)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
    return os.memfd_create("kvpool-landing", flags)


def _collapse(fd: int, size: int) -> bool:
    """Allocate `size` bytes, a multiple of 2 MiB, in large folios: one byte each, then MADV_COLLAPSE."""
    for offset in range(0, size, HUGE_BYTES):
        os.pwrite(fd, b"\0", offset)
    try:
        base, place = _map_aligned(fd, size)
    except OSError:
        return False
    try:
        return bool(_libc.madvise(place, size, _MADV_COLLAPSE) == 0)
    finally:
        _libc.munmap(base, size + HUGE_BYTES)


def _set_direct(fd: int) -> bool:
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        return True
    return False


def _clear_direct(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
