"""An index in this process: for tests, and for a pool without one (then each node finds its own and shared blocks)."""

from __future__ import annotations

import secrets
import threading
import time
from typing import TYPE_CHECKING

from kvpool_sidecar.index.base import MAX_NODE, Index, IndexAnswer, NodeInfo, RosterChange
from kvpool_sidecar.index.record import MAX_RECORDS, Record, entry_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["MemoryIndex"]


class MemoryIndex(Index):
    """See Index. Nodes that share one object share the index."""

    def __init__(
        self, lease_s: float = 15.0, clock: Callable[[], float] = time.monotonic, *, forget_s: float = 3600.0
    ) -> None:
        self._lease_s = lease_s
        self._forget_s = forget_s
        self._clock = clock
        self._lock = threading.Lock()
        self.flush()

    def flush(self) -> None:
        """Forget everything, like a Redis that was emptied."""
        with self._lock:
            self._blocks: dict[bytes, list[Record]] = {}
            self._numbers: dict[str, int] = {}
            self._leases: dict[int, tuple[NodeInfo, float]] = {}
            self._seen: dict[int, float] = {}  # until when a node is not forgotten
            self._sweep_at = float("-inf")
            self._epoch = ""

    def join(self, info: NodeInfo) -> int:
        with self._lock:
            number = self._numbers.get(info.node)
            while number is None or self._is_other_node(number, info):
                number = secrets.randbelow(MAX_NODE) + 1
            self._numbers[info.node] = number
            self._leases[number] = (info, self._clock() + self._lease_s)
            self._seen[number] = self._clock() + self._forget_s
            return number

    def renew(self, number: int, info: NodeInfo) -> str | None:
        with self._lock:
            if self._is_other_node(number, info):
                return None
            self._numbers[info.node] = number
            self._leases[number] = (info, self._clock() + self._lease_s)
            self._seen[number] = self._clock() + self._forget_s
            self._epoch = self._epoch or secrets.token_hex(8)
            return self._epoch

    def leave(self, number: int, info: NodeInfo) -> None:
        with self._lock:
            if not self._is_other_node(number, info):
                self._leases.pop(number, None)

    def announce(self, blocks: Sequence[tuple[bytes, Record]]) -> None:
        with self._lock:
            for key, record in blocks:
                records = self._blocks.setdefault(entry_name(key), [])
                others = [r for r in records if r.node != record.node]
                if len(others) < MAX_RECORDS:
                    records[:] = [*others, record]

    def withdraw(self, number: int, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                left = [r for r in self._blocks.get(entry_name(key), []) if r.node != number]
                if left:
                    self._blocks[entry_name(key)] = left
                else:
                    self._blocks.pop(entry_name(key), None)

    def query(self, keys: Sequence[bytes], numbers: Sequence[int]) -> IndexAnswer:
        now = self._clock()
        with self._lock:
            records = [tuple(self._blocks.get(entry_name(key), ())) for key in keys]
            held = {n: self._leases[n] for n in numbers if n in self._leases}
        return IndexAnswer(records, {number: info for number, (info, until) in held.items() if until > now})

    def live_nodes(self) -> IndexAnswer:
        with self._lock:
            numbers = list(self._leases)
        return self.query((), numbers)

    def refresh_roster(self) -> RosterChange:
        now = self._clock()
        with self._lock:
            alive = {n: info for n, (info, until) in self._leases.items() if until > now}
            return RosterChange(alive, frozenset(self._leases.keys() | self._seen.keys()) - alive.keys())

    def expire(self, number: int, pace: Callable[[int], bool]) -> int:
        with self._lock:
            now = self._clock()
            if now < self._sweep_at:
                return 0
            self._sweep_at = now + self._forget_s
            names = list(self._blocks)
        removed = 0
        for name in names:
            with self._lock:
                now = self._clock()
                records = self._blocks.get(name, [])
                left = [r for r in records if self._seen.get(r.node, 0.0) > now]
                removed += len(records) - len(left)
                if left:
                    self._blocks[name] = left
                else:
                    self._blocks.pop(name, None)
            if not pace(1):
                break
        return removed

    def _is_other_node(self, number: int, info: NodeInfo) -> bool:
        holder = self._leases.get(number)
        return holder is not None and holder[0].node != info.node and holder[1] > self._clock()
