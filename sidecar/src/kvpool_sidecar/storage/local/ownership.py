"""Ownership of a node's drives while one sidecar of a pool replaces another.

Two locks on each tier's POOL_ID; both end with the process that holds them. The serving sidecar holds the file's
`flock` (TierDirectory). Its successor requests the drives with an open file description lock on the file's first byte
(fcntl(2)). The serving sidecar polls for that lock and releases the drives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from typing import TYPE_CHECKING, Self

from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.system import safe_open as safefs

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DriveOwnership"]

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


class DriveOwnership:
    """The tiers at `paths`. Not thread-safe.

    An unclaimed directory is available; so is an unreadable one: opening it reports the problem.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._files: list[int] = []
        try:
            for path in paths:
                self._open(path)
        except BaseException:
            self.close()
            raise

    def _open(self, path: str) -> None:
        with contextlib.suppress(OSError):
            root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._files.append(safefs.open_beneath(root, names.POOL_ID, os.O_RDONLY | os.O_NONBLOCK))
            finally:
                os.close(root)

    @property
    def available(self) -> bool:
        """True if no sidecar serves from any of the drives."""
        for file in self._files:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            fcntl.flock(file, fcntl.LOCK_UN)
        return True

    def request(self) -> None:
        """Request the drives until `close`."""
        for file in self._files:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))

    @property
    def requested(self) -> bool:
        """True if another sidecar has requested the drives."""
        query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        return any(_FLOCK.unpack(fcntl.fcntl(f, fcntl.F_OFD_GETLK, query))[0] != fcntl.F_UNLCK for f in self._files)

    def close(self) -> None:
        """Release all locks."""
        files, self._files = self._files, []
        for file in files:
            os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
