"""Access times of shared blocks, persisted as modification times at a bounded rate.

File system access times are unusable (most mounts do not keep them, and reads from the page cache do not count), and a
sidecar's memory is neither persistent nor shared. So a use updates the modification time unless any sidecar did so
within the last minutes, off the read path. A lookup hit on a node counts as a use: a copy matters most where all nodes
hold the block and may evict it.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from typing import TYPE_CHECKING

from kvpool.protocol.wire import Tier
from kvpool_sidecar.resilience.bounded_cache import BoundedCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_sidecar.counters import Stats

__all__ = ["AccessTimes"]

log = logging.getLogger(__name__)

_MAX_QUEUED = 8192
_REMEMBERED = 1 << 16


class AccessTimes:
    """A bounded queue and a thread. `touch(key, every_s)` updates a block unless that happened recently."""

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
        self._queue: collections.deque[bytes] = collections.deque()
        self._ready = threading.Condition()
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="touches", daemon=True).start()

    def stop(self) -> None:
        """Stop; queued updates are dropped."""
        self._stop.set()
        with self._ready:
            self._ready.notify_all()

    def record(self, block_key: bytes) -> None:
        """Record a use of this block. Returns immediately."""
        now = self._clock()
        with self._ready:
            updated_at = self._updated_at.peek(block_key)
            if updated_at is not None and now - updated_at < self.every_s:
                return
            if len(self._queue) >= _MAX_QUEUED:
                return
            self._updated_at.put(block_key, now)
            self._queue.append(block_key)
            self._ready.notify()

    def on_lookup(self, _tenant: bytes, keys: Sequence[bytes], tiers: bytes, _asked_at: float) -> None:
        """Listener of LookupEvents: blocks held by nodes are in use. Reads of the shared tier are recorded on open."""
        for key, tier in zip(keys, tiers, strict=True):
            if tier in (Tier.LOCAL, Tier.PEER):
                self.record(key)

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._queue and not self._stop.is_set():
                    self._ready.wait()
                if self._stop.is_set():
                    return
                key = self._queue.popleft()
            try:
                if self._touch(key, self.every_s):
                    self._stats.add("touches", "touched")
            except OSError as e:
                self._stats.add("touches", "failed")
                log.debug("touching %s: %s", key.hex()[:16], e)
            self._stop.wait(1 / self._per_s)
