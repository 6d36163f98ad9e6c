"""Which peer to ask for a block: the index through a local cache, and the peers that are alive.

Blocks are immutable, so what was true once is kept for a while; whoever finds it wrong says so (`forget`) and the next
question goes to the index. A peer that could not be reached is not asked for a moment.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import KVPoolError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpool_sidecar.guard import Guard
    from kvpool_sidecar.index.base import Index, NodeInfo
    from kvpool_sidecar.index.record import Record

__all__ = ["Found", "PeerDirectory"]

_REMEMBERED = 1 << 17
_REMEMBER_S = 30.0
_DOWN_S = 2.0
_SHUNNED_S = 300.0
_MAX_SHUNNED = 1 << 12
_WARM = 4  # connections


class Found(NamedTuple):
    """A block at a peer."""

    number: int
    peer: NodeInfo
    payload_len: int


class PeerDirectory:
    """Thread-safe. `own_number` is this node's, which is never an answer; no lookup waits longer than `lookup_s`."""

    def __init__(
        self,
        index: Index,
        guard: Guard,
        own_number: Callable[[], int],
        *,
        lease_s: float,
        lookup_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._guard = guard
        self._own_number = own_number
        self._lease_s = lease_s
        self._lookup_s = lookup_s
        self._clock = clock
        self._lock = threading.Lock()
        self._blocks: OrderedDict[bytes, tuple[Record, float]] = OrderedDict()
        self._nodes: dict[int, tuple[NodeInfo | None, float]] = {}  # until when; None: known to be dead
        self._down: dict[int, float] = {}
        self._shunned: OrderedDict[tuple[bytes, int], float] = OrderedDict()

    @property
    def available(self) -> bool:
        """False while the index is treated as absent."""
        return self._guard.available

    @property
    def alive(self) -> int:
        """How many other nodes are known to be alive."""
        now, own = self._clock(), self._own_number()
        with self._lock:
            return sum(1 for n, (info, until) in self._nodes.items() if info is not None and until > now and n != own)

    def locate(self, keys: Sequence[bytes], timeout_s: float) -> list[Found | None]:
        """A living peer for each block, in order; None if there is none or nobody could tell in time."""
        deadline = self._clock() + min(timeout_s, self._lookup_s)
        answers = [self._cached(key) for key in keys]
        missing = [key for key, answer in zip(keys, answers, strict=True) if answer is None]
        if missing and (records := self._ask(missing, deadline)):
            self._learn_nodes({r.node for rs in records.values() for r in rs}, deadline)
            for at, key in enumerate(keys):
                if answers[at] is None:
                    answers[at] = self._choose(key, records.get(key, []))
        return answers

    def forget(self, key: bytes) -> None:
        """What we believed of `key` was wrong."""
        with self._lock:
            self._blocks.pop(key, None)

    def shun(self, key: bytes, number: int) -> None:
        """That copy is corrupt: do not ask that peer for it for a while."""
        with self._lock:
            self._blocks.pop(key, None)
            self._shunned[key, number] = self._clock() + _SHUNNED_S
            if len(self._shunned) > _MAX_SHUNNED:
                self._shunned.popitem(last=False)

    def mark_down(self, number: int) -> None:
        """That peer could not be reached."""
        with self._lock:
            self._down[number] = self._clock() + _DOWN_S

    def mark_up(self, number: int) -> None:
        """It was reached."""
        with self._lock:
            self._down.pop(number, None)

    def refresh(self) -> None:
        """Ask anew which of the known nodes are alive; called at each heartbeat, off the path of requests."""
        with self._lock:
            numbers = list(self._nodes)
        try:
            self._index.warm(_WARM)
            alive = self._index.nodes(numbers)
        except KVPoolError:
            return
        self._note_nodes(numbers, alive)

    def _ask(self, keys: Sequence[bytes], deadline: float) -> dict[bytes, list[Record]]:
        try:
            found = self._guard.call(lambda: self._index.locate(keys), deadline - self._clock())
        except KVPoolError:
            return {}
        return dict(zip(keys, found, strict=True))

    def _learn_nodes(self, numbers: set[int], deadline: float) -> None:
        now = self._clock()
        with self._lock:
            unknown = [n for n in numbers if n not in self._nodes or self._nodes[n][1] <= now]
        if not unknown:
            return
        try:
            alive = self._guard.call(lambda: self._index.nodes(unknown), deadline - now)
        except KVPoolError:
            return
        self._note_nodes(unknown, alive)

    def _note_nodes(self, numbers: Sequence[int], alive: Mapping[int, NodeInfo]) -> None:
        now = self._clock()
        with self._lock:
            for number in numbers:
                info = alive.get(number)
                # a dead node is asked after again soon: it may be on its way back
                self._nodes[number] = (info, now + (self._lease_s if info else 1.0))
            dead = [n for n, (info, until) in self._nodes.items() if info is None and until < now - self._lease_s]
            for number in dead:
                del self._nodes[number]

    def _cached(self, key: bytes) -> Found | None:
        now = self._clock()
        with self._lock:
            record, until = self._blocks.get(key, (None, 0.0))
            if record is None:
                return None
            found = self._alive(key, record, now) if until > now else None
            if found is None:
                del self._blocks[key]
            return found

    def _choose(self, key: bytes, records: Sequence[Record]) -> Found | None:
        now = self._clock()
        with self._lock:
            for record in records:
                found = self._alive(key, record, now)
                if found is not None:
                    self._blocks[key] = (record, now + _REMEMBER_S)
                    self._blocks.move_to_end(key)
                    if len(self._blocks) > _REMEMBERED:
                        self._blocks.popitem(last=False)
                    return found
        return None

    def _alive(self, key: bytes, record: Record, now: float) -> Found | None:
        info, until = self._nodes.get(record.node, (None, 0.0))
        if info is None or until <= now or info.generation != record.generation or record.node == self._own_number():
            return None
        if self._down.get(record.node, 0.0) > now or self._shunned.get((key, record.node), 0.0) > now:
            return None
        return Found(record.node, info, record.payload_len)
