"""S3-FIFO: a small queue through which everything must come, a large one for what proved itself, a list of the gone.

Yang, Zhang, Qiu, Yue, Vinayak, "FIFO queues are all you need for cache eviction" (SOSP 2023): a tenth of the bytes for
the small queue; what was used there moves on; what was not is remembered and, if it comes back, goes to the large one.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvpool_sidecar.eviction.policy import EvictionPolicy
from kvpool_sidecar.eviction.slot_queue import SlotQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["S3Fifo"]

_SMALL_SHARE = 10
_MOST = 3  # uses that count
_MAX_GONE = 1 << 17
_MAX_STEPS = 64  # used blocks that one eviction passes; after a restart all of them may be used


class S3Fifo(EvictionPolicy):
    """See the module. A use only counts, so it is the cheapest of all orders on the hot path."""

    def __init__(self) -> None:
        super().__init__()
        columns = self._table.column("ahead", "I"), self._table.column("behind", "I")
        self._small, self._main = SlotQueue(*columns), SlotQueue(*columns)
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._counts = self._table.column("count", "B")
        self._in_small = self._table.column("small", "B")
        self._small_bytes = 0

    def _in_order(self) -> Iterator[int]:
        yield from self._small
        yield from self._main

    def _uses_of(self, slot: int) -> int:
        return self._counts[slot]

    def _admit(self, block_key: bytes, slot: int) -> None:
        uses = self._table.saved_uses(slot)
        self._counts[slot] = min(uses, _MOST)
        if uses or block_key in self._gone:
            self._gone.pop(block_key, None)
            self._main.append(slot)
        else:
            self._small.append(slot)
            self._in_small[slot] = 1
            self._small_bytes += self._table.size[slot]

    def _use(self, block_key: bytes, slot: int) -> None:
        uses = self._counts[slot]
        if uses < _MOST:
            self._counts[slot] = uses + 1

    def _forget(self, block_key: bytes, slot: int) -> None:
        if self._in_small[slot]:
            self._leave_small(slot)
        else:
            self._main.remove(slot)
        self._counts[slot] = 0

    def _leave_small(self, slot: int) -> None:
        self._small.remove(slot)
        self._in_small[slot] = 0
        self._small_bytes -= self._table.size[slot]

    def _evict(self) -> int:
        total, counts = self.total_bytes, self._counts
        steps = 0
        while True:
            steps += 1
            is_spared = steps <= _MAX_STEPS
            if self._small and (self._small_bytes * _SMALL_SHARE >= total or not self._main):
                slot = self._small.first
                self._leave_small(slot)
                if counts[slot] and is_spared:
                    self._main.append(slot)
                    counts[slot] = 0
                    continue
                self._gone[self._table.key(slot)] = None
                while len(self._gone) > min(_MAX_GONE, len(self)):
                    self._gone.popitem(last=False)
            else:
                slot = self._main.pop_first()
                if counts[slot] and is_spared:
                    counts[slot] -= 1
                    self._main.append(slot)
                    continue
            counts[slot] = 0
            return slot

    def _reset(self) -> None:
        for slot in list(self._small):
            self._leave_small(slot)
        self._main.clear()
        self._small_bytes = 0

    def _demote(self, slot: int) -> None:
        self._counts[slot] = 0
        queue = self._small if self._in_small[slot] else self._main
        queue.remove(slot)
        queue.append_first(slot)
