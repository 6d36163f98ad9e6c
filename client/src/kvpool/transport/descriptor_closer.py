"""Close descriptors of other processes' files where no caller waits: close(2) may hang with a network or FUSE mount."""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING

from kvpool.protocol.wire import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["DescriptorCloser", "close_later", "has_room"]

_MAX_QUEUED = 1024


class DescriptorCloser:
    """One daemon thread, started on demand, closes descriptors in order. Thread-safe; no method waits.

    No descriptor is dropped: while `has_room` is false, the owner must not accept further ones.
    """

    def __init__(self, name: str, max_queued: int = _MAX_QUEUED) -> None:
        self._name = name
        self._max_queued = max_queued
        self._queue: collections.deque[int] = collections.deque()
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """In a child, which has no thread: start with an idle closer. The queued descriptors are the child's copies."""
        self._ready = threading.Condition()
        self._has_thread = False
        self._is_idle = False
        self._closing_since: float | None = None

    @property
    def queued(self) -> int:
        """Descriptors that wait to be closed."""
        return len(self._queue)

    @property
    def has_room(self) -> bool:
        """False while the queue is full."""
        return len(self._queue) < self._max_queued

    @property
    def hung_s(self) -> float:
        """Seconds that the close in progress has taken; 0 if there is none."""
        since = self._closing_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self, descriptors: Iterable[int]) -> None:
        """Queue descriptors; -1 counts as closed already."""
        wanted = [descriptor for descriptor in descriptors if descriptor >= 0]
        if not wanted:
            return
        self._queue.extend(wanted)
        with self._ready:
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            elif self._is_idle:
                self._ready.notify()

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._queue:
                    self._is_idle = True
                    self._ready.wait()
                self._is_idle = False
            with contextlib.suppress(IndexError):
                while True:
                    descriptor = self._queue.popleft()
                    self._closing_since = time.monotonic()
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
                    self._closing_since = None


_local = DescriptorCloser("kvpool-close-local")  # apart, so that a hung mount does not keep local files open
_others = DescriptorCloser("kvpool-close")


def close_later(descriptors: Iterable[int], tier: Tier | None = None) -> None:
    """Close descriptors of this process's loads and stores in the background; `tier`: of their blocks, if known."""
    (_local if tier == Tier.LOCAL else _others).close(descriptors)


def has_room() -> bool:
    """False while too many descriptors wait to be closed: a load must not request more."""
    return _local.has_room and _others.has_room


def _reset_after_fork() -> None:
    _local.reset_after_fork()
    _others.reset_after_fork()


os.register_at_fork(after_in_child=_reset_after_fork)
