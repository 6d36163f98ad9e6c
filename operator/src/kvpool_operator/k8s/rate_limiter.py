"""A bound on how often something is done: so many times a second, and so many at once after a rest."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["IS_FOREGROUND", "MAX_BACKGROUND_DELAY_S", "RateLimiter"]

MAX_BACKGROUND_DELAY_S: Final = 5.0
_LOOK_S: Final = 0.05

IS_FOREGROUND: ContextVar[Callable[[], bool]] = ContextVar("waited_for", default=lambda: True)
"""Whether somebody waits for what this task does; asked again while it waits for its turn."""


class RateLimiter:
    """For one event loop. Whoever asks first goes first (the generic cell rate algorithm, ITU-T I.371).

    What nobody waits for takes only turns that nobody else wants, or any after `MAX_BACKGROUND_DELAY_S`.
    """

    def __init__(self, per_second: float, burst: int) -> None:
        if per_second <= 0 or burst < 1:
            raise ValueError("a pace needs a positive rate and a burst of at least 1")
        self._gap_s = 1.0 / per_second
        self._credit_s = burst * self._gap_s
        self._next: float | None = None

    async def acquire(self) -> None:
        """Wait until it is this caller's turn."""
        clock = asyncio.get_running_loop().time
        late = clock() + MAX_BACKGROUND_DELAY_S
        waits = IS_FOREGROUND.get()
        while not waits() and (self._next or 0.0) > clock() and clock() < late:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)  # turns come with time, not with an event
        now = clock()
        earliest = now - self._credit_s
        self._next = max(self._next if self._next is not None else earliest, earliest) + self._gap_s
        if self._next > now:
            await asyncio.sleep(self._next - now)
