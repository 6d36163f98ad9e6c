"""What an LMCache server has stored and what it was told to forget, as far as memory of a fixed size goes.

The pool keeps no list per server and evicts by itself, so this is what usage and deletion are reckoned from. A chunk
that was deleted is not looked up any more until it is stored again.
Nothing here knows LMCache: names are anything hashable.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

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
        """Note what is stored now; which of it is new, and which older names had to go."""
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
        """The pool has them no more; which of them were known, with their sizes."""
        with self._lock:
            return [(name, self._stored.pop(name)) for name in names if name in self._stored]

    def delete(self, names: Iterable[K]) -> list[tuple[K, int]]:
        """Forget them until they are stored again; which of them were known, with their sizes."""
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
        """True if it was deleted and not stored since."""
        return name in self._deleted

    def page(self, start: int, size: int) -> tuple[list[tuple[K, int]], bool]:
        """`size` names with their sizes from place `start` on, oldest first, and whether there are more."""
        with self._lock:
            pairs = list(self._stored.items())
        return pairs[start : start + size], start + size < len(pairs)

    def __len__(self) -> int:
        return len(self._stored)
