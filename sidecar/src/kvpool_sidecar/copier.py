"""Write-through: copies of stored blocks go to the shared tier in the background, in threads of their own."""

from __future__ import annotations

import logging
import os
import queue
import threading
from typing import TYPE_CHECKING

from kvpool.errors import CorruptBlockError, KVPoolError, TierFullError
from kvpool_sidecar import blockfile

if TYPE_CHECKING:
    from kvpool_sidecar.shared_tier import SharedTier
    from kvpool_sidecar.stats import Stats
    from kvpool_sidecar.store.base import Store

__all__ = ["Copier", "copy_block"]

log = logging.getLogger(__name__)

_THREADS = 2
_MAX_QUEUED = 4096
_RETRY_S = 0.5


class Copier:
    """A bounded queue: what does not fit is not copied. While the shared tier is absent the queue waits."""

    def __init__(self, local: Store, shared: SharedTier, stats: Stats) -> None:
        self._local = local
        self._shared = shared
        self._stats = stats
        self._queue: queue.Queue[bytes] = queue.Queue(_MAX_QUEUED)
        self._stop = threading.Event()
        self.problem = ""  # why the last copy failed; empty once one works

    def start(self) -> None:
        for n in range(_THREADS):
            threading.Thread(target=self._run, name=f"copier-{n}", daemon=True).start()

    def stop(self) -> None:
        """What is queued is not copied any more; a copy under way leaves nothing half-done."""
        self._stop.set()

    def offer(self, key: bytes) -> None:
        """Copy this block when there is time."""
        try:
            self._queue.put_nowait(key)
        except queue.Full:
            self._stats.add("copies", "dropped")

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                key = self._queue.get(timeout=_RETRY_S)
            except queue.Empty:
                continue
            while not self._shared.available and not self._stop.wait(_RETRY_S):
                pass
            if not self._stop.is_set():
                self._copy(key)

    def _copy(self, key: bytes) -> None:
        breaker = self._shared.guard.breaker
        try:
            copied = copy_block(self._local, self._shared.store, key)
        except TierFullError:
            self._stats.add("copies", "full")
            return
        except (KVPoolError, OSError) as e:
            if isinstance(e, CorruptBlockError) and not self._local.check(key):
                self._stats.add("copies", "corrupt")
                log.warning("not copied to the shared tier, and quarantined: %s", e)
                return
            breaker.failure()
            self._stats.add("copies", "failed")
            self.problem = str(e)
            log.warning("copying %s to the shared tier: %s", key.hex()[:16], e)
            return
        if copied is None:
            self._stats.add("copies", "gone")
            return
        breaker.success()
        self.problem = ""
        self._shared.remember(key)
        self._stats.add("copies", "copied" if copied else "there")


def copy_block(source: Store, target: Store, key: bytes) -> bool | None:
    """True if `target` has a new copy, False if it had one, None if `source` has none. Errors of either store.

    The block is verified while it is copied: CorruptBlockError, and nothing of it is in `target`.
    """
    found = source.open(key)
    if found is None:
        return None
    try:
        pending = target.begin(key, found.payload_len)
        if pending is None:
            return False
        try:
            blockfile.copy(found.fd, pending.writer, key, found.payload_len)
        except BaseException:
            target.abort(pending)
            raise
    finally:
        os.close(found.fd)
    target.commit(pending)
    return True
