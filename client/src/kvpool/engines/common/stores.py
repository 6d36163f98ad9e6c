"""Stores of many blocks: cut into batches, each with a deadline of its own, and a count of what was not stored.

Independent of the engine. A batch bounds how long a store holds the engine's memory after it was closed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from kvpool.results import StoreResult
from kvpool.stats import Reason

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterable, Sequence

    from kvpool.client import Client

__all__ = ["BATCH_BYTES", "UnstoredCounter", "put_in_batches", "queue_bytes", "split_batches"]

BATCH_BYTES = 128 << 20
"""Bytes of one batch; a larger block is a batch alone."""
_QUEUE_BYTES = 1 << 30  # where the size of the engine's memory is unknown
_WARN_EVERY_S = 60.0


def queue_bytes(memory_bytes: object, setting: object = None) -> int:
    """Return how many bytes may wait to be stored: `setting`, else half of the engine's memory, else 1 GiB."""
    for value, share in ((setting, 1), (memory_bytes, 2)):
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return max(1, int(value / share))
    return _QUEUE_BYTES


def split_batches(sizes: Sequence[int], max_blocks: int, max_bytes: int = BATCH_BYTES) -> list[range]:
    """Return consecutive ranges of positions, each with at most `max_blocks` blocks and `max_bytes` in total."""
    batches: list[range] = []
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and (i - start >= max(1, max_blocks) or total + size > max_bytes):
            batches.append(range(start, i))
            start, total = i, 0
        total += size
    if start < len(sizes):
        batches.append(range(start, len(sizes)))
    return batches


def put_in_batches(
    client: Client,
    block_ids: Sequence[bytes],
    views: Sequence[memoryview],
    salts: Sequence[str | None] = (),
    is_closed: Callable[[], bool] = lambda: False,
) -> list[StoreResult]:
    """Store `views` as the blocks, one result per block. After `is_closed` no batch starts (Reason.CLOSED).

    All batches together end within `client.store_seconds` of all bytes, each within that of its own bytes.
    """
    sizes = [len(view) for view in views]
    until = time.monotonic() + client.store_seconds(sum(sizes))
    results: list[StoreResult] = []
    for batch in split_batches(sizes, client.config.max_inflight_stores):
        part = slice(batch.start, batch.stop)
        if is_closed():
            results += [StoreResult(False, False, Reason.CLOSED, 0)] * len(batch)
            continue
        deadline = min(until, time.monotonic() + client.store_seconds(sum(sizes[part])))
        results += client.put_from(block_ids[part], views[part], deadline, salts=salts[part])
    return results


class UnstoredCounter:
    """Counts blocks that were not stored, by reason, and logs them once a minute at most. Thread-safe."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._unlogged: Counter[str] = Counter()
        self._next = 0.0

    def add(self, reason: Reason, count: int = 1) -> None:
        """Count `count` blocks that were not stored because of `reason`."""
        if count <= 0:
            return
        with self._lock:
            self._totals[str(reason)] += count
            self._unlogged[str(reason)] += count
            if self._clock() < self._next:
                return
            self._next = self._clock() + _WARN_EVERY_S
            news, self._unlogged = self._unlogged, Counter()
        listed = ", ".join(f"{reason} {n}" for reason, n in sorted(news.items()))
        self._log.warning("kvpool: %d chunks were not stored: %s", sum(news.values()), listed)

    def add_results(self, results: Iterable[StoreResult]) -> None:
        """Count the results that are not ok."""
        for reason, count in Counter(result.reason for result in results if not result.ok).items():
            self.add(reason, count)

    def snapshot(self) -> dict[str, int]:
        """Return the totals by reason."""
        with self._lock:
            return dict(self._totals)
