"""Work queue with priorities: each key is queued once, and one worker at a time processes it.

However often an object changes, the answer is one more reconcile. A key that is added while it is processed is queued
again afterwards.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from kvpool_operator.k8s.client import NamespacedName

__all__ = ["Backoff", "WorkQueue"]

_FOREGROUND: Final = 0
_BACKGROUND: Final = 1


class _Entry(NamedTuple):
    """When the key is due, and its priority."""

    due_at: float
    priority: int


class WorkQueue:
    """For one event loop; times are those of its clock.

    Two priorities: foreground (a user waits for it) goes before background (periodic checks). The background never
    starves: it gets at least every `FAIRNESS`-th turn. At most `background` keys of it are processed at the same time,
    however many workers are idle, so that a worker is free for foreground work.
    """

    FAIRNESS: Final = 8

    def __init__(self, background: int = 2) -> None:
        self._max_background = background
        self._queued: dict[NamespacedName, _Entry] = {}
        self._heaps: tuple[list[tuple[float, NamespacedName]], ...] = ([], [])
        self._processing: dict[NamespacedName, int] = {}
        self._requeued: dict[NamespacedName, _Entry] = {}
        self._changed = asyncio.Event()
        self._foreground_turns = 0

    def __len__(self) -> int:
        return len(self._queued) + len(self._requeued)

    def add(self, key: NamespacedName, delay_s: float = 0.0, *, background: bool = False) -> None:
        """Queue `key` in `delay_s` seconds, or earlier if it is queued for an earlier time."""
        self._add(key, _Entry(asyncio.get_running_loop().time() + delay_s, int(background)))

    def is_background(self, key: NamespacedName) -> bool:
        """Whether the key is processed in the background, and was not queued in the foreground since."""
        return bool(self._processing.get(key))

    def _add(self, key: NamespacedName, entry: _Entry) -> None:
        if self._processing.get(key) and entry.priority == _FOREGROUND:
            self._processing[key] = _FOREGROUND
            self._changed.set()
        pending = self._requeued if key in self._processing else self._queued
        previous = pending.get(key)
        if previous is not None:
            entry = _Entry(min(previous.due_at, entry.due_at), min(previous.priority, entry.priority))
            if entry == previous:
                return
        pending[key] = entry
        if pending is self._queued:
            heapq.heappush(self._heaps[entry.priority], (entry.due_at, key))
            self._changed.set()

    async def get(self) -> NamespacedName:
        """Wait for the next key that is due; `done` must follow."""
        while True:
            self._changed.clear()
            pauses = [self._seconds_until_due(priority) for priority in (_FOREGROUND, _BACKGROUND)]
            priority = self._next_priority([pause is not None and pause <= 0 for pause in pauses])
            if priority is not None:
                _, key = heapq.heappop(self._heaps[priority])
                del self._queued[key]
                self._processing[key] = priority
                return key
            if self._is_background_full:
                pauses[_BACKGROUND] = None  # `done` wakes
            try:
                async with asyncio.timeout(min((p for p in pauses if p is not None), default=None)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def done(self, key: NamespacedName) -> None:
        """The key was processed."""
        if self._processing.pop(key, _FOREGROUND):
            self._changed.set()
        entry = self._requeued.pop(key, None)
        if entry is not None:
            self._add(key, entry)

    def _next_priority(self, due: list[bool]) -> int | None:
        """The priority to serve, of those with a key that is due."""
        foreground, background = due[_FOREGROUND], due[_BACKGROUND] and not self._is_background_full
        if foreground and not (background and self._foreground_turns >= self.FAIRNESS - 1):
            self._foreground_turns = self._foreground_turns + 1 if background else 0
            return _FOREGROUND
        self._foreground_turns = 0
        return _BACKGROUND if background else None

    @property
    def _is_background_full(self) -> bool:
        return sum(self._processing.values()) >= self._max_background

    def _seconds_until_due(self, priority: int) -> float | None:
        """Seconds until the earliest key of the priority is due; None if there is none. Drops outdated entries."""
        heap = self._heaps[priority]
        while heap and self._queued.get(heap[0][1]) != _Entry(heap[0][0], priority):
            heapq.heappop(heap)
        return heap[0][0] - asyncio.get_running_loop().time() if heap else None


class Backoff:
    """Exponential backoff per key: 0.5 s, doubling up to a minute, with 20% jitter."""

    FIRST_S: Final = 0.5
    MAX_S: Final = 60.0

    def __init__(self) -> None:
        self._failures: dict[NamespacedName, int] = {}

    def failed(self, key: NamespacedName) -> float:
        """Count one more failure; the seconds to wait before the retry."""
        n = self._failures[key] = self._failures.get(key, 0) + 1
        pause_s = min(self.MAX_S, self.FIRST_S * 2.0 ** min(n - 1, 10))
        return pause_s * random.uniform(0.8, 1.2)  # noqa: S311  not a secret

    def succeeded(self, key: NamespacedName) -> None:
        """Reset the key's backoff."""
        self._failures.pop(key, None)
