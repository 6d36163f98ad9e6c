"""Who has a node's drives, where two sidecars of one pool overlap while one replaces the other.

Two locks on each tier's POOL_ID, both gone with the process that has them. Who serves has the file's `flock`
(TierDirectory). Who wants to serve next says so by an open file description lock on the file's first byte (fcntl(2)):
whoever serves looks for that one now and then, and lets go.
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

    A directory that nobody has claimed yet is free; so is one that cannot be read: its server says what is wrong.
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
        """True if nobody serves from any of them."""
        for file in self._files:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            fcntl.flock(file, fcntl.LOCK_UN)
        return True

    def request(self) -> None:
        """Say that we want them, until `close`."""
        for file in self._files:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))

    @property
    def requested(self) -> bool:
        """True if somebody else has said so."""
        wish = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        return any(_FLOCK.unpack(fcntl.fcntl(f, fcntl.F_OFD_GETLK, wish))[0] != fcntl.F_UNLCK for f in self._files)

    def close(self) -> None:
        """Let go of all."""
        files, self._files = self._files, []
        for file in files:
            os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
