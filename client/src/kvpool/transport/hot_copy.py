"""Copy hot blocks (kvpool.transport.hot_blocks) out of memory into the engine's buffers, without a request."""

from __future__ import annotations

import collections
import os
import time
from typing import TYPE_CHECKING

from kvpool.errors import DeadlineExceededError
from kvpool.protocol.wire import Tier
from kvpool.stats import Reason
from kvpool.transport import transfer
from kvpool.transport.descriptor_closer import close_later

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool.transport.pending import Batch, PendingRead
    from kvpool.transport.worker_pool import WorkerPool

__all__ = ["HotCopy"]

_HELPER_BYTES = 32 << 20  # work that justifies waking one helper: there is nothing but a copy to do
_PROCESSORS = os.cpu_count() or 1


class HotCopy:
    """Copies in the calling thread, and in a few others if there is much to do. `kept` gets the blocks copied."""

    def __init__(self, batch: Batch, workers: WorkerPool, kept: collections.deque[PendingRead]) -> None:
        self._batch = batch
        self._workers = workers
        self._kept = kept
        self._ready: collections.deque[PendingRead] = collections.deque()  # apart: a late helper takes no other block

    def run(self, hot: Sequence[PendingRead]) -> bool:
        """Copy all blocks; those that fail are not `ok`. False if the deadline expired first: abandon the batch."""
        self._ready.extend(hot)
        helpers = min(sum(len(load.view) for load in hot) // _HELPER_BYTES, self._workers.limit, _PROCESSORS - 1)
        if helpers:
            self._batch.expect(len(hot))
            for _ in range(helpers):
                self._workers.submit(self._help)
            self._batch.settle(self._drain())
            is_done = self._batch.wait()
        else:
            is_done = self._drain() == len(hot)
        is_in_time = is_done and time.monotonic() < self._batch.deadline
        if not is_in_time:
            self._close(self._take_all(self._ready))
        return is_in_time

    def _help(self) -> None:
        self._batch.settle(self._drain())

    def _drain(self) -> int:
        """Copy blocks until none is left or the deadline expires; return their number."""
        batch, ready, done = self._batch, self._ready, 0
        failed: list[PendingRead] = []
        try:
            while ready:
                load = ready.popleft()
                done += 1
                if transfer.read_hot(load, batch):
                    load.done = time.monotonic()
                    load.ok = True
                    self._kept.append(load)
                else:
                    failed.append(load)
        except IndexError:  # another thread has taken the last one
            pass
        except DeadlineExceededError:
            load.reason = Reason.DEADLINE
            failed.append(load)
        if batch.closed:  # too late to keep any
            failed += self._take_all(self._kept)
        self._close(failed)
        return done

    @staticmethod
    def _take_all(queue: collections.deque[PendingRead]) -> list[PendingRead]:
        taken = []
        try:
            while queue:
                taken.append(queue.popleft())
        except IndexError:  # another thread has taken the last one
            pass
        return taken

    @staticmethod
    def _close(loads: Sequence[PendingRead]) -> None:
        if loads:
            close_later([load.take_descriptor() for load in loads], Tier.LOCAL)
