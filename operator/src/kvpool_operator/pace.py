"""A bound on how often something is done: so many times a second, and so many at once after a rest."""

from __future__ import annotations

import asyncio

__all__ = ["Pace"]


class Pace:
    """For one event loop. Whoever asks first goes first (the generic cell rate algorithm, ITU-T I.371)."""

    def __init__(self, per_second: float, burst: int) -> None:
        if per_second <= 0 or burst < 1:
            raise ValueError("a pace needs a positive rate and a burst of at least 1")
        self._gap_s = 1.0 / per_second
        self._credit_s = burst * self._gap_s
        self._next: float | None = None

    async def turn(self) -> None:
        """Wait until it is this caller's turn."""
        now = asyncio.get_running_loop().time()
        earliest = now - self._credit_s
        self._next = max(self._next if self._next is not None else earliest, earliest) + self._gap_s
        if self._next > now:
            await asyncio.sleep(self._next - now)
