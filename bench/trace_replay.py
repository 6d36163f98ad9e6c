"""Replays prompts against the sidecar's own tables, as the drives of one node hold them, and against the optimum."""

from __future__ import annotations

import heapq
import time
from collections import deque
from typing import NamedTuple

from bench.trace_file import BLOCK, Request
from kvpool_sidecar.eviction import Entry, EvictionPolicy, PrefixAware, create_policy
from kvpool_sidecar.storage.local import placement

__all__ = ["ONE_DRIVE", "Arrangement", "NodeTables", "Replayed", "optimum", "replay"]


class Arrangement(NamedTuple):
    """How a node holds its blocks. `high`, `low`: watermarks in percent of the capacity.

    `uses_late_s`: a use of a block that is there reaches its table that much later. `is_taught`: lookups show the
    order of a prompt's blocks; after a restart the table does not know it. `remembered`: blocks whose uses PrefixAware
    remembers, as a share of the capacity; 0: as the product does.
    """

    drives: int = 1
    high: int = 100
    low: int = 100
    uses_late_s: float = 0.0
    is_taught: bool = True
    remembered: float = 0.0


ONE_DRIVE = Arrangement()


class Replayed(NamedTuple):
    """Token hit rate in percent, and nanoseconds per access in the tables (lookups, uses, stores, evictions)."""

    percent: float
    ns_per_access: float


class NodeTables:
    """The table of a node with drives of equal size; `placement` and the room of the drives say where a block is."""

    def __init__(self, policy: str, capacity: int, arrangement: Arrangement) -> None:
        self._share = max(1, capacity // arrangement.drives)
        if arrangement.remembered and policy == "PrefixAware":
            remembered = max(1, int(capacity * arrangement.remembered))
            self.table: EvictionPolicy = PrefixAware(capacity * BLOCK, remembered=remembered)
        else:
            self.table = create_policy(policy, capacity * BLOCK)
        self._most, self._rest = capacity * arrangement.high // 100, capacity * arrangement.low // 100
        self._names = [f"drive-{n}" for n in range(arrangement.drives)]
        self._weights = [1] * arrangement.drives
        self._entries = [Entry(BLOCK, BLOCK, 0.0, drive=n) for n in range(arrangement.drives)]

    def add(self, key: bytes) -> None:
        """Store a block on its drive; on the emptiest one while that is full."""
        drive = placement.choose(key, self._names, self._weights)
        if self.table.on_drive(drive).blocks >= self._share:
            drive = min(range(len(self._names)), key=lambda n: self.table.on_drive(n).blocks)
        self.table.add(key, self._entries[drive])

    def evict(self) -> None:
        """Evict down to the low watermark if the node is above the high one."""
        if len(self.table) > self._most:
            over = len(self.table) - self._rest
            self.table.pop_victims(0, over, at_least=over)


def replay(requests: list[Request], policy: str, capacity: int, arrangement: Arrangement = ONE_DRIVE) -> Replayed:
    """Each request looks its blocks up in order, hits those before the first miss, and leaves all of them stored."""
    node = NodeTables(policy, capacity, arrangement)
    table = node.table
    late: deque[tuple[float, bytes]] = deque()
    hits = accesses = spent = 0
    for tokens, keys, at in requests:
        began = time.perf_counter_ns()
        while late and late[0][0] <= at:
            table.touch(late.popleft()[1], 0.0)
        found = 0
        for key in keys:
            if key not in table:
                break
            found += 1
        if arrangement.is_taught:
            table.observe_sequence(keys)
        for key in keys:
            if not arrangement.uses_late_s:
                if not table.touch(key, 0.0) and key not in table:
                    node.add(key)
            elif key in table:
                late.append((at + arrangement.uses_late_s, key))
            else:
                node.add(key)
        node.evict()
        spent += time.perf_counter_ns() - began
        hits += min(found * BLOCK, tokens)
        accesses += len(keys)
    return Replayed(100 * hits / sum(r.tokens for r in requests), spent / max(1, accesses))


def optimum(requests: list[Request], capacity: int) -> float:
    """Token hit rate of the optimum, which knows all later requests."""
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
