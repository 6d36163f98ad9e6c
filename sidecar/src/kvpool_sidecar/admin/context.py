"""What an operation is given besides its parameters: to say how far it is, to keep to a pace, to see its end."""

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
    """Of one run. Thread-safe: the operation's thread writes, those that answer the operator read."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self._lock = threading.Lock()
        self._progress = (0, 0, "")
        self._counts: Counter[str] = Counter()

    def check(self) -> None:
        """CancelledError once the operation is to end: ask between two steps."""
        if self.cancelled.is_set():
            raise CancelledError("cancelled")

    def progress(self, done: int, total: int, unit: str) -> None:
        """So far; `total` 0: not known yet. `unit` is blocks or bytes."""
        with self._lock:
            self._progress = (done, total, unit)

    def count(self, label: str, n: int = 1) -> None:
        """For the operation's results: `n` more of `label`, of which there are at most 32."""
        with self._lock:
            if label in self._counts or len(self._counts) < MAX_COUNTS:
                self._counts[label] += n

    def pace(self, bytes_per_s: float) -> RateLimiter:
        """Waiting for it ends when the operation is cancelled; PoolUnavailableError then."""
        return RateLimiter(lambda: bytes_per_s, self.cancelled.wait)

    @property
    def counts(self) -> dict[str, int]:
        """So far."""
        with self._lock:
            return dict(self._counts)

    @property
    def how_far(self) -> dict[str, int | str]:
        """For the operator."""
        with self._lock:
            done, total, unit = self._progress
        return {"done": done, "total": total, "unit": unit}


if TYPE_CHECKING:
    Runner = Callable[[Mapping[str, object], Context], Mapping[str, int] | None]
