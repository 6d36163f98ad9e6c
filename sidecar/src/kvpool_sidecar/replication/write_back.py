"""Copies blocks to the shared tier in background threads, according to the write policy.

WriteThrough: immediately. WriteBack: when more than `max_dirty` bytes wait, the oldest first; before a block is
evicted; and when the sidecar stops. WriteThroughSelective: once a block was used `min_hits` times.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from kvpool.errors import CorruptBlockError, KVPoolError, RefusedError, TierFullError
from kvpool_sidecar.blocks import file as blockfile
from kvpool_sidecar.replication.dirty_set import DirtySet, HitCounter
from kvpool_sidecar.resilience.worker import PeriodicTask
from kvpool_sidecar.storage.shared.key_ring import NoKeyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.storage.base import Store
    from kvpool_sidecar.storage.shared.tier import SharedTier

__all__ = ["WriteBack", "copy_block"]

log = logging.getLogger(__name__)

_THREADS = 2
_RETRY_S = 0.5


class WriteBack:
    """Thread-safe. Only its own threads wait for the shared tier; blocks wait while it is unavailable."""

    def __init__(
        self,
        local: Store,
        shared: SharedTier,
        stats: Stats,
        *,
        policy: str = "WriteThrough",
        max_dirty: int = 0,
        min_hits: int = 1,
    ) -> None:
        self._local = local
        self._shared = shared
        self._stats = stats
        self._policy = policy
        self._dirty = DirtySet(max_dirty if policy == "WriteBack" else 0)
        self._hits = HitCounter(min_hits) if policy == "WriteThroughSelective" else None
        self._tasks = [PeriodicTask(f"write-back-{n}", self._copy_next, 0.0) for n in range(_THREADS)]
        self.problem = ""  # why the last copy failed; empty after a success

    def start(self) -> None:
        for task in self._tasks:
            task.start()

    def stop(self) -> None:
        """Stop. Waiting blocks are copied after the next start; a copy in progress is atomic."""
        for task in self._tasks:
            task.stop(0.0)

    def flush(self, timeout_s: float) -> None:
        """With WriteBack: copy waiting blocks for at most `timeout_s`; the scan after the next start finds the rest."""
        if self._policy != "WriteBack" or not self._shared.available or not len(self._dirty):
            return
        log.info(
            "copying %d blocks, %d bytes to the shared tier before shutdown", len(self._dirty), self._dirty.total_bytes
        )
        self._dirty.expedite_all()
        if not self._dirty.wait_clean(timeout_s):
            log.warning("%d blocks were not copied to the shared tier; the next start retries", len(self._dirty))

    def enqueue(self, key: bytes, size: int) -> None:
        """Queue a block of `size` bytes that was stored, or that a scan found not copied."""
        if self._hits is None and not self._dirty.add(key, size):
            self._stats.add("copies", "dropped")

    def record_hits(self, keys: Sequence[bytes]) -> None:
        """Count reads of these blocks from this node's drives."""
        if self._hits is not None:
            for key in self._hits.record(keys):
                self._dirty.add(key, self._local.payload_len(key))

    def dirty(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return those of `keys` that still have to be copied."""
        return self._dirty.intersection(keys)

    def expedite(self, keys: Sequence[bytes]) -> None:
        """Copy these now, because they are about to be evicted."""
        self._dirty.expedite(keys)

    def discard(self, keys: Sequence[bytes]) -> None:
        """Drop blocks that are no longer on this node."""
        if lost := self._dirty.discard(keys):
            self._stats.add("copies", "lost", lost)

    @property
    def waiting(self) -> int:
        """Number of blocks that still have to be copied."""
        return len(self._dirty)

    @property
    def dirty_bytes(self) -> int:
        """Payload bytes that still have to be copied."""
        return self._dirty.total_bytes

    def _copy_next(self) -> float:
        """Copy one waiting block; return the seconds until the next attempt."""
        if not self._shared.available:
            return _RETRY_S
        key = self._dirty.pop(_RETRY_S)
        if key is None:
            return 0.0
        if self._copy(key):
            self._dirty.done(key)
            return 0.0
        if self._dirty.retry(key):
            return _RETRY_S
        self._stats.add("copies", "given-up")
        return 0.0

    def _copy(self, key: bytes) -> bool:
        """Copy one block; False if it should be retried."""
        breaker = self._shared.bulkhead.breaker
        try:
            copied = copy_block(self._local, self._shared.store, key)
        except NoKeyError:
            self._stats.add("copies", "no-key")
            return True
        except RefusedError:  # purged while it was copied
            self._stats.add("copies", "purged")
            return True
        except TierFullError as e:
            self._stats.add("copies", "full")
            self.problem = str(e)
            return False
        except (KVPoolError, OSError) as e:
            if isinstance(e, CorruptBlockError) and not self._local.verify(key):
                self._stats.add("copies", "corrupt")
                log.warning("corrupt block quarantined instead of copied to the shared tier: %s", e)
                return True
            breaker.failure()
            self._stats.add("copies", "failed")
            self.problem = str(e)
            log.warning("copying block %s to the shared tier failed: %s", key.hex()[:16], e)
            return False
        if copied is None:
            self._stats.add("copies", "gone")
            return True
        breaker.success()
        self.problem = ""
        self._shared.mark_present(key)
        self._stats.add("copies", "copied" if copied else "there")
        self._local.mark_shared(key)
        return True


def copy_block(source: Store, target: Store, key: bytes) -> bool | None:
    """Return True for a new copy in `target`, False if it had one, None if `source` has none.

    The block is verified while it is copied: CorruptBlockError, and `target` is unchanged. Raises errors of either
    store.
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
            pending.abort()
            raise
    finally:
        os.close(found.fd)
    pending.commit()
    return True
