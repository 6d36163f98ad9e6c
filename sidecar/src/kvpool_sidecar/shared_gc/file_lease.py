"""Lease of shared GC in files on the mount itself: no locks, no index, no node's clock.

Each term is a file `term-<number>` that contains its owner, created with O_EXCL: exactly one of several contenders for
a term succeeds, also on NFS version 3 and later (open(2)). The highest term holds the lease while its modification time
is recent. The holder renews it by having the file system update that time; contenders compare it with a file that the
same file system has just stamped. A new holder first removes the files of earlier terms. So a holder that returns finds
its file missing, or a higher term, and stops. Terms only grow; a release sets the time to 1970.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING

from kvpool_sidecar.shared_gc.metadata import TERM

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Lease"]

_GONE = {errno.ENOENT, errno.ESTALE}
_MOST_TERMS = 10**12 - 1


class Lease:
    """Lease of one sidecar. `folder` is always a newly opened descriptor of the same directory. Not thread-safe.

    `still_held` trusts the last check for at most `trust_s` seconds and `trust_count` calls, so a process that was
    suspended checks first.
    """

    def __init__(
        self,
        lease_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        trust_s: float = 0.2,
        trust_count: int = 32,
    ) -> None:
        self.term = 0
        self._owner = os.urandom(16).hex().encode()
        self.held = False
        self._lease_s = lease_s
        self._clock = clock
        self._trust_s = min(trust_s, lease_s / 8)
        self._trust_count = trust_count
        self._asked_at = float("-inf")
        self._uses = 0

    def hold(self, folder: int, now: float) -> bool:
        """Renew the lease, or acquire it if it is free. `now`: the mount's time, by a file stamped just before."""
        if self.held and self._renew(folder):
            return True
        found = _terms(folder)
        top = max(found, default=0)
        if top:
            try:
                age = now - os.stat(_name(top), dir_fd=folder, follow_symlinks=False).st_mtime
            except FileNotFoundError:
                return False  # the term is changing: retry at the next step
            if abs(age) <= self._lease_s:  # far in the future: the mount's clock was set back
                return False
        return top < _MOST_TERMS and self._take(folder, top + 1)

    def still_held(self, folder: int) -> bool:
        """Check before each removal: cheap, and False for good once another sidecar holds the lease."""
        if not self.held:
            return False
        self._uses += 1
        if self._uses <= self._trust_count and self._clock() - self._asked_at <= self._trust_s:
            return True
        return self._renew(folder)

    def release(self, folder: int) -> None:
        """Release the lease, so that the next holder need not wait."""
        if self.held and self._renew(folder):
            with contextlib.suppress(OSError):
                os.utime(_name(self.term), (0, 0), dir_fd=folder, follow_symlinks=False)
        self.held = False

    def _take(self, folder: int, term: int) -> bool:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(_name(term), flags, 0o600, dir_fd=folder)
        except FileExistsError:
            return False
        try:
            os.write(fd, self._owner)
        finally:
            os.close(fd)
        found = _terms(folder)
        if max(found, default=0) > term:  # what was listed first was old
            _remove(folder, term)
            return False
        for earlier in found:
            if earlier < term:
                _remove(folder, earlier)
        self.term, self.held = term, True
        self._note()
        return True

    def _renew(self, folder: int) -> bool:
        try:
            name = _name(self.term)
            own = _owner(folder, name) == self._owner
            if own:
                os.utime(name, dir_fd=folder, follow_symlinks=False)
            self.held = own and max(_terms(folder), default=0) == self.term
        except OSError as e:
            self.held = False
            if e.errno not in _GONE:
                raise
        self._note()
        return self.held

    def _note(self) -> None:
        self._asked_at, self._uses = self._clock(), 0


def _name(term: int) -> str:
    return f"term-{term:012d}"


def _owner(folder: int, name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(fd, 64)
    finally:
        os.close(fd)


def _terms(folder: int) -> list[int]:
    """List the terms in `folder`; reopening the directory makes network file systems revalidate it."""
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        with os.scandir(fd) as entries:
            return [int(found[1]) for entry in entries if (found := TERM.fullmatch(entry.name))]
    finally:
        os.close(fd)


def _remove(folder: int, term: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_name(term), dir_fd=folder)
