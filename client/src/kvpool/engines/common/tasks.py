"""Numbered background tasks; each outcome is kept until it is fetched, once.

For engines that poll an event descriptor: submit, get notified, fetch by number. Independent of the engine.
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
_MAX_OUTCOMES = 65_536  # not fetched; the oldest are dropped

T = TypeVar("T")


class Tasks(Generic[T]):
    """Runs work on `threads` threads; `submit`, `take` and `take_all` never block. Thread-safe.

    Work that is submitted while the pending weight is `limit` or more does not run: its outcome is `otherwise`
    immediately, as it is if the work raises or the tasks are closed before it starts. `wake` is called after each
    outcome; it may raise. `numbers` provides the numbers of the tasks.

    `count` of a task: how much `dropped` grows by if it does not run.
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
        self.dropped = 0  # count of tasks that were not run

    @property
    def pending(self) -> int:
        """Weight of queued and running tasks."""
        return self._weight

    @property
    def is_closed(self) -> bool:
        """True after `close` began."""
        return self._closed

    def submit(self, work: Callable[[], T], otherwise: T, weight: int = 1, count: int = 1) -> int:
        """Run `work` in the background. Return the number of its outcome."""
        with self._condition:
            number = next(self._numbers)
            drop = self._closed or self._weight >= self._limit
            self._weight += 0 if drop else weight
            self.dropped += count if drop else 0
        if drop:
            self._settle(number, otherwise, 0)
        else:
            self._workers.submit(lambda: self._run(number, work, otherwise, weight))
        return number

    def take(self, number: int) -> T | None:
        """Return the outcome, once; None before and after."""
        with self._condition:
            return self._outcomes.pop(number, None)

    def take_all(self) -> dict[int, T]:
        """Return all outcomes that were not fetched yet."""
        with self._condition:
            outcomes, self._outcomes = self._outcomes, {}
            return outcomes

    def close(self, timeout_s: float) -> bool:
        """Start no more tasks and wait for running ones. Return False after `timeout_s`."""
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
            _log.debug("kvpool: the engine could not be notified: %s", e)
        with self._condition:  # last: the closing thread may release the descriptor once the weight is 0
            self._weight -= weight
            self._condition.notify_all()
