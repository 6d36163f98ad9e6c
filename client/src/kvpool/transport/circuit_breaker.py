"""A circuit breaker: after repeated failures calls are refused for a while, then one probe is allowed."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """Closed, open, half-open. Opens after `failures` failures in a row. Thread-safe; never blocks.

    Each failed probe doubles the cool-down of `cooldown_s` seconds up to `max_cooldown_s` (default: it stays the same).
    A caller to which `allow` returned True must call `success` or `failure`; one that dies without doing so delays the
    next probe by one cool-down and no more.
    """

    def __init__(
        self,
        failures: int,
        cooldown_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_cooldown_s: float | None = None,
    ) -> None:
        self._limit = max(1, failures)
        self._min_cooldown_s = cooldown_s
        self._max_cooldown_s = cooldown_s if max_cooldown_s is None else max_cooldown_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._cooldown_s = cooldown_s
        self._probing = False
        self._retry_at = 0.0

    @property
    def is_open(self) -> bool:
        """True while calls are refused; False once a probe is due."""
        return self._failures >= self._limit and self._clock() < self._retry_at

    def allow(self) -> bool:
        """Return whether the call may be made. While the breaker is half-open only one probe per cool-down may."""
        if self._failures < self._limit:
            return True
        with self._lock:
            now = self._clock()
            if now < self._retry_at:
                return False
            self._retry_at = now + self._cooldown_s
            self._probing = True
            return True

    def success(self) -> None:
        """The other side answered in time (a miss is an answer): close."""
        if self._failures:
            with self._lock:
                self._failures = 0
                self._cooldown_s = self._min_cooldown_s
                self._probing = False

    def failure(self) -> None:
        """No answer in time, or an invalid one. The `failures`-th in a row, or a failed probe, opens the breaker."""
        with self._lock:
            self._failures += 1
            if self._failures < self._limit:
                return
            if self._probing:
                self._cooldown_s = min(self._cooldown_s * 2, self._max_cooldown_s)
                self._probing = False
            self._retry_at = self._clock() + self._cooldown_s
