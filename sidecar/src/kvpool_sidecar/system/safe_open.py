"""Open files beneath a directory without ever leaving it: no symbolic link is followed, no `..` is obeyed.

openat2(2) with RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS where the kernel has it (5.6), else component by component with
O_NOFOLLOW. Crossing a mount point is allowed: an emptyDir with `medium: Memory` is one. Standard library only, because
the root part of the sidecar's pod uses it too. Thread-safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os

__all__ = ["has_openat2", "make_directories", "open_beneath", "open_by_openat2", "open_by_steps", "remove_tree"]

_SYS_OPENAT2 = 437  # the same number on every architecture that Linux added it to
_AT_FDCWD = -100
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_OpenHow), ctypes.c_size_t)


_HOW_BYTES = ctypes.sizeof(_OpenHow)


@functools.cache  # there are few, and the kernel only reads them
def _how(flags: int, mode: int, resolve: int) -> _OpenHow:
    makes_file = flags & os.O_CREAT or flags & os.O_TMPFILE == os.O_TMPFILE
    return _OpenHow(flags | os.O_CLOEXEC, mode if makes_file else 0, resolve)


def _openat2(dir_fd: int, path: str, flags: int, mode: int, resolve: int) -> int:
    how = _how(flags, mode, resolve)
    while True:
        fd: int = _syscall(_SYS_OPENAT2, dir_fd, path.encode("utf-8", "surrogateescape"), how, _HOW_BYTES)
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code), path)


@functools.cache
def has_openat2() -> bool:
    """False on old kernels and under seccomp profiles that do not know the call."""
    try:
        os.close(_openat2(_AT_FDCWD, "/", os.O_PATH, 0, _RESOLVE_NO_SYMLINKS))
    except OSError:
        return False
    return True


def open_by_openat2(dir_fd: int, path: str, flags: int, mode: int = 0o600) -> int:
    """See open_beneath."""
    return _openat2(dir_fd, path, flags, mode, _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS)


def open_by_steps(dir_fd: int, path: str, flags: int, mode: int = 0o600) -> int:
    """See open_beneath."""
    parts = [p for p in path.split("/") if p != "."]
    if path.startswith("/") or ".." in parts or "" in parts:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    *folders, name = parts or ["."]
    here = dir_fd
    try:
        for folder in folders:
            below = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            if here != dir_fd:
                os.close(here)
            here = below
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=here)
    finally:
        if here != dir_fd:
            os.close(here)


def open_beneath(dir_fd: int, path: str, flags: int, mode: int = 0o600) -> int:
    """A new descriptor of `path` below `dir_fd`. OSError: ELOOP for a link, EXDEV for a way out, and the usual."""
    return (open_by_openat2 if has_openat2() else open_by_steps)(dir_fd, path, flags, mode)


def make_directories(dir_fd: int, path: str, mode: int = 0o700) -> None:
    """mkdir -p below `dir_fd`, each parent opened without following a link."""
    parts = path.split("/")
    for depth in range(1, len(parts) + 1):
        parent = open_beneath(dir_fd, "/".join(parts[: depth - 1]) or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(parts[depth - 1], mode, dir_fd=parent)
        finally:
            os.close(parent)


def remove_tree(dir_fd: int, name: str) -> int:
    """Remove `name` and all below it, never following a link or leaving the file system; how many files went."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError:
        return 0
    except OSError as e:
        if e.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        os.unlink(name, dir_fd=dir_fd)
        return 1
    removed = 0
    try:
        if os.fstat(fd).st_dev != os.fstat(dir_fd).st_dev:
            raise OSError(errno.EXDEV, "another file system is mounted here", name)
        with os.scandir(fd) as entries:
            names = [(e.name, e.is_dir(follow_symlinks=False)) for e in entries]
        for child, is_directory in names:
            if is_directory:
                removed += remove_tree(fd, child)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(child, dir_fd=fd)
                    removed += 1
    finally:
        os.close(fd)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=dir_fd)
    return removed
