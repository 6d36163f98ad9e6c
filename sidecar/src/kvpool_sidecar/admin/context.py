"""Context of a running operation: progress, counts, rate limit and cancellation."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError
from kvpool_sidecar.resilience.rate_limiter import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["CancelledError", "Context", "Runner"]

MAX_COUNTS = 32


class CancelledError(KVPoolError):
    """The operation was cancelled."""


class Context:
    """Context of one run. Thread-safe: the operation's thread writes, and the admin server reads."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self._lock = threading.Lock()
        self._progress = (0, 0, "")
        self._counts: Counter[str] = Counter()

    def check(self) -> None:
        """Raise CancelledError if the operation was cancelled; call it between two steps."""
        if self.cancelled.is_set():
            raise CancelledError("cancelled")

    def set_progress(self, done: int, total: int, unit: str) -> None:
        """Report progress; `total` 0 means unknown. `unit` is blocks or bytes."""
        with self._lock:
            self._progress = (done, total, unit)

    def count(self, label: str, n: int = 1) -> None:
        """Add `n` to a count of the operation's results; at most 32 labels."""
        with self._lock:
            if label in self._counts or len(self._counts) < MAX_COUNTS:
                self._counts[label] += n

    def pace(self, bytes_per_s: float) -> RateLimiter:
        """Return a rate limiter whose waits end with PoolUnavailableError when the operation is cancelled."""
        return RateLimiter(lambda: bytes_per_s, self.cancelled.wait)

    @property
    def counts(self) -> dict[str, int]:
        """Counts so far."""
        with self._lock:
            return dict(self._counts)

    @property
    def progress(self) -> dict[str, int | str]:
        """Progress as reported to the operator."""
        with self._lock:
            done, total, unit = self._progress
        return {"done": done, "total": total, "unit": unit}


if TYPE_CHECKING:
    Runner = Callable[[Mapping[str, object], Context], Mapping[str, int] | None]
