"""Access times of shared blocks, persisted as modification times at a bounded rate.

File system access times are unusable (most mounts do not keep them, and reads from the page cache do not count), and a
sidecar's memory is neither persistent nor shared. So a use updates the modification time unless any sidecar did so
within the last minutes, off the read path. A lookup hit on a node counts as a use: a copy matters most where all nodes
hold the block and may evict it.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from kvpool.protocol.wire import Tier
from kvpool_sidecar.resilience.bounded_cache import BoundedCache
from kvpool_sidecar.resilience.worker import BackgroundWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_sidecar.counters import Stats

__all__ = ["AccessTimes"]

log = logging.getLogger(__name__)

_MAX_QUEUED = 8192
_REMEMBERED = 1 << 16


class AccessTimes:
    """Thread-safe. `touch(block_key, every_s)` updates a block unless that happened recently; `per_s` a second."""

    def __init__(
        self,
        touch: Callable[[bytes, float], bool],
        stats: Stats,
        *,
        every_s: float,
        per_s: float = 500.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._touch = touch
        self._stats = stats
        self.every_s = every_s
        self._per_s = per_s
        self._clock = clock
        self._updated_at: BoundedCache[bytes, float] = BoundedCache(_REMEMBERED)
        self._lock = threading.Lock()
        self._worker: BackgroundWorker[bytes] = BackgroundWorker("touches", self._update, max_queued=_MAX_QUEUED)

    def start(self) -> None:
        self._worker.start()

    def stop(self) -> None:
        """Stop; queued updates are dropped. A touch that hangs with the mount is left behind."""
        self._worker.stop(0.0)

    @property
    def queued(self) -> int:
        """Updates that wait."""
        return self._worker.queued

    def record(self, block_key: bytes) -> None:
        """Record a use of this block. Returns immediately."""
        now = self._clock()
        with self._lock:
            updated_at = self._updated_at.peek(block_key)
            if updated_at is not None and now - updated_at < self.every_s:
                return
            if self._worker.submit(block_key):
                self._updated_at.put(block_key, now)

    def on_lookup(self, _tenant: bytes, keys: Sequence[bytes], tiers: bytes, _asked_at: float) -> None:
        """Listener of LookupEvents: blocks held by nodes are in use. Reads of the shared tier are recorded on open."""
        for key, tier in zip(keys, tiers, strict=True):
            if tier in (Tier.LOCAL, Tier.PEER):
                self.record(key)

    def _update(self, block_key: bytes) -> None:
        try:
            if self._touch(block_key, self.every_s):
                self._stats.add("touches", "touched")
        except OSError as e:
            self._stats.add("touches", "failed")
            log.debug("touching %s: %s", block_key.hex()[:16], e)
        self._worker.sleep(1 / self._per_s)
