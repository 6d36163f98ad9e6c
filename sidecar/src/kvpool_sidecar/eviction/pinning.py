"""Pins frequently used blocks up to a share of the capacity. Pure; the owner locks.

A system prompt that starts every session must survive a burst of long prompts. No operator names such prefixes: uses
are counted and halved periodically, so that prompts out of use lose their pins.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["PinSet"]

_COUNTED = 1 << 16  # keys; about 10 MB
_HALVE_AFTER = 1 << 16  # uses


class PinSet:
    """`budget_bytes` of blocks that were used `min_uses` times or more."""

    def __init__(self, budget_bytes: int, min_uses: int, *, halve_after: int = _HALVE_AFTER) -> None:
        self._budget = budget_bytes
        self._min_uses = min_uses
        self._halve_after = halve_after
        self._uses: OrderedDict[bytes, int] = OrderedDict()
        self._seen = 0
        self._pinned: dict[bytes, int] = {}  # key: bytes; in the order in which they were pinned
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._pinned)

    def __contains__(self, block_key: bytes) -> bool:
        return block_key in self._pinned

    def uses(self, block_key: bytes) -> int:
        """Return the recent number of uses."""
        return self._uses.get(block_key, 0)

    def record_use(self, block_key: bytes, size: int) -> bool:
        """Count a use of a block of `size` bytes. True if it becomes pinned."""
        self._seen += 1
        count = self._uses[block_key] = self._uses.pop(block_key, 0) + 1
        if len(self._uses) > _COUNTED:
            self._uses.popitem(last=False)
        if count < self._min_uses or block_key in self._pinned or self.total_bytes + size > self._budget:
            return False
        self._pinned[block_key] = size
        self.total_bytes += size
        return True

    def expired(self) -> list[bytes]:
        """Return the blocks that lose their pins. Call periodically."""
        if self._seen < self._halve_after:
            return []
        self._seen = 0
        self._uses = OrderedDict((key, count // 2) for key, count in self._uses.items() if count > 1)
        gone = [key for key in self._pinned if self._uses.get(key, 0) * 2 < self._min_uses]
        for key in gone:
            self.discard(key)
        return gone

    def resize(self, budget_bytes: int, min_uses: int) -> list[bytes]:
        """Set budget and number of uses. Returns the blocks that lose their pins: the last pinned."""
        self._budget, self._min_uses = budget_bytes, min_uses
        gone = []
        while self.total_bytes > budget_bytes:
            gone.append(self.pop_last())
        return gone

    def discard(self, block_key: bytes) -> bool:
        """Unpin a block. False if it was not pinned."""
        size = self._pinned.pop(block_key, None)
        if size is None:
            return False
        self.total_bytes -= size
        return True

    def pop_last(self) -> bytes:
        """Unpin and return the last pinned block: only pinned blocks are left to evict."""
        key, size = self._pinned.popitem()
        self.total_bytes -= size
        return key
