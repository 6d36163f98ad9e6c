"""Bounds the bytes that are prefetched and not yet opened. Pure.

A tenant may use half of the limit, so that one long prompt leaves space for others; a larger block may be prefetched
alone. Blocks that are not opened within `keep_s` count as unused and free their space.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from typing import NamedTuple

from kvpool_sidecar.resilience.bounded_cache import BoundedCache

__all__ = ["PrefetchWindow", "ReadDecision"]

_REMEMBERED = 1 << 13
_SHARE = 2
_FRESH_S = 2.0


class ReadDecision(enum.Enum):
    READ = "read"
    WAIT = "wait"  # no space now
    SKIP = "skip"  # prefetched already, opened already, or larger than the limit


class _Held(NamedTuple):
    tenant: bytes
    size: int
    until: float


class PrefetchWindow:
    """Not thread-safe. `now` is monotonic seconds."""

    def __init__(self, limit_bytes: int, keep_s: float) -> None:
        self._limit = limit_bytes
        self._keep_s = keep_s
        self._reserved: OrderedDict[bytes, _Held] = OrderedDict()
        self._of_tenant: Counter[bytes] = Counter()
        self._consumed: BoundedCache[bytes, float] = BoundedCache(_REMEMBERED)
        self._in_memory: BoundedCache[bytes, float] = BoundedCache(_REMEMBERED)

    @property
    def held_bytes(self) -> int:
        return self._of_tenant.total()

    def reserve(
        self, tenant: bytes, key: bytes, size: int, asked_at: float, now: float, keep_s: float | None = None
    ) -> ReadDecision:
        """Decide whether to prefetch a block that was looked up at `asked_at`. READ reserves its bytes for `keep_s`."""
        if size > self._limit or not self.is_wanted(key, asked_at, now):
            return ReadDecision.SKIP
        mine = self._of_tenant[tenant]
        if self.held_bytes + size > self._limit or (mine and mine + size > self._limit // _SHARE):
            return ReadDecision.WAIT
        self._reserved[key] = _Held(tenant, size, now + (self._keep_s if keep_s is None else keep_s))
        self._of_tenant[tenant] += size
        return ReadDecision.READ

    def is_wanted(self, key: bytes, asked_at: float, now: float) -> bool:
        """Return whether a block that was looked up at `asked_at` still needs to be read."""
        return (
            key not in self._reserved
            and (self._in_memory.peek(key) or now) <= now
            and not self.is_consumed(key, asked_at)
        )

    def is_consumed(self, key: bytes, asked_at: float) -> bool:
        """Return whether the block was opened since: its reader reads it then."""
        consumed_at = self._consumed.peek(key)
        return consumed_at is not None and consumed_at >= asked_at

    def consume(self, key: bytes, now: float) -> bool:
        """Record that a block is loaded. True if it was prefetched."""
        self._consumed.put(key, now)
        return self._release(key)

    def mark_cached(self, key: bytes, now: float) -> None:
        """Record that the block is in the page cache; it is not checked again for 2 s."""
        self._in_memory.put(key, now + _FRESH_S)
        self._release(key)

    def expire(self, now: float) -> int:
        """Release the blocks that were not opened in time; their number."""
        late = [key for key, held in self._reserved.items() if held.until <= now]
        for key in late:
            self._release(key)
        return len(late)

    def _release(self, key: bytes) -> bool:
        held = self._reserved.pop(key, None)
        if held is None:
            return False
        self._of_tenant[held.tenant] -= held.size
        if not self._of_tenant[held.tenant]:
            del self._of_tenant[held.tenant]
        return True
