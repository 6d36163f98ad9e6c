"""Cached block locations and peer liveness, behind BlockResolver. No I/O.

Locations are cached for 30 s.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from kvpool_sidecar.index import replica_choice
from kvpool_sidecar.index.live_nodes import LiveNodes
from kvpool_sidecar.index.peer_reachability import PeerReachability
from kvpool_sidecar.resilience.bounded_cache import BoundedCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvpool_sidecar.index.base import IndexAnswer, NodeInfo, RosterChange
    from kvpool_sidecar.index.record import Record

__all__ = ["LocationCache", "ReplicaLocation"]

_REMEMBERED = 1 << 17
_REMEMBER_S = 30.0
_UNREACHABLE_S = 60.0
_SHUNNED_S = 300.0
_MAX_SHUNNED = 1 << 12
_MAX_DOUBTS = 1 << 13


class ReplicaLocation(NamedTuple):
    """A replica of a block on a peer."""

    number: int
    peer: NodeInfo
    payload_len: int


class LocationCache:
    """Thread-safe. `own_number` returns this node's number, never a result."""

    def __init__(
        self,
        own_number: Callable[[], int],
        lease_s: float,
        clock: Callable[[], float],
        reachability: PeerReachability | None = None,
    ) -> None:
        self.reachability = PeerReachability(clock) if reachability is None else reachability
        self._own_number = own_number
        self._clock = clock
        self._lock = threading.Lock()
        self._blocks: OrderedDict[bytes, tuple[Record, float]] = OrderedDict()
        self._nodes = LiveNodes(lease_s)
        self._blacklisted: BoundedCache[tuple[bytes, int], bool] = BoundedCache(_MAX_SHUNNED, _SHUNNED_S, clock)
        self._unreachable: BoundedCache[bytes, bool] = BoundedCache(_MAX_DOUBTS, _UNREACHABLE_S, clock)
        self._misses: BoundedCache[bytes, bool] = BoundedCache(_MAX_DOUBTS, _REMEMBER_S, clock)

    @property
    def live_peers(self) -> int:
        """Number of other nodes that are known to be alive."""
        return len(self._live())

    def live_nodes(self) -> list[NodeInfo]:
        """Return the other nodes that are known to be alive."""
        return list(self._live().values())

    def _live(self) -> dict[int, NodeInfo]:
        with self._lock:
            live = self._nodes.all(self._clock())
        live.pop(self._own_number(), None)
        return live

    def invalidate(self, key: bytes) -> None:
        """Drop the cached location of `key`, which was stale."""
        with self._lock:
            self._blocks.pop(key, None)

    def is_unreachable(self, key: bytes) -> bool:
        """Return whether the block was located only on peers that are paused, in the last minute."""
        if not self._unreachable:
            return False
        with self._lock:
            return key in self._unreachable

    def blacklist(self, key: bytes, number: int) -> None:
        """Skip a corrupt replica for 300 s."""
        with self._lock:
            self._blocks.pop(key, None)
            self._blacklisted.put((key, number), True)

    def mark_down(self, peer: NodeInfo) -> None:
        """Skip a peer that could not be reached, or did not respond, for a pause. Its address may be outdated."""
        now = self._clock()
        self.reachability.mark_down(peer)
        with self._lock:
            self._nodes.note_moved(peer, now)

    def clear(self) -> None:
        """Drop all cached locations."""
        with self._lock:
            self._blocks.clear()

    def live_peers_of(
        self, keys: Sequence[bytes], records: Mapping[int, Sequence[Record]], *, staying: bool
    ) -> list[set[str]]:
        """Return the names of the live peers of each block. `staying`: leave out peers that are drained."""
        now = self._clock()
        with self._lock:
            found = [[self._live_location(key, r, now) for r in records[n]] for n, key in enumerate(keys)]
        return [
            {one.peer.node for one in some if one is not None and not (staying and one.peer.leaving)} for some in found
        ]

    def possible(
        self,
        keys: Sequence[bytes],
        known: Mapping[int, bool],
        records: Mapping[int, tuple[Record, ...]],
        strangers: Sequence[int],
    ) -> dict[int, bool]:
        """Return for each position whether the block may be on a live peer; nodes in `strangers` may be alive."""
        now = self._clock()
        same: dict[int, bool] = {}
        hopeful = dict(known)
        with self._lock:
            for n, candidates in records.items():
                verdict = None if self._blacklisted else same.get(id(candidates))
                if verdict is None:
                    verdict = same[id(candidates)] = any(
                        r.node in strangers or self._live_location(keys[n], r, now) is not None for r in candidates
                    )
                hopeful[n] = verdict
        return hopeful

    def unknown_nodes(self, records: Iterable[tuple[Record, ...]]) -> list[int]:
        """Return the nodes of `records` whose liveness is not known."""
        now = self._clock()
        numbers = {r.node for rs in _distinct(records) for r in rs}
        with self._lock:
            return [n for n in numbers if not self._nodes.get(n, now)[1]]

    def note_unknown_nodes(self, records: Iterable[tuple[Record, ...]]) -> None:
        """Query them at the next heartbeat; until then they count as dead."""
        strangers = self.unknown_nodes(records)
        with self._lock:
            self._nodes.note_strangers(strangers, self._clock())

    def take_strangers(self) -> list[int]:
        """Return the nodes to query at this heartbeat, once."""
        with self._lock:
            return self._nodes.take_strangers()

    def note_misses(self, keys: Sequence[bytes], answers: Sequence[ReplicaLocation | None]) -> None:
        """Record which of these blocks were not found, for 30 s."""
        if None not in answers and not self._misses:
            return
        with self._lock:
            for key, answer in zip(keys, answers, strict=True):
                if answer is None:
                    self._misses.put(key, True)
                else:
                    self._misses.pop(key)

    def recent_misses(self, keys: Sequence[bytes]) -> list[int]:
        """Return the positions of the blocks that were recently not found."""
        if not self._misses:
            return []
        with self._lock:
            return [n for n, key in enumerate(keys) if key in self._misses]

    def note_nodes(self, numbers: Sequence[int], answer: IndexAnswer) -> None:
        """Record the liveness of these nodes as the index reports it."""
        with self._lock:
            self._nodes.note_answer(numbers, answer, self._clock())

    def note_roster(self, change: RosterChange) -> None:
        """Record what changed in the roster; the rest of it holds for another lease."""
        with self._lock:
            self._nodes.note_roster(change, self._clock())

    def cached_positions(self, keys: Sequence[bytes], positions: Sequence[int]) -> dict[int, bool]:
        """Return the cached ones of these positions."""
        found = self.cached([keys[n] for n in positions])
        return {n: one is not None for n, one in zip(positions, found, strict=True)}

    def cached(self, keys: Sequence[bytes]) -> list[ReplicaLocation | None]:
        """Return the cached live location of each block, in order; None without one."""
        now = self._clock()
        with self._lock:
            if not self._blocks:
                return [None] * len(keys)
            return [
                self._cached_location(key, *entry, now) if (entry := self._blocks.get(key)) else None for key in keys
            ]

    def _cached_location(self, key: bytes, record: Record, until: float, now: float) -> ReplicaLocation | None:
        found = self._live_location(key, record, now) if until > now else None
        if found is None or found.peer.leaving:  # a node that remains may have it by now
            del self._blocks[key]
            return None
        return found

    def select(
        self, keys: Sequence[bytes], records: Mapping[int, tuple[Record, ...]]
    ) -> dict[int, ReplicaLocation | None]:
        """Choose a live replica for each position, preferably on a node that is not drained, and cache it."""
        now = self._clock()
        until = now + _REMEMBER_S
        chosen: dict[int, ReplicaLocation | None] = {}
        # by identity, as in _distinct, and lane
        same: dict[tuple[int, int], tuple[ReplicaLocation | None, tuple[Record, float] | None]] = {}
        with self._lock:
            is_any_shunned = bool(self._blacklisted)
            for n, candidates in records.items():
                key = keys[n]
                identity = (id(candidates), replica_choice.lane_of(key))
                verdict = None if is_any_shunned else same.get(identity)
                if verdict is None:
                    verdict = same[identity] = self._nearest(key, candidates, now, until)
                chosen[n], entry = verdict
                if entry is not None:
                    self._blocks[key] = entry
                    self._unreachable.pop(key)
                elif candidates and self._is_any_down(candidates, now):
                    self._unreachable.put(key, True)
            while len(self._blocks) > _REMEMBERED:
                self._blocks.popitem(last=False)
        return chosen

    def _nearest(
        self, key: bytes, candidates: Sequence[Record], now: float, until: float
    ) -> tuple[ReplicaLocation | None, tuple[Record, float] | None]:
        """Choose among the live replicas; a node that is drained is the last choice."""
        asker, lane = self._own_number(), replica_choice.lane_of(key)
        order = (
            candidates
            if len(candidates) == 1
            else sorted(candidates, key=lambda r: replica_choice.score(asker, r.node, lane))
        )
        last_choice: tuple[ReplicaLocation | None, tuple[Record, float] | None] = (None, None)
        for record in order:
            found = self._live_location(key, record, now)
            if found is not None and not found.peer.leaving:
                return found, (record, until)
            if found is not None and last_choice[0] is None:
                last_choice = found, (record, until)
        return last_choice

    def _is_any_down(self, candidates: Sequence[Record], now: float) -> bool:
        infos = [info for record in candidates if (info := self._nodes.get(record.node, now)[0]) is not None]
        return any(self.reachability.is_down(info, now) for info in infos)

    def _live_location(self, key: bytes, record: Record, now: float) -> ReplicaLocation | None:
        info, holds = self._nodes.get(record.node, now)
        if info is None or not holds or info.generation != record.generation or record.node == self._own_number():
            return None
        if self.reachability.is_down(info, now) or (key, record.node) in self._blacklisted:
            return None
        return ReplicaLocation(record.node, info, record.payload_len)


def _distinct(records: Iterable[tuple[Record, ...]]) -> Iterable[tuple[Record, ...]]:
    """Each once. By identity: equal values are mostly the same object (record.unpack), and hashing them costs more."""
    return {id(rs): rs for rs in records}.values()
