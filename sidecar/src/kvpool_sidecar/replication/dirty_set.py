"""Blocks of this node that the shared tier does not have yet, and which of them is to be copied next.

Nothing here needs to survive: a file says of itself whether it was copied (`Store.note_shared`), and the scan after a
start finds those that were not.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["DirtySet", "HitCounter"]

_MAX_BLOCKS = 1 << 17  # about 30 MB; beyond it the newest wait for the next start
_MAX_COUNTED = 1 << 16
_MAX_TRIES = 5


class DirtySet:
    """Thread-safe. `limit` bytes may wait; above it the oldest is due. 0: each is due at once."""

    def __init__(self, limit: int = 0, *, max_blocks: int = _MAX_BLOCKS) -> None:
        self.limit = limit
        self._max_blocks = max_blocks
        self._condition = threading.Condition()
        self._waiting: OrderedDict[bytes, int] = OrderedDict()  # key: bytes of its payload
        self._urgent: OrderedDict[bytes, None] = OrderedDict()
        self._under_way: dict[bytes, int] = {}
        self._tries: dict[bytes, int] = {}
        self._total = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._under_way)

    @property
    def total_bytes(self) -> int:
        """Of payload that the shared tier does not have yet."""
        return self._total

    def add(self, key: bytes, size: int) -> bool:
        """A block that is on this node only. False if there is no room to remember it."""
        with self._condition:
            if key in self._waiting or key in self._under_way:
                return True
            if len(self) >= self._max_blocks:
                return False
            self._waiting[key] = size
            self._total += size
            self._condition.notify()
            return True

    def intersection(self, keys: Iterable[bytes]) -> set[bytes]:
        """Which of `keys` the shared tier does not have yet."""
        if not self._total:
            return set()
        with self._condition:
            return {key for key in keys if key in self._waiting or key in self._under_way}

    def expedite(self, keys: Iterable[bytes]) -> None:
        """These are wanted out of the way: they are due now."""
        with self._condition:
            self._urgent.update((key, None) for key in keys if key in self._waiting)
            self._condition.notify_all()

    def expedite_all(self) -> None:
        """Everything is due from now on."""
        with self._condition:
            self.limit = 0
            self._condition.notify_all()

    def pop(self, timeout_s: float) -> bytes | None:
        """The next that is due, which is under way then; None if none is within `timeout_s`."""
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
            self._under_way[key] = size
            return key

    def done(self, key: bytes) -> None:
        """It is on the shared tier, or there is nothing to copy any more."""
        with self._condition:
            self._total -= self._under_way.pop(key, 0)
            self._tries.pop(key, None)
            self._condition.notify_all()

    def retry(self, key: bytes) -> bool:
        """The copy failed: later again, as the newest. False if it failed too often and is given up."""
        with self._condition:
            size = self._under_way.pop(key, None)
            if size is None:  # it was evicted meanwhile
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
        """These are no longer on this node; how many of them were dirty."""
        if not self._total:
            return 0
        lost = 0
        with self._condition:
            for key in keys:
                size = self._waiting.pop(key, None)
                if size is None:
                    size = self._under_way.pop(key, None)
                if size is not None:
                    self._urgent.pop(key, None)
                    self._tries.pop(key, None)
                    self._total -= size
                    lost += 1
        return lost

    def wait_clean(self, timeout_s: float) -> bool:
        """Until nothing is dirty; False after `timeout_s`."""
        with self._condition:
            return self._condition.wait_for(lambda: not len(self), timeout_s)

    def _is_due(self) -> bool:
        waiting = self._total - sum(self._under_way.values())  # what is under way, a few blocks, is as good as copied
        return bool(self._urgent) or (bool(self._waiting) and waiting > self.limit)


class HitCounter:
    """How often blocks were used, of those used last. Thread-safe."""

    def __init__(self, enough: int, *, max_counted: int = _MAX_COUNTED) -> None:
        self._enough = enough
        self._max_counted = max_counted
        self._lock = threading.Lock()
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def record(self, keys: Sequence[bytes]) -> list[bytes]:
        """One use of each; those for which it was the one that makes it enough."""
        reached = []
        with self._lock:
            for key in keys:
                count = self._counts[key] = self._counts.pop(key, 0) + 1
                if count == self._enough:
                    reached.append(key)
            while len(self._counts) > self._max_counted:
                self._counts.popitem(last=False)
        return reached
