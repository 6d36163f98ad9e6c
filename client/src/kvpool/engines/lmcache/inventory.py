"""Chunks that an LMCache server has stored or deleted, bounded in memory.

The pool keeps no list per server and evicts on its own, so usage and deletion are derived from this inventory. A
deleted chunk is not looked up until it is stored again. Independent of LMCache: names are any hashable values.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

__all__ = ["StoredInventory"]

K = TypeVar("K", bound="Hashable")


class StoredInventory(Generic[K]):
    """Sizes in bytes of at most `limit` stored names, and at most `limit` deleted ones, oldest out. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._stored: OrderedDict[K, int] = OrderedDict()
        self._deleted: OrderedDict[K, None] = OrderedDict()

    def store(self, sizes: Iterable[tuple[K, int]]) -> tuple[list[tuple[K, int]], list[tuple[K, int]]]:
        """Record stored names. Return the new ones, and the older ones that were dropped for them."""
        new, gone = [], []
        with self._lock:
            for name, size in sizes:
                self._deleted.pop(name, None)
                if name in self._stored:
                    self._stored.move_to_end(name)
                    continue
                self._stored[name] = size
                new.append((name, size))
            while len(self._stored) > self._limit:
                gone.append(self._stored.popitem(last=False))
        kept = {name for name, _ in gone}
        return [pair for pair in new if pair[0] not in kept], [pair for pair in gone if pair not in new]

    def lost(self, names: Iterable[K]) -> list[tuple[K, int]]:
        """Remove names that the pool no longer has. Return the known ones with their sizes."""
        with self._lock:
            return [(name, self._stored.pop(name)) for name in names if name in self._stored]

    def delete(self, names: Iterable[K]) -> list[tuple[K, int]]:
        """Mark names as deleted until they are stored again. Return the known ones with their sizes."""
        found = []
        with self._lock:
            for name in names:
                if name in self._stored:
                    found.append((name, self._stored.pop(name)))
                self._deleted[name] = None
                self._deleted.move_to_end(name)
            while len(self._deleted) > self._limit:
                self._deleted.popitem(last=False)
        return found

    def is_deleted(self, name: K) -> bool:
        """Return whether it was deleted and not stored since."""
        return name in self._deleted

    def leading_kept(self, names: Sequence[K]) -> Sequence[K]:
        """Return the names before the first deleted one."""
        return names[: next((n for n, name in enumerate(names) if name in self._deleted), len(names))]

    def page(self, start: int, size: int) -> tuple[list[tuple[K, int]], bool]:
        """Return `size` names with their sizes from index `start`, oldest first, and whether there are more."""
        with self._lock:
            pairs = list(self._stored.items())
        return pairs[start : start + size], start + size < len(pairs)

    def __len__(self) -> int:
        return len(self._stored)
