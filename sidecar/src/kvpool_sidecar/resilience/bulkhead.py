"""Bulkhead: bounded threads and a circuit breaker around a dependency that may hang: a network mount, an index.

A thread that is stuck in the kernel cannot be cancelled, so the caller stops waiting instead, and the breaker keeps
others from piling up behind it. Threads are daemons: a hung mount does not keep the process alive.
"""

from __future__ import annotations

import collections
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from kvpool.errors import DeadlineExceededError, PoolUnavailableError
from kvpool_sidecar.resilience.turn import end_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool.transport.circuit_breaker import CircuitBreaker

__all__ = ["Bulkhead"]

T = TypeVar("T")


class _Call(Generic[T]):
    def __init__(self, work: Callable[[], T], discard: Callable[[T], None] | None) -> None:
        self._work = work
        self._discard = discard
        self._lock = threading.Lock()
        self._done = threading.Lock()  # held until there is a result: half the cost of an Event
        self._done.acquire()
        self._result: T | Exception | None = None
        self.abandoned = False

    def run(self) -> None:
        if self.abandoned:
            return
        try:
            result: T | Exception = self._work()
        except Exception as e:
            result = e
        late = self._finish(result)
        if late and self._discard is not None and not isinstance(result, Exception):
            self._discard(result)

    def _finish(self, result: T | Exception) -> bool:
        """Store the result; True if the caller has stopped waiting."""
        with self._lock:
            self._result = result
            self._done.release()
            return self.abandoned

    def wait(self, timeout_s: float, where: str) -> T | Exception:
        is_done = self._done.acquire(timeout=timeout_s)
        with self._lock:
            if is_done or self._done.acquire(blocking=False):
                return cast("T | Exception", self._result)
            self.abandoned = True
        return DeadlineExceededError("no answer in time", where=where)


class Bulkhead:
    """At most `threads` calls run and `backlog` wait; beyond that, and while the breaker is open, calls are refused."""

    def __init__(self, name: str, threads: int, backlog: int, breaker: CircuitBreaker) -> None:
        self.name = name
        self.breaker = breaker
        self._threads = threads
        self._backlog = backlog
        self._started = 0
        self._running = 0
        self._closed = False
        self._queue: collections.deque[_Call[Any]] = collections.deque()
        self._ready = threading.Condition()

    @property
    def available(self) -> bool:
        """False while the breaker is open: treat the dependency as unavailable."""
        return not self.breaker.is_open

    def run(self, work: Callable[[], T], timeout_s: float, *, discard: Callable[[T], None] | None = None) -> T:
        """Run `work()` for at most `timeout_s`.

        `discard` receives a result that arrives too late (close a descriptor there). Raises DeadlineExceededError,
        PoolUnavailableError (breaker open, or too many calls wait) or the exception of `work`.
        """
        result = self.run_all([work], timeout_s, discard=discard)[0]
        if isinstance(result, Exception):
            raise result
        return result

    def run_all(
        self, works: Sequence[Callable[[], T]], timeout_s: float, *, discard: Callable[[T], None] | None = None
    ) -> list[T | Exception]:
        """Run in parallel with one deadline; a missing result is replaced by its exception."""
        if not works:
            return []
        if self._closed or not self.breaker.allow():
            return [PoolUnavailableError("treated as absent after repeated failures", where=self.name)] * len(works)
        jobs = [_Call(work, discard) for work in works]
        if not self._submit(jobs):
            self.breaker.failure()
            return [PoolUnavailableError("too many calls wait", where=self.name)] * len(works)
        end_turn()
        deadline = time.monotonic() + timeout_s
        results = [job.wait(max(0.0, deadline - time.monotonic()), self.name) for job in jobs]
        failed = [r for r in results if isinstance(r, Exception)]
        if len(failed) == len(results):
            self.breaker.failure()
        else:
            self.breaker.success()
        return results

    def close(self) -> None:
        """Refuse further calls; threads end when their call does."""
        with self._ready:
            self._closed = True
            self._queue.clear()
            self._ready.notify_all()

    def _submit(self, jobs: list[_Call[T]]) -> bool:
        with self._ready:
            free = self._threads + self._backlog - self._running - len(jobs)
            if len(self._queue) > free:
                self._queue = collections.deque(job for job in self._queue if not job.abandoned)
            if len(self._queue) > free:
                return False
            self._queue.extend(jobs)
            while self._started < min(self._threads, self._running + len(self._queue)):
                self._started += 1
                threading.Thread(target=self._loop, name=f"{self.name}-{self._started}", daemon=True).start()
            self._ready.notify(len(jobs))
        return True

    def _loop(self) -> None:
        while True:
            with self._ready:
                while not self._queue:
                    if self._closed:
                        return
                    self._ready.wait()
                job = self._queue.popleft()
                self._running += 1
            try:
                job.run()
            finally:
                with self._ready:
                    self._running -= 1
