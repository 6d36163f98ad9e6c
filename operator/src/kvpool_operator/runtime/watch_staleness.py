"""Whether the watch of the pools still tells of their changes. Pure but for the clock that it is given.

A watch can die without a word: the connection stands, and nothing comes. Every listing is held against what the watch
last said of each pool; a version that was listed twice and never heard of has been missed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvpool_operator.k8s.client import NamespacedName

__all__ = ["WatchStaleness"]


class WatchStaleness:
    """For one event loop. Versions are compared for equality alone: they are opaque."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[NamespacedName, str] = {}
        self._behind: dict[NamespacedName, str] = {}
        self._own: dict[NamespacedName, str] = {}
        self._since: float | None = None

    @property
    def stale_seconds(self) -> float:
        """For how long listings have had what the watch did not tell; 0 while it tells."""
        return self._clock() - self._since if self._since is not None else 0.0

    def observe_event(self, key: NamespacedName, version: str) -> bool:
        """The watch told of this version of a pool. Whether it says what this process does not know."""
        self._heard[key] = version
        return self._own.get(key) != version

    def record_own_write(self, key: NamespacedName, version: str) -> None:
        """This process has made this version, and nothing else is new in it."""
        self._own[key] = version

    def observe_list(self, versions: Mapping[NamespacedName, str]) -> None:
        """All pools as a listing has them."""
        self._heard = {k: v for k, v in self._heard.items() if k in versions}
        self._own = {k: v for k, v in self._own.items() if k in versions}
        behind = {k: v for k, v in versions.items() if self._heard.get(k) != v}
        missed = any(self._behind.get(k) == v for k, v in behind.items())
        self._behind = behind
        if not missed:
            self._since = None
        elif self._since is None:
            self._since = self._clock()
