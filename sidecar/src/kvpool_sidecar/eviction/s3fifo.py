"""S3-FIFO: a small queue through which everything must come, a large one for what proved itself, a list of the gone.

Yang, Zhang, Qiu, Yue, Vinayak, "FIFO queues are all you need for cache eviction" (SOSP 2023): a tenth of the bytes for
the small queue; what was used there moves on; what was not is remembered and, if it comes back, goes to the large one.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvpool_sidecar.eviction.policy import EvictionPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpool_sidecar.eviction.policy import Entry

__all__ = ["S3Fifo"]

_SMALL_SHARE = 10
_MOST = 3  # uses that count
_MAX_GONE = 1 << 17
_MAX_STEPS = 64  # used blocks that one eviction passes; after a restart all of them may be used


class S3Fifo(EvictionPolicy):
    """See the module. A use only counts, so it is the cheapest of all orders on the hot path."""

    def __init__(self) -> None:
        super().__init__()
        self._small: OrderedDict[bytes, int] = OrderedDict()
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._uses: dict[bytes, int] = {}
        self._small_bytes = 0

    def _in_order(self) -> Iterator[bytes]:
        yield from self._small
        yield from self._main

    def _uses_of(self, block_key: bytes) -> int:
        return self._uses.get(block_key, 0)

    def _admit(self, block_key: bytes, entry: Entry) -> None:
        self._uses[block_key] = min(entry.uses, _MOST)
        if entry.uses or block_key in self._gone:
            self._gone.pop(block_key, None)
            self._main[block_key] = entry.size
        else:
            self._small[block_key] = entry.size
            self._small_bytes += entry.size

    def _use(self, block_key: bytes) -> None:
        uses = self._uses[block_key]
        if uses < _MOST:
            self._uses[block_key] = uses + 1

    def _forget(self, block_key: bytes) -> None:
        del self._uses[block_key]
        if block_key in self._small:
            self._small_bytes -= self._small.pop(block_key)
        else:
            del self._main[block_key]

    def _evict(self) -> bytes:
        total = self.total_bytes
        steps = 0
        while True:
            steps += 1
            is_spared = steps <= _MAX_STEPS
            if self._small and (self._small_bytes * _SMALL_SHARE >= total or not self._main):
                key, size = self._small.popitem(last=False)
                self._small_bytes -= size
                if self._uses[key] and is_spared:
                    self._main[key] = size
                    self._uses[key] = 0
                    continue
                self._gone[key] = None
                while len(self._gone) > min(_MAX_GONE, len(self._main) + len(self._small) + 1):
                    self._gone.popitem(last=False)
            else:
                key, size = self._main.popitem(last=False)
                if self._uses[key] and is_spared:
                    self._uses[key] -= 1
                    self._main[key] = size
                    continue
            del self._uses[key]
            return key

    def _reset(self) -> None:
        self._small.clear()
        self._main.clear()
        self._uses.clear()
        self._small_bytes = 0

    def _demote(self, block_key: bytes) -> None:
        self._uses[block_key] = 0
        (self._small if block_key in self._small else self._main).move_to_end(block_key, last=False)
