"""LRU, LFU and FIFO. O(1) per operation."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvpool_sidecar.eviction.policy import EvictionPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpool_sidecar.eviction.policy import Entry

__all__ = ["Fifo", "Lfu", "Lru"]


class Fifo(EvictionPolicy):
    """Evicts in order of arrival; uses have no effect."""

    persists_uses = False

    def __init__(self) -> None:
        super().__init__()
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def _in_order(self) -> Iterator[bytes]:
        return iter(self._order)

    def _admit(self, block_key: bytes, entry: Entry) -> None:
        self._order[block_key] = None

    def _use(self, block_key: bytes) -> None:
        pass

    def _forget(self, block_key: bytes) -> None:
        del self._order[block_key]

    def _evict(self) -> bytes:
        return self._order.popitem(last=False)[0]

    def _reset(self) -> None:
        self._order.clear()

    def _demote(self, block_key: bytes) -> None:
        self._order.move_to_end(block_key, last=False)


class Lru(Fifo):
    """Evicts the least recently used block."""

    persists_uses = True

    def _use(self, block_key: bytes) -> None:
        self._order.move_to_end(block_key)


class Lfu(EvictionPolicy):
    """Evicts the least frequently used block; ties by least recent use."""

    def __init__(self) -> None:
        super().__init__()
        self._count: dict[bytes, int] = {}
        self._order: dict[int, OrderedDict[bytes, None]] = {}
        self._least = 0

    def _uses_of(self, block_key: bytes) -> int:
        return self._count.get(block_key, 0)

    def _admit(self, block_key: bytes, entry: Entry) -> None:
        self._put(block_key, entry.uses)
        self._least = min(self._least, entry.uses)

    def _use(self, block_key: bytes) -> None:
        count = self._count[block_key]
        self._forget(block_key)
        self._put(block_key, count + 1)

    def _forget(self, block_key: bytes) -> None:
        count = self._count.pop(block_key)
        queue = self._order[count]
        del queue[block_key]
        if not queue:
            del self._order[count]

    def _evict(self) -> bytes:
        if self._least not in self._order:
            self._least = min(self._order)
        key = next(iter(self._order[self._least]))
        self._forget(key)
        return key

    def _reset(self) -> None:
        self._count.clear()
        self._order.clear()

    def _put(self, block_key: bytes, count: int) -> None:
        self._count[block_key] = count
        self._order.setdefault(count, OrderedDict())[block_key] = None

    def _demote(self, block_key: bytes) -> None:
        self._forget(block_key)
        self._put(block_key, 0)
        self._order[0].move_to_end(block_key, last=False)
        self._least = 0
