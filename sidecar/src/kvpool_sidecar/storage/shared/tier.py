"""Access to the shared tier with deadlines: a hung mount behaves like an absent tier."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError, PoolUnavailableError
from kvpool.transport.circuit_breaker import CircuitBreaker
from kvpool.transport.descriptor_closer import DescriptorCloser
from kvpool_sidecar.blocks.events import BlockEvents, SharedBlocksAbsent
from kvpool_sidecar.resilience.bounded_cache import BoundedCache
from kvpool_sidecar.resilience.bulkhead import Bulkhead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_sidecar.storage.base import Block, Store

__all__ = ["SharedTier"]

_THREADS = 8
_BACKLOG = 512
_REMEMBERED = 1 << 17
_REMEMBER_S = 60.0
_CHECK_TIMEOUT_S = 30.0
_HUNG_CLOSE_S = 1.0


class SharedTier:
    """Calls `store` in bounded threads behind a circuit breaker; caches which blocks were present for a while."""

    def __init__(
        self, store: Store, *, failures: int = 3, cooldown_s: float = 1.0, events: BlockEvents | None = None
    ) -> None:
        self.store = store
        breaker = CircuitBreaker(failures, cooldown_s, max_cooldown_s=cooldown_s * 16)
        self.bulkhead = Bulkhead("shared tier", _THREADS, _BACKLOG, breaker)
        self.problem = ""
        self.events = events or BlockEvents()
        self._lock = threading.Lock()
        self._present: BoundedCache[bytes, bool] = BoundedCache(_REMEMBERED, _REMEMBER_S)
        self._closer = DescriptorCloser("shared-close")

    @property
    def available(self) -> bool:
        """False after repeated failures, and while closing a file hangs."""
        return self.bulkhead.available and self._closes

    def contains_many(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """Return which blocks are present, in order. False also for those whose state is unknown at the deadline."""
        if not self._closes:
            return [False] * len(keys)
        with self._lock:
            known = [key in self._present for key in keys]
        unknown = [key for key, is_known in zip(keys, known, strict=True) if not is_known]
        results = self.bulkhead.run_all([functools.partial(self.store.contains, key) for key in unknown], timeout_s)
        self._note(results)
        self._absent([key for key, result in zip(unknown, results, strict=True) if result is False])
        answers = iter(results)
        found = [is_known or next(answers) is True for is_known in known]
        for key, is_found in zip(keys, found, strict=True):
            if is_found:
                self.mark_present(key)
        return found

    def is_known_present(self, block_key: bytes) -> bool:
        """Return whether the block was present recently. No I/O."""
        with self._lock:
            return block_key in self._present

    def open_many(self, keys: Sequence[bytes], timeout_s: float) -> list[Block | None]:
        """Open blocks, in order; None for those that are absent or did not open within the deadline."""
        if not self._closes:
            self.problem = "closing a file hangs"
            return [None] * len(keys)
        jobs = [functools.partial(self.store.open, key) for key in keys]
        results = self.bulkhead.run_all(jobs, timeout_s, discard=self._discard)
        self._note(results)
        self._absent([key for key, result in zip(keys, results, strict=True) if result is None])
        blocks = [None if isinstance(r, Exception) else r for r in results]
        for key, block in zip(keys, blocks, strict=True):
            if block is None:
                self.mark_absent(key)
        return blocks

    def close_files(self, descriptors: Sequence[int]) -> None:
        """Close files of `open_many` in the background: close(2) may hang with the mount."""
        self._closer.close(descriptors)

    def verify(self, block_key: bytes, timeout_s: float = _CHECK_TIMEOUT_S) -> bool:
        """See Store.verify. False also if there is no result in time."""
        self.mark_absent(block_key)
        try:
            return self.bulkhead.run(lambda: self.store.verify(block_key), timeout_s)
        except (KVPoolError, OSError):
            return False

    def mark_present(self, block_key: bytes) -> None:
        """Record that the block is present."""
        with self._lock:
            self._present.put(block_key, True)

    def mark_absent(self, block_key: bytes) -> None:
        """Record that the block is absent."""
        with self._lock:
            self._present.pop(block_key)

    def mark_deleted(self, keys: Sequence[bytes]) -> None:
        """Record that these blocks are absent, and emit SharedBlocksAbsent."""
        for key in keys:
            self.mark_absent(key)
        self._absent(keys)

    def close(self) -> None:
        """Accept no more calls. Descriptors stay open: a thread may hang on one."""
        self.bulkhead.close()

    @property
    def _closes(self) -> bool:
        return self._closer.has_room and self._closer.hung_s < _HUNG_CLOSE_S

    def _absent(self, keys: Sequence[bytes]) -> None:
        if keys:
            self.events.emit(SharedBlocksAbsent(keys))

    def _note(self, results: Sequence[object]) -> None:
        """Record why the tier is unavailable. A call refused by the open breaker carries no news."""
        answered = [r for r in results if not isinstance(r, PoolUnavailableError)]
        if answered:
            self.problem = next((str(r) for r in answered if isinstance(r, (KVPoolError, OSError))), "")

    def _discard(self, block: Block | None) -> None:
        if block is not None:
            self.close_files((block.fd,))
