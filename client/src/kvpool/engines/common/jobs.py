"""Background loads and stores of an engine's host memory; results are collected for its scheduler.

Independent of the engine: a job is a list of block ids and a list of memory slots.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool import tracing
from kvpool.transport.worker_pool import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool.client import Client
    from kvpool.protocol.block import EngineBlock
    from kvpool.protocol.wire import Tier

__all__ = ["TransferJobs", "TransferResult"]

_log = logging.getLogger("kvpool")

_MAX_QUEUED_WORK = 256


class TransferResult(NamedTuple):
    """Result of one job: success per block and, for loads, the tier of each block."""

    job: int
    is_load: bool
    ok: tuple[bool, ...]
    tiers: tuple[Tier, ...]  # empty for stores
    seconds: float
    bytes: int


class TransferJobs:
    """Runs jobs on a few threads; `take_finished` and `submit_*` never block. Thread-safe.

    A load's deadline counts from its submission and includes the time for bytes submitted before it. A store that
    is submitted while `max_queued` blocks wait is dropped: it finishes immediately, without success.
    """

    def __init__(self, load_threads: int, max_queued: int) -> None:
        self._loaders = WorkerPool(load_threads, "kvpool-load")
        self._storer = WorkerPool(1, "kvpool-store")
        self._max_queued = max_queued
        self._finished: queue.SimpleQueue[TransferResult] = queue.SimpleQueue()
        self._condition = threading.Condition()
        self._pending = 0
        self._loading_bytes = 0
        self._queued_stores = 0
        self._queued_work = 0
        self.dropped = 0

    @property
    def pending(self) -> int:
        """Number of unfinished jobs."""
        return self._pending

    def submit_load(
        self,
        job: int,
        client: Client,
        block_ids: Sequence[bytes],
        slots: Sequence[memoryview],
        traceparent: object = None,
    ) -> None:
        """Load blocks into `slots`. `traceparent`: of the engine's request, for spans."""
        size = sum(len(slot) for slot in slots)
        with self._condition:
            self._pending += 1
            self._loading_bytes += size
            deadline = time.monotonic() + client.load_seconds(self._loading_bytes)

        def run() -> tuple[tuple[bool, ...], tuple[Tier, ...], int]:
            with tracing.parent(traceparent):
                results = client.get_into(block_ids, slots, deadline)
            return tuple(r.ok for r in results), tuple(r.tier for r in results), sum(r.bytes for r in results)

        def settle() -> None:
            self._loading_bytes -= size

        self._loaders.submit(lambda: self._run(job, True, len(block_ids), run, settle))

    def submit_store(
        self,
        job: int,
        client: Client,
        block_ids: Sequence[bytes],
        slots: Sequence[memoryview],
        engine_blocks: Sequence[EngineBlock | None] = (),
        salts: Sequence[str | None] = (),
    ) -> None:
        """Store `slots` as the blocks; `engine_blocks` and `salts`: see Client.put_from."""
        count = len(block_ids)
        with self._condition:
            self._pending += 1
            drop = self._queued_stores >= self._max_queued
            self.dropped += count if drop else 0
            self._queued_stores += 0 if drop else count

        def run() -> tuple[tuple[bool, ...], tuple[Tier, ...], int]:
            results = client.put_from(block_ids, slots, engine_blocks=engine_blocks, salts=salts)
            return tuple(r.ok for r in results), (), sum(r.bytes for r in results)

        def settle() -> None:
            self._queued_stores -= count

        if drop:
            self._run(job, False, count, lambda: ((False,) * count, (), 0), lambda: None)
        else:
            self._storer.submit(lambda: self._run(job, False, count, run, settle))

    def after_stores(self, work: Callable[[], object]) -> bool:
        """Run `work` after the stores submitted so far; False, and dropped, while too much of it waits."""
        with self._condition:
            if self._queued_work >= _MAX_QUEUED_WORK:
                return False
            self._queued_work += 1

        def run() -> None:
            try:
                work()
            except Exception:
                _log.exception("kvpool: background work failed")
            with self._condition:
                self._queued_work -= 1

        self._storer.submit(run)
        return True

    def take_finished(self) -> list[TransferResult]:
        """Return all results since the last call."""
        out = []
        while True:
            try:
                out.append(self._finished.get_nowait())
            except queue.Empty:
                return out

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until every job has finished. Return False after `timeout_s`. All jobs have deadlines."""
        with self._condition:
            return self._condition.wait_for(lambda: self._pending == 0, timeout_s)

    def close(self) -> None:
        """Accept no more jobs; running ones end at their deadlines."""
        self._loaders.close()
        self._storer.close()

    def _run(
        self,
        job: int,
        is_load: bool,
        count: int,
        work: Callable[[], tuple[tuple[bool, ...], tuple[Tier, ...], int]],
        settle: Callable[[], None],
    ) -> None:
        started = time.monotonic()
        try:
            ok, tiers, size = work()
        except Exception:
            _log.exception("kvpool: a job failed")
            ok, tiers, size = (False,) * count, (), 0
        self._finished.put(TransferResult(job, is_load, ok, tiers, time.monotonic() - started, size))
        with self._condition:
            settle()
            self._pending -= 1
            self._condition.notify_all()
