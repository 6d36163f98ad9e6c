"""A queue of keys: each key is in it once, and is worked on by one worker at a time.

Whatever happened to a pool, and however often, the answer is one more pass. A key that is added while it is worked on
comes back afterwards.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from kvpool_operator.k8s.client import NamespacedName

__all__ = ["Backoff", "WorkQueue"]


class _Wait(NamedTuple):
    """From when, and in which lane (0: somebody waits)."""

    at: float
    lane: int


class WorkQueue:
    """For one event loop. Times are those of the loop's clock.

    Two lanes: what somebody waits for goes before what is looked at again only to be sure. The second lane is never
    starved: it gets every `FAIR`-th turn at least. `background`: so many of it are worked on at once, whatever is free,
    so that a worker is there for what somebody comes to wait for.
    """

    FAIR: Final = 8

    def __init__(self, background: int = 2) -> None:
        self._background = background
        self._due: dict[NamespacedName, _Wait] = {}
        self._lanes: tuple[list[tuple[float, NamespacedName]], ...] = ([], [])
        self._busy: dict[NamespacedName, int] = {}
        self._again: dict[NamespacedName, _Wait] = {}
        self._changed = asyncio.Event()
        self._in_a_row = 0

    def __len__(self) -> int:
        return len(self._due) + len(self._again)

    def add(self, key: NamespacedName, delay_s: float = 0.0, *, background: bool = False) -> None:
        """Work on `key` in `delay_s` seconds, or earlier if it was to be earlier. `background`: nobody waits for it."""
        self._add(key, _Wait(asyncio.get_running_loop().time() + delay_s, int(background)))

    def is_background(self, key: NamespacedName) -> bool:
        """Whether it is worked on, and nobody has come to wait for it since."""
        return bool(self._busy.get(key))

    def _add(self, key: NamespacedName, wait: _Wait) -> None:
        if self._busy.get(key) and not wait.lane:
            self._busy[key] = 0
            self._changed.set()
        waiting = self._again if key in self._busy else self._due
        before = waiting.get(key)
        if before is not None:
            wait = _Wait(min(before.at, wait.at), min(before.lane, wait.lane))
            if wait == before:
                return
        waiting[key] = wait
        if waiting is self._due:
            heapq.heappush(self._lanes[wait.lane], (wait.at, key))
            self._changed.set()

    async def get(self) -> NamespacedName:
        """The next key that is due; `done` must follow."""
        while True:
            self._changed.clear()
            pauses = [self._drop_stale(lane) for lane in (0, 1)]
            lane = self._turn([pause is not None and pause <= 0 for pause in pauses])
            if lane is not None:
                _, key = heapq.heappop(self._lanes[lane])
                del self._due[key]
                self._busy[key] = lane
                return key
            if self._is_full:
                pauses[1] = None  # `done` wakes
            try:
                async with asyncio.timeout(min((p for p in pauses if p is not None), default=None)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def done(self, key: NamespacedName) -> None:
        """The work on `key` has ended."""
        if self._busy.pop(key, 0):
            self._changed.set()
        wait = self._again.pop(key, None)
        if wait is not None:
            self._add(key, wait)

    def _turn(self, due: list[bool]) -> int | None:
        """Whose turn it is, of the lanes in which something is due."""
        due = [due[0], due[1] and not self._is_full]
        if due[0] and not (due[1] and self._in_a_row >= self.FAIR - 1):
            self._in_a_row = self._in_a_row + 1 if due[1] else 0
            return 0
        self._in_a_row = 0
        return 1 if due[1] else None

    @property
    def _is_full(self) -> bool:
        return sum(self._busy.values()) >= self._background

    def _drop_stale(self, lane: int) -> float | None:
        """Seconds until the earliest key of the lane; None when there is none."""
        heap = self._lanes[lane]
        while heap and self._due.get(heap[0][1]) != _Wait(heap[0][0], lane):
            heapq.heappop(heap)
        return heap[0][0] - asyncio.get_running_loop().time() if heap else None


class Backoff:
    """Growing pauses for what fails again and again: 0.5 s, doubling, to a minute, with some chance in it."""

    FIRST_S: Final = 0.5
    LAST_S: Final = 60.0

    def __init__(self) -> None:
        self._failures: dict[NamespacedName, int] = {}

    def failed(self, key: NamespacedName) -> float:
        """Seconds to wait after one more failure."""
        n = self._failures[key] = self._failures.get(key, 0) + 1
        pause = min(self.LAST_S, self.FIRST_S * 2.0 ** min(n - 1, 10))
        return pause * random.uniform(0.8, 1.2)  # noqa: S311  not a secret

    def succeeded(self, key: NamespacedName) -> None:
        self._failures.pop(key, None)
