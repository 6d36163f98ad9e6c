"""Small bounded pool of daemon threads for reads and writes of blocks.

Not concurrent.futures: its threads are joined when the interpreter exits, so a thread that is stuck in the kernel on a
hung file system would keep the engine from exiting.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WorkerPool"]

_log = logging.getLogger("kvpool")


class WorkerPool:
    """At most `limit` threads, started on demand. Thread-safe."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = max(1, limit)
        self._name = name
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = 0
        self._idle = 0
        self._closed = False

    @property
    def limit(self) -> int:
        return self._limit

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread of the pool, queued while all are busy. Dropped after `close`."""
        with self._lock:
            if self._closed:
                return
            self._queue.put(work)
            if self._queue.qsize() > self._idle and self._threads < self._limit:
                self._threads += 1
                threading.Thread(target=self._run, name=f"{self._name}-{self._threads}", daemon=True).start()

    def close(self) -> None:
        """Let the threads end after their queued work; does not wait (one may be stuck in the kernel)."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._queue.put(None)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            work = self._queue.get()
            with self._lock:
                self._idle -= 1
            if work is None:
                return
            try:
                work()
            except Exception:
                _log.exception("kvpool: a worker failed")
            work = None  # it holds views of the engine's memory, which must not outlive the job
