"""A circuit breaker: after repeated failures the answer is "no" at once, for a while, then one trial is let through."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """Opens after `failures` failures in a row for `cooldown_s` seconds. Thread-safe; never blocks.

    Whoever got True from `allow` must call `success` or `failure`; a caller that dies without doing so delays the next
    trial by one cool-down and no more.
    """

    def __init__(self, failures: int, cooldown_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = max(1, failures)
        self._cooldown_s = cooldown_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._retry_at = 0.0

    @property
    def is_open(self) -> bool:
        """True while failures have tripped it, also during the trial."""
        return self._failures >= self._limit

    @property
    def would_allow(self) -> bool:
        """What `allow` would answer, without taking the trial."""
        return self._failures < self._limit or self._clock() >= self._retry_at

    def allow(self) -> bool:
        """May the caller try? While open: one caller per cool-down."""
        if self._failures < self._limit:
            return True
        with self._lock:
            now = self._clock()
            if now < self._retry_at:
                return False
            self._retry_at = now + self._cooldown_s
            return True

    def success(self) -> None:
        """The other side answered in time (a miss is an answer)."""
        if self._failures:
            with self._lock:
                self._failures = 0

    def failure(self) -> None:
        """No answer in time, or a broken one."""
        with self._lock:
            self._failures += 1
            if self._failures >= self._limit:
                self._retry_at = self._clock() + self._cooldown_s
