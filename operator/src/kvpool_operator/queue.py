"""A queue of keys: each key is in it once, and is worked on by one worker at a time.

Whatever happened to a pool, and however often, the answer is one more pass. A key that is added while it is worked on
comes back afterwards.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from typing import Final

__all__ = ["Backoff", "KeyQueue"]

Key = tuple[str, str]


class KeyQueue:
    """For one event loop. Times are those of the loop's clock."""

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._busy: set[Key] = set()
        self._again: dict[Key, float] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due) + len(self._again)

    def add(self, key: Key, delay_s: float = 0.0) -> None:
        """Work on `key` in `delay_s` seconds, or earlier if it was to be earlier."""
        at = asyncio.get_running_loop().time() + delay_s
        waiting = self._again if key in self._busy else self._due
        if key in waiting and waiting[key] <= at:
            return
        waiting[key] = at
        if waiting is self._due:
            heapq.heappush(self._heap, (at, key))
            self._changed.set()

    async def get(self) -> Key:
        """The next key that is due; `done` must follow."""
        while True:
            self._changed.clear()
            pause = self._drop_stale()
            if pause is not None and pause <= 0:
                _, key = heapq.heappop(self._heap)
                del self._due[key]
                self._busy.add(key)
                return key
            try:
                async with asyncio.timeout(pause):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def done(self, key: Key) -> None:
        """The work on `key` has ended."""
        self._busy.discard(key)
        at = self._again.pop(key, None)
        if at is not None:
            self.add(key, max(0.0, at - asyncio.get_running_loop().time()))

    def _drop_stale(self) -> float | None:
        """Seconds until the earliest key; None when there is none."""
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] - asyncio.get_running_loop().time() if self._heap else None


class Backoff:
    """Growing pauses for what fails again and again: 0.5 s, doubling, to a minute, with some chance in it."""

    FIRST_S: Final = 0.5
    LAST_S: Final = 60.0

    def __init__(self) -> None:
        self._failures: dict[Key, int] = {}

    def failed(self, key: Key) -> float:
        """Seconds to wait after one more failure."""
        n = self._failures[key] = self._failures.get(key, 0) + 1
        pause = min(self.LAST_S, self.FIRST_S * 2.0 ** min(n - 1, 10))
        return pause * random.uniform(0.8, 1.2)  # noqa: S311  not a secret

    def succeeded(self, key: Key) -> None:
        self._failures.pop(key, None)
