"""A bounded mapping: least recently used entries are evicted, expired ones are not returned."""

from __future__ import annotations

import collections
import math
import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

__all__ = ["BoundedCache"]

K = TypeVar("K", bound="Hashable")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """At most `max_entries` entries in LRU order, each for at most `ttl_s` seconds after it was put.

    Not thread-safe: the owner's lock protects it. `put` and `get` make an entry the most recently used one.
    """

    def __init__(
        self, max_entries: int, ttl_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_entries = max_entries
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: collections.OrderedDict[K, tuple[V, float]] = collections.OrderedDict()

    def put(self, key: K, value: V) -> list[tuple[K, V]]:
        """Insert or replace; the entries that were evicted for it (to close what they hold)."""
        self._entries[key] = (value, math.inf if self._ttl_s is None else self._clock() + self._ttl_s)
        self._entries.move_to_end(key)
        evicted = []
        while len(self._entries) > self.max_entries:
            oldest, (old_value, _) = self._entries.popitem(last=False)
            evicted.append((oldest, old_value))
        return evicted

    def get(self, key: K) -> V | None:
        """The value, which becomes the most recently used one; None if it is absent or expired."""
        value = self.peek(key)
        if key in self._entries:
            self._entries.move_to_end(key)
        return value

    def peek(self, key: K) -> V | None:
        """The value without a change of the order; None if it is absent or expired."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if self._ttl_s is not None and entry[1] <= self._clock():
            del self._entries[key]
            return None
        return entry[0]

    def pop(self, key: K) -> V | None:
        """Remove and return; None if it is absent or expired."""
        value = self.peek(key)
        self._entries.pop(key, None)
        return value

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()

    def values(self) -> list[V]:
        """All values that have not expired, the least recently used first."""
        now = -math.inf if self._ttl_s is None else self._clock()
        return [value for value, until in self._entries.values() if until > now]

    def __contains__(self, key: K) -> bool:
        entry = self._entries.get(key)
        return entry is not None and (self._ttl_s is None or entry[1] > self._clock())

    def __iter__(self) -> Iterator[K]:
        """Keys, the least recently used first; expired ones are included until they are read or evicted."""
        return iter(list(self._entries))

    def __len__(self) -> int:
        """Entries, expired ones included."""
        return len(self._entries)
