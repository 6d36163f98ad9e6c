"""Tasks with a number, run in the background; each outcome is kept until it is fetched, once.

An engine that polls an event descriptor wants just that: it submits, is woken, and fetches by number. Nothing here
knows an engine.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from kvpool.transport.worker_pool import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Tasks"]

_log = logging.getLogger("kvpool")
_MAX_OUTCOMES = 65_536  # that nobody fetched; the oldest go

T = TypeVar("T")


class Tasks(Generic[T]):
    """Runs work on `threads` threads; `submit`, `take` and `take_all` never block. Thread-safe.

    Work that comes while the weight of what waits or runs is `limit` or more does not run: its outcome is `otherwise`
    at once, as it is if the work raises or if everything was closed before its turn. `wake` is called after each
    outcome; it may raise. `numbers` gives the tasks their numbers.
    """

    def __init__(self, name: str, threads: int, limit: int, wake: Callable[[], None], numbers: Iterator[int]) -> None:
        self._workers = WorkerPool(threads, name)
        self._limit = limit
        self._wake = wake
        self._numbers = numbers
        self._condition = threading.Condition()
        self._outcomes: dict[int, T] = {}
        self._weight = 0
        self._closed = False
        self.dropped = 0  # weight of what was not even tried

    @property
    def pending(self) -> int:
        """Weight of what waits or runs."""
        return self._weight

    def submit(self, work: Callable[[], T], otherwise: T, weight: int = 1) -> int:
        """Run `work` in the background; the number of its outcome."""
        with self._condition:
            number = next(self._numbers)
            drop = self._closed or self._weight >= self._limit
            self._weight += 0 if drop else weight
            self.dropped += weight if drop else 0
        if drop:
            self._settle(number, otherwise, 0)
        else:
            self._workers.submit(lambda: self._run(number, work, otherwise, weight))
        return number

    def take(self, number: int) -> T | None:
        """The outcome, the first time it is asked for; None before and after."""
        with self._condition:
            return self._outcomes.pop(number, None)

    def take_all(self) -> dict[int, T]:
        """All outcomes that were not fetched yet."""
        with self._condition:
            outcomes, self._outcomes = self._outcomes, {}
            return outcomes

    def close(self, timeout_s: float) -> bool:
        """Start nothing more and wait for what runs; False if that took too long."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            self._closed = True
            done = self._condition.wait_for(lambda: self._weight <= 0, max(0.0, deadline - time.monotonic()))
        self._workers.close()
        return done

    def _run(self, number: int, work: Callable[[], T], otherwise: T, weight: int) -> None:
        try:
            outcome = otherwise if self._closed else work()
        except Exception:
            _log.exception("kvpool: a task failed")
            outcome = otherwise
        self._settle(number, outcome, weight)

    def _settle(self, number: int, outcome: T, weight: int) -> None:
        with self._condition:
            self._outcomes[number] = outcome
            if len(self._outcomes) > _MAX_OUTCOMES:
                del self._outcomes[next(iter(self._outcomes))]
        try:
            self._wake()
        except Exception as e:
            _log.debug("kvpool: nobody is woken: %s", e)
        with self._condition:  # last: whoever closes may take the descriptor away once the weight is gone
            self._weight -= weight
            self._condition.notify_all()
