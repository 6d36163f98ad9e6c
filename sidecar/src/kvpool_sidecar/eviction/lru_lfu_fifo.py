"""LRU, LFU and FIFO. O(1) per operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_sidecar.eviction.policy import EvictionPolicy
from kvpool_sidecar.eviction.slot_queue import SlotQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Fifo", "Lfu", "Lru"]


class Fifo(EvictionPolicy):
    """Evicts in order of arrival; uses have no effect."""

    persists_uses = False

    def __init__(self) -> None:
        super().__init__()
        self._order = SlotQueue(self._table.column("ahead", "I"), self._table.column("behind", "I"))

    def _in_order(self) -> Iterator[int]:
        return iter(self._order)

    def _admit(self, block_key: bytes, slot: int) -> None:
        self._order.append(slot)

    def _use(self, block_key: bytes, slot: int) -> None:
        pass

    def _forget(self, block_key: bytes, slot: int) -> None:
        self._order.remove(slot)

    def _evict(self) -> int:
        return self._order.pop_first()

    def _reset(self) -> None:
        self._order.clear()

    def _demote(self, slot: int) -> None:
        self._order.remove(slot)
        self._order.append_first(slot)


class Lru(Fifo):
    """Evicts the least recently used block."""

    persists_uses = True

    def _use(self, block_key: bytes, slot: int) -> None:
        self._order.remove(slot)
        self._order.append(slot)


class Lfu(EvictionPolicy):
    """Evicts the least frequently used block; ties by least recent use."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead = self._table.column("ahead", "I")
        self._behind = self._table.column("behind", "I")
        self._count = self._table.column("count", "I")
        self._order: dict[int, SlotQueue] = {}
        self._least = 0

    def _uses_of(self, slot: int) -> int:
        return self._count[slot]

    def _admit(self, block_key: bytes, slot: int) -> None:
        uses = self._table.saved_uses(slot)
        self._put(slot, uses)
        self._least = min(self._least, uses)

    def _use(self, block_key: bytes, slot: int) -> None:
        count = self._count[slot]
        self._forget(block_key, slot)
        self._put(slot, count + 1)

    def _forget(self, block_key: bytes, slot: int) -> None:
        count = self._count[slot]
        queue = self._order[count]
        queue.remove(slot)
        if not queue:
            del self._order[count]

    def _evict(self) -> int:
        if self._least not in self._order:
            self._least = min(self._order)
        slot = self._order[self._least].first
        self._forget(b"", slot)
        return slot

    def _reset(self) -> None:
        for queue in self._order.values():
            queue.clear()
        self._order.clear()

    def _put(self, slot: int, count: int) -> None:
        self._count[slot] = count
        self._queue(count).append(slot)

    def _queue(self, count: int) -> SlotQueue:
        queue = self._order.get(count)
        if queue is None:
            queue = self._order[count] = SlotQueue(self._ahead, self._behind)
        return queue

    def _demote(self, slot: int) -> None:
        self._forget(b"", slot)
        self._count[slot] = 0
        self._queue(0).append_first(slot)
        self._least = 0
