"""Open descriptors of the directories of a mounted shared tier."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.system import safe_open as safefs

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["READ", "SharedDirectories"]

T = TypeVar("T")

READ = "read"  # the blocks, by a read-only path where there is one
_RETIRED_S = 60.0


class SharedDirectories:
    """Opens the directories at first use, and claims them for the pool. Thread-safe.

    `read_path`: the path of a read-only mount of the same directory; None: `path`.
    """

    def __init__(self, path: str, pool_uid: str, read_path: str | None) -> None:
        self.path = path
        self._read_path = read_path
        self._pool_uid = pool_uid
        self._lock = threading.Lock()
        self._fds: dict[str, int] = {}
        self._retired: list[int] = []
        self._reopened_at = float("-inf")

    def fd(self, directory: str) -> int:
        """Return the descriptor of `BLOCKS`, `QUARANTINE`, `TMP` or `READ`. It belongs to this object."""
        with self._lock:
            if directory in self._fds:
                return self._fds[directory]
        opened = self._open()
        with self._lock:
            if not self._fds:
                self._fds = opened
                opened = {}
        for fd in opened.values():
            os.close(fd)
        with self._lock:
            return self._fds[directory]

    def retry_if_stale(self, work: Callable[[], T]) -> T:
        """Reopen the directories once if a network file system invalidated a handle (ESTALE)."""
        try:
            return work()
        except OSError as e:
            if e.errno != errno.ESTALE:
                raise
        self._reopen()
        return work()

    def close(self) -> None:
        """Close all descriptors."""
        with self._lock:
            fds = [*self._fds.values(), *self._retired]
            self._fds, self._retired = {}, []
        for fd in fds:
            os.close(fd)

    def _reopen(self) -> None:
        """Reopen the directories. The previous descriptors stay open for a while: other threads may use them."""
        with self._lock:
            if time.monotonic() - self._reopened_at < _RETIRED_S:
                return
            closing, self._retired = self._retired, list(self._fds.values())
            self._fds = {}
            self._reopened_at = time.monotonic()
        for fd in closing:
            os.close(fd)

    def _open(self) -> dict[str, int]:
        flags = os.O_RDONLY | os.O_DIRECTORY
        root = os.open(self.path, flags | os.O_CLOEXEC)
        opened: dict[str, int] = {}
        try:
            names.claim_directory(root, self._pool_uid, self.path)
            for folder in (names.BLOCKS, names.QUARANTINE, names.TMP):
                opened[folder] = safefs.open_beneath(root, folder, flags)
            if self._read_path is None:
                opened[READ] = os.dup(opened[names.BLOCKS])
            else:
                opened[READ] = names.open_read_only(opened[names.BLOCKS], self._read_path, self.path)
        except BaseException:
            for fd in opened.values():
                os.close(fd)
            raise
        finally:
            os.close(root)
        return opened
