"""Files of removed blocks that pods still have open: their space is used, and no block of the table has it.

A descriptor cannot be taken back, but the file can be cut: after a grace period, in which a load in progress ends, the
sidecar frees the space of a removed file although pods hold it. Until then its bytes are charged to the tenants that
opened the block. A holder then reads the end of the file, which is a miss.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool_sidecar.resilience.bounded_cache import BoundedCache
from kvpool_sidecar.system.leases import is_open_elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["GRACE_S", "URGENT_GRACE_S", "HeldFiles"]

GRACE_S = 10.0
URGENT_GRACE_S = 1.0  # where the space is needed
_MAX_FILES = 1024  # one descriptor each; beyond it the oldest are cut immediately
_MAX_REMEMBERED = 1 << 16
_UNKNOWN = (b"",)


class _HeldFile(NamedTuple):
    fd: int  # O_PATH
    size: int
    tenants: tuple[bytes, ...]
    since: float


class HeldFiles:
    """Held files of one drive. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._settling = threading.Lock()  # descriptors of `_files` are closed under it only
        self._opened_by: BoundedCache[bytes, tuple[bytes, ...]] = BoundedCache(_MAX_REMEMBERED)
        self._files: list[_HeldFile] = []  # oldest first

    def record_opened(self, keys: Iterable[bytes], tenant: bytes) -> None:
        """Record that descriptors of these blocks went to a pod of `tenant` (tag)."""
        with self._lock:
            for key in keys:
                known = self._opened_by.get(key) or ()
                if tenant not in known:
                    self._opened_by.put(key, (*known, tenant))

    def unlink(self, key: bytes, path: str, directory: int) -> None:
        """Unlink the block's file at `path`, and remember it if it is open. OSError if that fails."""
        fd = -1
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            os.unlink(path, dir_fd=directory)
        except OSError:
            if fd >= 0:
                os.close(fd)
            raise
        with self._lock:
            tenants = self._opened_by.pop(key) or _UNKNOWN
        if fd >= 0:
            self._remember(fd, tenants)

    def settle(self, grace_s: float = GRACE_S) -> None:
        """Forget files that are closed, and cut those that were removed before the grace period."""
        with self._settling:
            with self._lock:
                files = list(self._files)
            now = self._clock()
            surplus = len(files) - _MAX_FILES
            for number, file in enumerate(files):
                is_due = number < surplus or now - file.since >= grace_s
                if not is_open_elsewhere(file.fd) or (is_due and _cut(file.fd)):
                    with self._lock:
                        self._files.remove(file)
                    os.close(file.fd)

    def by_tenant(self) -> dict[bytes, int]:
        """Return bytes by the tag of the tenants that opened the files; b"" where that is unknown.

        A file that several tenants opened counts for each of them.
        """
        found: dict[bytes, int] = {}
        with self._lock:
            for file in self._files:
                for tenant in file.tenants:
                    found[tenant] = found.get(tenant, 0) + file.size
        return found

    @property
    def total_bytes(self) -> int:
        with self._lock:
            return sum(file.size for file in self._files)

    def close(self) -> None:
        """Cut all held files: no process accounts for them afterwards."""
        self.settle(0.0)
        with self._settling, self._lock:
            files, self._files = self._files, []
        for file in files:
            os.close(file.fd)

    def _remember(self, fd: int, tenants: tuple[bytes, ...]) -> None:
        if not is_open_elsewhere(fd):
            os.close(fd)
            return
        file = _HeldFile(fd, os.fstat(fd).st_blocks * 512, tenants, self._clock())
        with self._lock:
            self._files.append(file)
            is_full = len(self._files) > _MAX_FILES
        if is_full:
            self.settle()


def _cut(fd: int) -> bool:
    """Free the space of the unlinked file. False while a holder's lease prevents that."""
    path = f"/proc/self/fd/{fd}"
    if os.fstat(fd).st_nlink:
        return False
    try:
        os.chmod(path, 0o600)
        writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.ftruncate(writer, 0)
    except OSError:
        return False
    finally:
        os.close(writer)
    return True
