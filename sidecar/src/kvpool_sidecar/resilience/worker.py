"""Background threads: a worker that drains a queue, and a task that runs periodically.

Both run daemon threads with a name, log exceptions and continue, and stop promptly: `stop` wakes a waiting thread and
joins it for a bounded time. A thread that is stuck in a system call is left behind; it does not keep the process alive.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BackgroundWorker", "PeriodicTask"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 30.0
_STOP_S = 1.0


class _Backoff:
    """Pause after consecutive failures: doubles from 0.5 s up to 30 s."""

    def __init__(self) -> None:
        self._next_s = _MIN_BACKOFF_S

    def reset(self) -> None:
        self._next_s = _MIN_BACKOFF_S

    def next_s(self) -> float:
        seconds, self._next_s = self._next_s, min(self._next_s * 2, _MAX_BACKOFF_S)
        return seconds


class BackgroundWorker(Generic[T]):
    """Calls `handle` with each submitted item, in order of submission, in `threads` threads. Thread-safe.

    The queue holds at most `max_queued` items (0: unbounded); `submit` never blocks. After an exception the thread
    pauses, at first not at all, then longer with each further failure in a row.
    """

    def __init__(self, name: str, handle: Callable[[T], None], *, max_queued: int = 0, threads: int = 1) -> None:
        self.name = name
        self._handle = handle
        self._max_queued = max_queued
        self._count = threads
        self._queue: collections.deque[T] = collections.deque()
        self._ready = threading.Condition()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads. A second call has no effect."""
        with self._ready:
            if self._threads or self._stopping.is_set():
                return
            for n in range(self._count):
                name = f"{self.name}-{n}" if self._count > 1 else self.name
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            for thread in self._threads:
                thread.start()

    def stop(self, timeout_s: float = _STOP_S) -> None:
        """Drop the queued items and join the threads, for at most `timeout_s` in total."""
        with self._ready:
            self._stopping.set()
            self._queue.clear()
            self._ready.notify_all()
        _join(self._threads, timeout_s)

    def submit(self, item: T) -> bool:
        """Queue `item`; False if the queue is full or the worker is stopped."""
        with self._ready:
            if self._stopping.is_set() or 0 < self._max_queued <= len(self._queue):
                return False
            self._queue.append(item)
            self._ready.notify()
            return True

    @property
    def queued(self) -> int:
        """Items that wait."""
        return len(self._queue)

    def sleep(self, seconds: float) -> bool:
        """Pause inside `handle`; True as soon as the worker is stopped."""
        return self._stopping.wait(max(0.0, seconds))

    def _run(self) -> None:
        backoff = _Backoff()
        failed = False
        while True:
            with self._ready:
                while not self._queue and not self._stopping.is_set():
                    self._ready.wait()
                if self._stopping.is_set():
                    return
                item = self._queue.popleft()
            try:
                self._handle(item)
            except Exception:
                log.exception("%s failed", self.name)
                if failed:
                    self._stopping.wait(backoff.next_s())
                failed = True
            else:
                failed = False
                backoff.reset()


class PeriodicTask:
    """Calls `work` in one thread: first immediately, then every `interval_s`, until `stop`. Thread-safe.

    `work` may return the seconds until its next call (None: `interval_s`). After an exception the next call comes
    after a pause that doubles from 0.5 s up to 30 s. `on_stop` is called last, in the same thread.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], float | None],
        interval_s: float,
        *,
        run_at_once: bool = True,
        on_stop: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._work = work
        self._interval_s = interval_s
        self._run_at_once = run_at_once
        self._on_stop = on_stop
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_stopping(self) -> bool:
        """True once `stop` was called."""
        return self._stopping.is_set()

    @property
    def is_running(self) -> bool:
        """True while the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread. A second call has no effect."""
        if self._thread is None and not self.is_stopping:
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float = _STOP_S) -> None:
        """End the loop after the call in progress, and join the thread for at most `timeout_s`."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            _join([self._thread], timeout_s)

    def trigger(self) -> None:
        """Call `work` now, or once more if a call is in progress."""
        self._wake.set()

    def sleep(self, seconds: float) -> bool:
        """Pause inside `work`; True as soon as the task is stopped."""
        return self._stopping.wait(max(0.0, seconds))

    def _run(self) -> None:
        backoff = _Backoff()
        if not self._run_at_once:
            self._wake.wait(self._interval_s)
        while not self.is_stopping:
            self._wake.clear()
            try:
                pause = self._work()
            except Exception:
                log.exception("%s failed", self.name)
                pause = backoff.next_s()
            else:
                backoff.reset()
                pause = self._interval_s if pause is None else pause
            if not self.is_stopping:
                self._wake.wait(max(0.0, pause))
        if self._on_stop is not None:
            try:
                self._on_stop()
            except Exception:
                log.exception("%s failed at its end", self.name)


def _join(threads: list[threading.Thread], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))
