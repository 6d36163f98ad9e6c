"""Which blocks are pinned: those used often, as long as they are, up to a share of the room. Pure; the owner locks.

A system prompt that every session begins with must not go because a burst of long prompts came by. Nobody names such
prefixes by hand: uses are counted, and halved now and then, so that yesterday's prompts give their place back.
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

    def __contains__(self, key: bytes) -> bool:
        return key in self._pinned

    def uses(self, key: bytes) -> int:
        """How often a block was used of late."""
        return self._uses.get(key, 0)

    def record_use(self, key: bytes, size: int) -> bool:
        """One use of a block of `size` bytes. True if it is pinned from now on."""
        self._seen += 1
        count = self._uses[key] = self._uses.pop(key, 0) + 1
        if len(self._uses) > _COUNTED:
            self._uses.popitem(last=False)
        if count < self._min_uses or key in self._pinned or self.total_bytes + size > self._budget:
            return False
        self._pinned[key] = size
        self.total_bytes += size
        return True

    def expired(self) -> list[bytes]:
        """Blocks that are pinned no more; to be asked now and then."""
        if self._seen < self._halve_after:
            return []
        self._seen = 0
        self._uses = OrderedDict((key, count // 2) for key, count in self._uses.items() if count > 1)
        gone = [key for key in self._pinned if self._uses.get(key, 0) * 2 < self._min_uses]
        for key in gone:
            self.discard(key)
        return gone

    def resize(self, budget_bytes: int, min_uses: int) -> list[bytes]:
        """Another budget, another number of uses. Blocks that are pinned no more: those pinned last."""
        self._budget, self._min_uses = budget_bytes, min_uses
        gone = []
        while self.total_bytes > budget_bytes:
            gone.append(self.pop_last())
        return gone

    def discard(self, key: bytes) -> bool:
        """A block is pinned no more. False if it was not."""
        size = self._pinned.pop(key, None)
        if size is None:
            return False
        self.total_bytes -= size
        return True

    def pop_last(self) -> bytes:
        """The block that was pinned last, which is pinned no more: there is nothing else left to go."""
        key, size = self._pinned.popitem()
        self.total_bytes -= size
        return key
