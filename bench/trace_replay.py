"""Replays prompts against the sidecar's own tables, as the drives of one node hold them, and against the optimum."""

from __future__ import annotations

import heapq
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from bench.trace_file import BLOCK, Request
from kvpool_sidecar.eviction import Entry, create_policy
from kvpool_sidecar.storage.local import placement

if TYPE_CHECKING:
    from kvpool_sidecar.eviction import EvictionPolicy

__all__ = ["ONE_DRIVE", "Arrangement", "NodeTables", "Replayed", "optimum", "replay"]


class Arrangement(NamedTuple):
    """How a node holds its blocks. `high`, `low`: watermarks in percent of the capacity.

    `uses_late_s`: a use of a block that is there reaches its table that much later. `is_taught`: lookups tell the
    order of a prompt's blocks; after a restart the tables do not know it.
    """

    drives: int = 1
    high: int = 100
    low: int = 100
    uses_late_s: float = 0.0
    is_taught: bool = True


ONE_DRIVE = Arrangement()


class Replayed(NamedTuple):
    """Token hit rate in percent, and nanoseconds per access in the tables (lookups, uses, stores, evictions)."""

    percent: float
    ns_per_access: float


class NodeTables:
    """The tables of a node's drives of equal size; a block is on the drive that `placement` chooses."""

    def __init__(self, policy: str, capacity: int, arrangement: Arrangement) -> None:
        share = max(1, capacity // arrangement.drives)
        self._tables = [create_policy(policy, share * BLOCK) for _ in range(arrangement.drives)]
        self._most, self._rest = share * arrangement.high // 100, share * arrangement.low // 100
        self._names = [f"drive-{n}" for n in range(arrangement.drives)]
        self._weights = [1] * arrangement.drives
        self._homes: dict[bytes, EvictionPolicy] = {}

    def home(self, key: bytes) -> EvictionPolicy:
        """Return the table of the drive on which the block belongs."""
        if len(self._tables) == 1:
            return self._tables[0]
        if (table := self._homes.get(key)) is None:
            table = self._homes[key] = self._tables[placement.choose(key, self._names, self._weights)]
        return table

    def prepare(self, keys: list[bytes]) -> None:
        """Choose the drives of these blocks, outside of what is timed: a node does it in another place."""
        for key in keys:
            self.home(key)

    def observe(self, keys: list[bytes]) -> None:
        """Tell the order of a prompt's blocks."""
        if len(self._tables) == 1:
            self._tables[0].observe_sequence(keys)
            return
        parts: dict[int, list[bytes]] = {}
        for key in keys:
            parts.setdefault(id(self.home(key)), []).append(key)
        for table in self._tables:
            if part := parts.get(id(table)):
                table.observe_sequence(part)

    def evict(self) -> None:
        """Evict down to the low watermark where a drive is above the high one."""
        for table in self._tables:
            if len(table) > self._most:
                over = len(table) - self._rest
                table.pop_victims(0, over, at_least=over)


def replay(requests: list[Request], policy: str, capacity: int, arrangement: Arrangement = ONE_DRIVE) -> Replayed:
    """Each request looks its blocks up in order, hits those before the first miss, and leaves all of them stored."""
    node = NodeTables(policy, capacity, arrangement)
    entry = Entry(BLOCK, BLOCK, 0.0)
    late: deque[tuple[float, bytes]] = deque()
    hits = accesses = spent = 0
    for tokens, keys, at in requests:
        node.prepare(keys)
        began = time.perf_counter_ns()
        while late and late[0][0] <= at:
            key = late.popleft()[1]
            node.home(key).touch(key, 0.0)
        found = 0
        for key in keys:
            if key not in node.home(key):
                break
            found += 1
        if arrangement.is_taught:
            node.observe(keys)
        for key in keys:
            table = node.home(key)
            if not arrangement.uses_late_s:
                if not table.touch(key, 0.0) and key not in table:
                    table.add(key, entry)
            elif key in table:
                late.append((at + arrangement.uses_late_s, key))
            else:
                table.add(key, entry)
        node.evict()
        spent += time.perf_counter_ns() - began
        hits += min(found * BLOCK, tokens)
        accesses += len(keys)
    return Replayed(100 * hits / sum(r.tokens for r in requests), spent / max(1, accesses))


def optimum(requests: list[Request], capacity: int) -> float:
    """Token hit rate of whoever knows the future."""
    never = len(requests)
    upcoming: dict[bytes, int] = {}
    following: list[list[int]] = []
    for n in reversed(range(len(requests))):
        keys = requests[n].keys
        following.append([upcoming.get(key, never) for key in keys])
        upcoming.update(dict.fromkeys(keys, n))
    following.reverse()
    kept: dict[bytes, int] = {}
    heap: list[tuple[int, int, bytes]] = []
    hits = 0
    for (tokens, keys, _), then in zip(requests, following, strict=True):
        found = next((n for n, key in enumerate(keys) if key not in kept), len(keys))
        hits += min(found * BLOCK, tokens)
        for depth, (key, use) in enumerate(zip(keys, then, strict=True)):
            kept[key] = use
            heapq.heappush(heap, (-use, -depth, key))
        while len(kept) > capacity:
            use, _, key = heapq.heappop(heap)
            if kept.get(key) == -use:
                del kept[key]
    return 100 * hits / sum(r.tokens for r in requests)
