"""A breaker: after repeated failures a part is treated as absent for a while, then tried once. The clock is given."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """Closed, open, half-open. Each failed trial doubles the wait up to `longest_s`. Thread-safe."""

    def __init__(
        self, failures: int, cooldown_s: float, clock: Callable[[], float], *, longest_s: float | None = None
    ) -> None:
        self._limit = failures
        self._cooldown = cooldown_s
        self._longest = longest_s if longest_s is not None else cooldown_s * 16
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._wait = cooldown_s
        self._open_until: float | None = None
        self._trial = False

    def allow(self) -> bool:
        """May this call be made? While half-open only one caller at a time is told yes; it must report back."""
        with self._lock:
            if self._open_until is None:
                return True
            if self._trial or self._clock() < self._open_until:
                return False
            self._trial = True
            return True

    def success(self) -> None:
        """The call worked: close."""
        with self._lock:
            self._failures = 0
            self._wait = self._cooldown
            self._open_until = None
            self._trial = False

    def failure(self) -> None:
        """The call failed; the `failures`-th in a row, or a failed trial, opens."""
        with self._lock:
            self._failures += 1
            if self._trial:
                self._wait = min(self._wait * 2, self._longest)
            elif self._failures < self._limit:
                return
            self._trial = False
            self._open_until = self._clock() + self._wait

    @property
    def is_open(self) -> bool:
        """True while calls are refused; a trial that is due does not count as open."""
        with self._lock:
            return self._open_until is not None and (self._trial or self._clock() < self._open_until)
