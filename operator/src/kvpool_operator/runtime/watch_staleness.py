"""Detects a stalled watch by comparing list results with received events. Pure but for the clock that it is given.

A watch can stall silently: the connection stays open and delivers nothing. A version that was listed twice and never
received has been missed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvpool_operator.k8s.client import NamespacedName

__all__ = ["WatchStaleness"]


class WatchStaleness:
    """For one event loop. Versions are compared for equality only: they are opaque."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._received: dict[NamespacedName, str] = {}
        self._behind: dict[NamespacedName, str] = {}
        self._own_writes: dict[NamespacedName, str] = {}
        self._stale_since: float | None = None

    @property
    def stale_seconds(self) -> float:
        """Seconds since the watch first missed a change seen in a list; 0 while it misses none."""
        return self._clock() - self._stale_since if self._stale_since is not None else 0.0

    def observe_event(self, key: NamespacedName, version: str) -> bool:
        """Record that the watch delivered this version. False: this process wrote it, and it holds nothing new."""
        self._received[key] = version
        return self._own_writes.get(key) != version

    def record_own_write(self, key: NamespacedName, version: str) -> None:
        """This process created this version, and it holds no other change."""
        self._own_writes[key] = version

    def observe_list(self, versions: Mapping[NamespacedName, str]) -> None:
        """Compare a complete list with the received events."""
        self._received = {k: v for k, v in self._received.items() if k in versions}
        self._own_writes = {k: v for k, v in self._own_writes.items() if k in versions}
        behind = {k: v for k, v in versions.items() if self._received.get(k) != v}
        missed = any(self._behind.get(k) == v for k, v in behind.items())
        self._behind = behind
        if not missed:
            self._stale_since = None
        elif self._stale_since is None:
            self._stale_since = self._clock()
