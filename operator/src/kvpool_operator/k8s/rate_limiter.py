"""Rate limits: a queue that delays requests, and a bucket that refuses writes."""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["IS_FOREGROUND", "MAX_BACKGROUND_DELAY_S", "RateLimiter", "TokenBucket"]

MAX_BACKGROUND_DELAY_S: Final = 5.0
_POLL_INTERVAL_S: Final = 0.05

IS_FOREGROUND: ContextVar[Callable[[], bool]] = ContextVar("is_foreground", default=lambda: True)
"""Whether a user waits for the work of this task; evaluated again while the task waits for its turn."""


class RateLimiter:
    """Generic cell rate algorithm (ITU-T I.371), first come, first served. For one event loop.

    Background requests yield to foreground ones for at most `MAX_BACKGROUND_DELAY_S`.
    """

    def __init__(self, per_second: float, burst: int) -> None:
        if per_second <= 0 or burst < 1:
            raise ValueError("a rate limit needs a positive rate and a burst of at least 1")
        self._gap_s = 1.0 / per_second
        self._credit_s = burst * self._gap_s
        self._next: float | None = None

    async def acquire(self) -> None:
        """Wait for the next free slot."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + MAX_BACKGROUND_DELAY_S
        is_foreground = IS_FOREGROUND.get()
        while not is_foreground() and (self._next or 0.0) > clock() and clock() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_INTERVAL_S)  # slots become free with time, not with an event
        now = clock()
        earliest = now - self._credit_s
        self._next = max(self._next if self._next is not None else earliest, earliest) + self._gap_s
        if self._next > now:
            await asyncio.sleep(self._next - now)


class TokenBucket:
    """Refuses writes beyond `rate_per_s` in the long run and `burst` in one burst. For one event loop."""

    RATE_PER_S: Final = 20.0
    BURST: Final = 100.0

    def __init__(
        self, rate_per_s: float = RATE_PER_S, burst: float = BURST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = rate_per_s
        self._burst = burst
        self._clock = clock
        self._tokens = burst
        self._refilled_at = clock()

    def try_acquire(self, *, priority: bool) -> bool:
        """Take one token if there is one. Without `priority`, half of the bucket is left to those with it."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._refilled_at) * self._rate)
        self._refilled_at = now
        if self._tokens < (1 if priority else self._burst / 2 + 1):
            return False
        self._tokens -= 1
        return True
