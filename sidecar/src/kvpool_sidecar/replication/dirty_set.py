"""Dirty set: blocks of this node that the shared tier does not have yet, and the order of their copies.

The set is not persistent: a file records whether it was copied (`Store.note_shared`), and the scan after a
start finds the others.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from kvpool_sidecar.resilience.bounded_cache import BoundedCache

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["DirtySet", "HitCounter"]

_MAX_BLOCKS = 1 << 17  # about 30 MB; further blocks wait for the next start
_MAX_COUNTED = 1 << 16
_MAX_TRIES = 5


class DirtySet:
    """Thread-safe. Up to `limit` bytes may wait; above it the oldest block is due. 0: each is due immediately."""

    def __init__(self, limit: int = 0, *, max_blocks: int = _MAX_BLOCKS) -> None:
        self.limit = limit
        self._max_blocks = max_blocks
        self._condition = threading.Condition()
        self._waiting: OrderedDict[bytes, int] = OrderedDict()  # key: bytes of its payload
        self._urgent: OrderedDict[bytes, None] = OrderedDict()
        self._in_flight: dict[bytes, int] = {}
        self._tries: dict[bytes, int] = {}
        self._total = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._in_flight)

    @property
    def total_bytes(self) -> int:
        """Payload bytes that the shared tier does not have yet."""
        return self._total

    def add(self, key: bytes, size: int) -> bool:
        """Add a block that is on this node only; False if the set is full."""
        with self._condition:
            if key in self._waiting or key in self._in_flight:
                return True
            if len(self) >= self._max_blocks:
                return False
            self._waiting[key] = size
            self._total += size
            self._condition.notify()
            return True

    def intersection(self, keys: Iterable[bytes]) -> set[bytes]:
        """Return those of `keys` that the shared tier does not have yet."""
        if not self._total:
            return set()
        with self._condition:
            return {key for key in keys if key in self._waiting or key in self._in_flight}

    def expedite(self, keys: Iterable[bytes]) -> None:
        """Make these due now, because they are about to be evicted."""
        with self._condition:
            self._urgent.update((key, None) for key in keys if key in self._waiting)
            self._condition.notify_all()

    def expedite_all(self) -> None:
        """Make all blocks due from now on."""
        with self._condition:
            self.limit = 0
            self._condition.notify_all()

    def pop(self, timeout_s: float) -> bytes | None:
        """Take the next due block, which is in flight then; None if none is due within `timeout_s`."""
        with self._condition:
            if not self._is_due():
                self._condition.wait(timeout_s)
            if not self._is_due():
                return None
            if self._urgent:
                key, _ = self._urgent.popitem(last=False)
                size = self._waiting.pop(key)
            else:
                key, size = self._waiting.popitem(last=False)
            self._in_flight[key] = size
            return key

    def done(self, key: bytes) -> None:
        """Remove a block that was copied or no longer exists."""
        with self._condition:
            self._total -= self._in_flight.pop(key, 0)
            self._tries.pop(key, None)
            self._condition.notify_all()

    def retry(self, key: bytes) -> bool:
        """Queue a failed copy again, as the newest. False after five failures: it is dropped."""
        with self._condition:
            size = self._in_flight.pop(key, None)
            if size is None:  # evicted meanwhile
                return True
            tries = self._tries.get(key, 0) + 1
            if tries >= _MAX_TRIES:
                self._tries.pop(key, None)
                self._total -= size
                return False
            self._tries[key] = tries
            self._waiting[key] = size
            return True

    def discard(self, keys: Iterable[bytes]) -> int:
        """Remove blocks that are no longer on this node; the number of dirty ones."""
        if not self._total:
            return 0
        lost = 0
        with self._condition:
            for key in keys:
                size = self._waiting.pop(key, None)
                if size is None:
                    size = self._in_flight.pop(key, None)
                if size is not None:
                    self._urgent.pop(key, None)
                    self._tries.pop(key, None)
                    self._total -= size
                    lost += 1
        return lost

    def wait_clean(self, timeout_s: float) -> bool:
        """Wait until no block is dirty; False after `timeout_s`."""
        with self._condition:
            return self._condition.wait_for(lambda: not len(self), timeout_s)

    def _is_due(self) -> bool:
        waiting = self._total - sum(self._in_flight.values())  # the few blocks in flight count as copied
        return bool(self._urgent) or (bool(self._waiting) and waiting > self.limit)


class HitCounter:
    """Counts hits of the most recently used blocks. Thread-safe."""

    def __init__(self, threshold: int, *, max_counted: int = _MAX_COUNTED) -> None:
        self._threshold = threshold
        self._lock = threading.Lock()
        self._counts: BoundedCache[bytes, int] = BoundedCache(max_counted)

    def record(self, keys: Sequence[bytes]) -> list[bytes]:
        """Count a hit of each; the blocks that reached the threshold with it."""
        reached = []
        with self._lock:
            for key in keys:
                count = (self._counts.peek(key) or 0) + 1
                self._counts.put(key, count)
                if count == self._threshold:
                    reached.append(key)
        return reached
