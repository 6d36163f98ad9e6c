"""A rate limiter for background work: bytes, directory entries or index keys per second."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from kvpool.errors import PoolUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RateLimiter"]


class RateLimiter:
    """Paces work at `rate()` units per second, which is read at each call. Virtual scheduling (GCRA) without burst.

    For one thread. `wait(seconds)` pauses and returns True when the process stops (`threading.Event.wait`); it may
    raise an exception of its own instead. Pauses shorter than `min_pause_s` are added to the next one.
    """

    def __init__(
        self,
        rate: Callable[[], float],
        wait: Callable[[float], bool],
        *,
        min_pause_s: float = 0.0,
    ) -> None:
        self._rate = rate
        self._wait = wait
        self._min_pause_s = min_pause_s
        self._clock = time.monotonic
        self._free_at = -math.inf

    @property
    def rate(self) -> float:
        """Units per second."""
        return max(1.0, self._rate())

    def acquire(self, count: float, deadline: float = math.inf) -> None:
        """Pause for `count` units, but not after `deadline`; later calls pause for the rest.

        Raises PoolUnavailableError once stopped.
        """
        self._free_at = max(self._free_at, self._clock()) + count / self.rate
        self._pause(min(self._free_at, deadline))

    def settle(self) -> None:
        """Pause until all acquired units are paid for. Raises PoolUnavailableError once stopped."""
        self._pause(self._free_at)

    def _pause(self, until: float) -> None:
        seconds = max(0.0, until - self._clock())
        if self._wait(seconds if seconds > self._min_pause_s else 0.0):
            raise PoolUnavailableError("stopped")
