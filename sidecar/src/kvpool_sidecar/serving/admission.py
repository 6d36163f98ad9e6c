"""Decides which new blocks are written to the local tier, to spare the drives."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Final

from kvpool_sidecar.resilience.bounded_cache import BoundedCache
from kvpool_sidecar.storage.local.endurance import DAY_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.serving.config_holder import ConfigHolder
    from kvpool_sidecar.storage.local.store import LocalStore

__all__ = ["LocalAdmission", "WriteBudget"]

_GHOSTS: Final = 1 << 18  # of 8 bytes: about 30 MiB of memory at most
_GHOST_BYTES: Final = 8
_BURST_S: Final = 3600.0


class WriteBudget:
    """Bytes per day, of which an hour's share may be saved up. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._saved = math.inf  # the first hour's share is available immediately

    def spend(self, size: int, bytes_per_day: float) -> bool:
        """Spend `size` bytes; False, and nothing is spent, if fewer are saved up."""
        now = self._clock()
        rate = bytes_per_day / DAY_S
        # a block larger than the share of an hour is written once enough is saved for it
        self._saved = min(self._saved + (now - self._at) * rate, max(_BURST_S * rate, float(size)))
        self._at = now
        if self._saved < size:
            return False
        self._saved -= size
        return True


class LocalAdmission:
    """Admits the new blocks of engines by the policy of the current configuration. Thread-safe.

    Copies that the sidecar makes itself (warm-up, drain, prefetch) are not limited.
    """

    def __init__(
        self, config: ConfigHolder, local: LocalStore, stats: Stats, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._local = local
        self._stats = stats
        self._lock = threading.Lock()
        self._budget = WriteBudget(clock)
        self._ghosts: BoundedCache[bytes, bool] = BoundedCache(_GHOSTS)

    def admits(self, block_key: bytes, size: int) -> bool:
        """Whether a block of `size` bytes is written. True for one that is on this node, which is not written again."""
        policy = self._config.current.cache.admission
        if policy == "Always" or self._local.contains(block_key):
            return True
        if policy == "SecondUse":
            is_admitted = self._is_second_use(block_key[:_GHOST_BYTES])
        else:
            is_admitted = self._is_within_budget(size)
        self._stats.add("admission", "admitted" if is_admitted else "skipped")
        return is_admitted

    def _is_second_use(self, ghost: bytes) -> bool:
        with self._lock:
            if self._ghosts.pop(ghost) is not None:
                return True
            self._ghosts.put(ghost, True)
            return False

    def _is_within_budget(self, size: int) -> bool:
        percent = self._config.current.cache.admission_percent
        drives = sum(drive.endurance.size_bytes for drive in self._local.drives)
        with self._lock:
            return self._budget.spend(size, drives * percent / 100)
