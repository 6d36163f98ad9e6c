"""Resolves blocks to live peers: the index behind a local cache.

Blocks are immutable, so locations are cached for a while; a caller that finds one stale calls `invalidate`, and the
next lookup queries the index. A peer that could not be reached is skipped for a moment. No call queries the index more
than twice, and both queries run in one call of the bulkhead.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvpool.errors import KVPoolError
from kvpool_sidecar.index import prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvpool_sidecar.index.base import Index, IndexAnswer, NodeInfo
    from kvpool_sidecar.index.record import Record
    from kvpool_sidecar.resilience.bulkhead import Bulkhead

__all__ = ["BlockResolver", "ReplicaLocation"]

_T = TypeVar("_T")

_REMEMBERED = 1 << 17
_REMEMBER_S = 30.0
_DOWN_S = 2.0
_DEAD_S = 0.5
_MOVED_S = 0.2  # then a node that was not reached may have a new address: sidecars are replaced
_SHUNNED_S = 300.0
_MAX_SHUNNED = 1 << 12
_MAX_DOUBTS = 1 << 13
_WARM = 4  # connections


class ReplicaLocation(NamedTuple):
    """A replica of a block on a peer."""

    number: int
    peer: NodeInfo
    payload_len: int


class BlockResolver:
    """Thread-safe. `own_number` returns this node's number, never a result. Lookups wait at most `lookup_s`."""

    def __init__(
        self,
        index: Index,
        guard: Bulkhead,
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
        self._nodes: dict[int, tuple[NodeInfo | None, float]] = {}  # valid until; None: known to be dead
        self._down: dict[NodeInfo, float] = {}  # by address: its successor on that node has another one
        self._blacklisted: OrderedDict[tuple[bytes, int], float] = OrderedDict()
        self._misses: OrderedDict[bytes, float] = OrderedDict()  # not found, valid until

    @property
    def available(self) -> bool:
        """False while the index is treated as unavailable."""
        return self._guard.available

    @property
    def live_peers(self) -> int:
        """Number of other nodes that are known to be alive."""
        now, own = self._clock(), self._own_number()
        with self._lock:
            return sum(1 for n, (info, until) in self._nodes.items() if info is not None and until > now and n != own)

    def locate(self, keys: Sequence[bytes], timeout_s: float) -> list[ReplicaLocation | None]:
        """Return a live peer for each block, in order; None if there is none, or no reply in time."""
        deadline = self._clock() + min(timeout_s, self._lookup_s)
        answers = self._locate(keys, deadline)
        if None in answers or self._misses:
            self._note_misses(keys, answers)
        return answers

    def longest_prefix(self, keys: Sequence[bytes], timeout_s: float) -> bytearray:
        """Return 1 for each block of a prompt that a live peer has according to the index, else 0, in order.

        Also 1 for a block that was not queried because those around it are present (kvpool_sidecar.index.prefix):
        `locate` checks it when it is loaded.
        """
        deadline = self._clock() + min(timeout_s, self._lookup_s)
        if len(keys) <= prefix.EXACT:
            return bytearray(found is not None for found in self._locate(keys, deadline))
        first = prefix.first_query(len(keys), self._recent_misses(keys))
        known = self._cached_positions(keys, first)
        found = known
        if not all(known.values()):
            found = self._call_index(lambda: self._search(keys, known, deadline), deadline) or known
        answers = bytearray(len(keys))
        for n, is_found in found.items():
            answers[n] = is_found
        for span in prefix.presumed(found):
            answers[span.start : span.stop] = b"\1" * len(span)
        return answers

    def replicas(self, keys: Sequence[bytes], timeout_s: float, *, staying: bool = False) -> list[set[str]] | None:
        """Return the names of the live peers that have each block, in order; None without a reply in time.

        `staying`: leave out peers that are drained.
        """
        deadline = self._clock() + min(timeout_s, self._lookup_s)
        records = self._call_index(lambda: dict(enumerate(self._all_records(keys, deadline))), deadline)
        if len(records) != len(keys):
            return None
        now = self._clock()
        with self._lock:
            found = [[self._live_location(key, r, now) for r in records[n]] for n, key in enumerate(keys)]
        return [
            {one.peer.node for one in some if one is not None and not (staying and one.peer.leaving)} for some in found
        ]

    def _all_records(self, keys: Sequence[bytes], deadline: float) -> list[tuple[Record, ...]]:
        records = self._index.locate(keys)
        strangers = self._unknown_nodes(records)
        if strangers and self._clock() < deadline:
            self._note_nodes(strangers, self._index.query((), strangers))
        return records

    def invalidate(self, key: bytes) -> None:
        """Drop the cached location of `key`, which was stale."""
        with self._lock:
            self._blocks.pop(key, None)

    def blacklist(self, key: bytes, number: int) -> None:
        """Skip a corrupt replica for 300 s."""
        with self._lock:
            self._blocks.pop(key, None)
            self._blacklisted[key, number] = self._clock() + _SHUNNED_S
            if len(self._blacklisted) > _MAX_SHUNNED:
                self._blacklisted.popitem(last=False)

    def mark_down(self, peer: NodeInfo) -> None:
        """Skip a peer that could not be reached, or did not respond, for 2 s. Its address may be outdated."""
        now = self._clock()
        with self._lock:
            self._down = {one: until for one, until in self._down.items() if until > now}
            self._down[peer] = now + _DOWN_S
            for number, (info, until) in self._nodes.items():
                if info == peer:
                    self._nodes[number] = (info, min(until, now + _MOVED_S))

    def mark_up(self, peer: NodeInfo) -> None:
        """Use a peer again that was reached."""
        with self._lock:
            self._down.pop(peer, None)

    def refresh(self) -> None:
        """Read the live nodes again; called at each heartbeat, outside the request path."""
        try:
            self._index.warm(_WARM)
            answer = self._index.live_nodes()
            with self._lock:
                others = [n for n in self._nodes if n not in answer.nodes]
            rest = self._index.query((), others)
        except KVPoolError:
            return
        self._note_nodes(list(answer.nodes), answer)
        self._note_nodes(others, rest)

    def _call_index(self, work: Callable[[], dict[int, _T]], deadline: float) -> dict[int, _T]:
        try:
            return self._guard.run(work, deadline - self._clock())
        except KVPoolError:
            return {}

    def _locate(self, keys: Sequence[bytes], deadline: float) -> list[ReplicaLocation | None]:
        answers = self._cached(keys)
        rest = [n for n, answer in enumerate(answers) if answer is None]
        if rest:
            for n, found in self._call_index(lambda: self._query(keys, rest, deadline), deadline).items():
                answers[n] = found
        return answers

    def _query(self, keys: Sequence[bytes], rest: Sequence[int], deadline: float) -> dict[int, ReplicaLocation | None]:
        """Query exactly these positions, in ascending order."""
        records = dict(zip(rest, self._index.locate([keys[n] for n in rest]), strict=True))
        strangers = self._unknown_nodes(records.values())
        if strangers and self._clock() < deadline:
            self._note_nodes(strangers, self._index.query((), strangers))
        return self._select(keys, records)

    def _search(self, keys: Sequence[bytes], known: Mapping[int, bool], deadline: float) -> dict[int, bool]:
        """Query what determines the length of the prefix, in ascending order. `known`: the cached positions."""
        first = [n for n, is_known in known.items() if not is_known]
        records = dict(zip(first, self._index.locate([keys[n] for n in first]), strict=True))
        strangers = self._unknown_nodes(records.values())
        # a node that was not queried yet may be alive: the second query shows it
        hopeful = self._possible(keys, known, records, strangers)
        window = self._cached_positions(keys, prefix.second_query(hopeful))
        second = [n for n, is_known in window.items() if not is_known]
        if (second or strangers) and self._clock() < deadline:
            answer = self._index.query([keys[n] for n in second], strangers)
            self._note_nodes(strangers, answer)
            records.update(zip(second, answer.records, strict=True))
            self._note_unknown_nodes(answer.records)
            known = {**known, **window}
        chosen = self._select(keys, records)
        return dict(sorted({**known, **{n: found is not None for n, found in chosen.items()}}.items()))

    def _possible(
        self,
        keys: Sequence[bytes],
        known: Mapping[int, bool],
        records: Mapping[int, tuple[Record, ...]],
        strangers: Sequence[int],
    ) -> dict[int, bool]:
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

    def _unknown_nodes(self, records: Iterable[tuple[Record, ...]]) -> list[int]:
        """Return the nodes of `records` whose liveness is not known."""
        now = self._clock()
        numbers = {r.node for rs in _distinct(records) for r in rs}
        with self._lock:
            return [n for n in numbers if n not in self._nodes or self._nodes[n][1] <= now]

    def _note_unknown_nodes(self, records: Iterable[tuple[Record, ...]]) -> None:
        """Query them at the next heartbeat; until then they count as dead."""
        strangers = self._unknown_nodes(records)
        with self._lock:
            for number in strangers:
                self._nodes.setdefault(number, (None, self._clock()))

    def _note_misses(self, keys: Sequence[bytes], answers: Sequence[ReplicaLocation | None]) -> None:
        until = self._clock() + _REMEMBER_S
        with self._lock:
            for key, answer in zip(keys, answers, strict=True):
                self._misses.pop(key, None)
                if answer is None:
                    self._misses[key] = until
            while len(self._misses) > _MAX_DOUBTS:
                self._misses.popitem(last=False)

    def _recent_misses(self, keys: Sequence[bytes]) -> list[int]:
        if not self._misses:
            return []
        now = self._clock()
        with self._lock:
            return [n for n, key in enumerate(keys) if self._misses.get(key, 0.0) > now]

    def _note_nodes(self, numbers: Sequence[int], answer: IndexAnswer) -> None:
        now = self._clock()
        with self._lock:
            for number in numbers:
                if number in answer.unknown:
                    continue
                info = answer.nodes.get(number)
                # a dead node is queried again soon: it may restart
                self._nodes[number] = (info, now + (self._lease_s if info else _DEAD_S))
            dead = [n for n, (info, until) in self._nodes.items() if info is None and until < now - self._lease_s]
            for number in dead:
                del self._nodes[number]

    def _cached_positions(self, keys: Sequence[bytes], positions: Sequence[int]) -> dict[int, bool]:
        """Return the cached ones of these positions."""
        found = self._cached([keys[n] for n in positions])
        return {n: one is not None for n, one in zip(positions, found, strict=True)}

    def _cached(self, keys: Sequence[bytes]) -> list[ReplicaLocation | None]:
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

    def _select(
        self, keys: Sequence[bytes], records: Mapping[int, tuple[Record, ...]]
    ) -> dict[int, ReplicaLocation | None]:
        now = self._clock()
        until = now + _REMEMBER_S
        chosen: dict[int, ReplicaLocation | None] = {}
        same: dict[int, tuple[ReplicaLocation | None, tuple[Record, float] | None]] = {}  # by identity, as in _distinct
        with self._lock:
            is_any_shunned = bool(self._blacklisted)
            for n, candidates in records.items():
                key = keys[n]
                verdict = None if is_any_shunned else same.get(id(candidates))
                if verdict is None:
                    verdict = same[id(candidates)] = self._first_live(key, candidates, now, until)
                chosen[n], entry = verdict
                if entry is not None:
                    self._blocks[key] = entry
            while len(self._blocks) > _REMEMBERED:
                self._blocks.popitem(last=False)
        return chosen

    def _first_live(
        self, key: bytes, candidates: Sequence[Record], now: float, until: float
    ) -> tuple[ReplicaLocation | None, tuple[Record, float] | None]:
        last_choice: tuple[ReplicaLocation | None, tuple[Record, float] | None] = (None, None)
        for record in candidates:
            found = self._live_location(key, record, now)
            if found is not None and not found.peer.leaving:
                return found, (record, until)
            if found is not None and last_choice[0] is None:
                last_choice = found, (record, until)
        return last_choice

    def _live_location(self, key: bytes, record: Record, now: float) -> ReplicaLocation | None:
        info, until = self._nodes.get(record.node, (None, 0.0))
        if info is None or until <= now or info.generation != record.generation or record.node == self._own_number():
            return None
        if self._down.get(info, 0.0) > now or self._blacklisted.get((key, record.node), 0.0) > now:
            return None
        return ReplicaLocation(record.node, info, record.payload_len)


def _distinct(records: Iterable[tuple[Record, ...]]) -> Iterable[tuple[Record, ...]]:
    """Each once. By identity: equal values are mostly the same object (record.unpack), and hashing them costs more."""
    return {id(rs): rs for rs in records}.values()
