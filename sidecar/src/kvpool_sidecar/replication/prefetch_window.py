"""How much may be read ahead: bytes that a lookup promised, that were read, and that nobody has opened yet. Pure.

A tenant may have half of the limit, so that one long prompt leaves room for others; a block larger than that may go
alone. What nobody opens within `keep_s` counts as read in vain and makes room again.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from typing import NamedTuple

__all__ = ["Verdict", "Window"]

_REMEMBERED = 1 << 13
_SHARE = 2
_FRESH_S = 2.0


class Verdict(enum.Enum):
    READ = "read"
    WAIT = "wait"  # no room now
    SKIP = "skip"  # read ahead already, opened already, or never fits


class _Held(NamedTuple):
    tenant: bytes
    size: int
    until: float


class Window:
    """Not thread-safe. `now` is monotonic seconds."""

    def __init__(self, limit_bytes: int, keep_s: float) -> None:
        self._limit = limit_bytes
        self._keep_s = keep_s
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        self._of_tenant: Counter[bytes] = Counter()
        self._opened: OrderedDict[bytes, float] = OrderedDict()
        self._in_memory: OrderedDict[bytes, float] = OrderedDict()

    @property
    def held_bytes(self) -> int:
        return self._of_tenant.total()

    def take(self, tenant: bytes, key: bytes, size: int, asked_at: float, now: float) -> Verdict:
        """May this block, promised at `asked_at`, be read ahead? READ counts it."""
        if size > self._limit or not self.wanted(key, asked_at, now):
            return Verdict.SKIP
        mine = self._of_tenant[tenant]
        if self.held_bytes + size > self._limit or (mine and mine + size > self._limit // _SHARE):
            return Verdict.WAIT
        self._held[key] = _Held(tenant, size, now + self._keep_s)
        self._of_tenant[tenant] += size
        return Verdict.READ

    def wanted(self, key: bytes, asked_at: float, now: float) -> bool:
        """Is there anything to read of a block that was promised at `asked_at`?"""
        return key not in self._held and self._in_memory.get(key, now) <= now and not self.overtaken(key, asked_at)

    def overtaken(self, key: bytes, asked_at: float) -> bool:
        """Has the block been opened since? Then its reader reads by itself."""
        return self._opened.get(key, float("-inf")) >= asked_at

    def opened(self, key: bytes, now: float) -> bool:
        """Somebody loads this block. True if it was read ahead."""
        _remember(self._opened, key, now)
        return self._release(key)

    def in_memory(self, key: bytes, now: float) -> None:
        """There was nothing to read; for a moment nobody need look again."""
        _remember(self._in_memory, key, now + _FRESH_S)
        self._release(key)

    def expire(self, now: float) -> int:
        """Make room of what nobody opened; how many blocks that were."""
        late = [key for key, held in self._held.items() if held.until <= now]
        for key in late:
            self._release(key)
        return len(late)

    def _release(self, key: bytes) -> bool:
        held = self._held.pop(key, None)
        if held is None:
            return False
        self._of_tenant[held.tenant] -= held.size
        if not self._of_tenant[held.tenant]:
            del self._of_tenant[held.tenant]
        return True


def _remember(times: OrderedDict[bytes, float], key: bytes, value: float) -> None:
    times[key] = value
    times.move_to_end(key)
    if len(times) > _REMEMBERED:
        times.popitem(last=False)
