"""Resolves blocks to live peers: the index behind a local cache.

Blocks are immutable, so locations are cached for a while; a caller that finds one stale calls `invalidate`, and the
next lookup queries the index. A peer that could not be reached is skipped for a pause, which grows while probes fail.
No call queries the index more than twice, and both queries run in one call of the bulkhead.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from kvpool.errors import KVPoolError
from kvpool_sidecar.index import prefix
from kvpool_sidecar.index.location_cache import LocationCache

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpool_sidecar.index.base import Index, NodeInfo
    from kvpool_sidecar.index.location_cache import ReplicaLocation
    from kvpool_sidecar.index.peer_reachability import PeerReachability
    from kvpool_sidecar.index.record import Record
    from kvpool_sidecar.resilience.bulkhead import Bulkhead

__all__ = ["BlockResolver"]

_T = TypeVar("_T")

_WARM = 4  # connections


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
        self._lookup_s = lookup_s
        self._clock = clock
        self._cache = LocationCache(own_number, lease_s, clock)

    @property
    def available(self) -> bool:
        """False while the index is treated as unavailable."""
        return self._guard.available

    @property
    def live_peers(self) -> int:
        """Number of other nodes that are known to be alive."""
        return self._cache.live_peers

    def locate(self, keys: Sequence[bytes], timeout_s: float) -> list[ReplicaLocation | None]:
        """Return a live peer for each block, in order; None if there is none, or no reply in time."""
        deadline = self._clock() + min(timeout_s, self._lookup_s)
        answers = self._locate(keys, deadline)
        self._cache.note_misses(keys, answers)
        return answers

    def longest_prefix(self, keys: Sequence[bytes], timeout_s: float) -> bytearray:
        """Return 1 for each block of a prompt that a live peer has according to the index, else 0, in order.

        Also 1 for a block that was not queried because those around it are present (kvpool_sidecar.index.prefix):
        `locate` checks it when it is loaded.
        """
        deadline = self._clock() + min(timeout_s, self._lookup_s)
        if len(keys) <= prefix.EXACT:
            return bytearray(found is not None for found in self._locate(keys, deadline))
        first = prefix.first_query(len(keys), self._cache.recent_misses(keys))
        known = self._cache.cached_positions(keys, first)
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
        return self._cache.live_peers_of(keys, records, staying=staying)

    def _all_records(self, keys: Sequence[bytes], deadline: float) -> list[tuple[Record, ...]]:
        records = self._index.locate(keys)
        strangers = self._cache.unknown_nodes(records)
        if strangers and self._clock() < deadline:
            self._cache.note_nodes(strangers, self._index.query((), strangers))
        return records

    def is_unreachable(self, key: bytes) -> bool:
        """Return whether the index has lately located this block only on peers that cannot be reached."""
        return self._cache.is_unreachable(key)

    def invalidate(self, key: bytes) -> None:
        """Drop the cached location of `key`, which was stale."""
        self._cache.invalidate(key)

    def blacklist(self, key: bytes, number: int) -> None:
        """Skip a corrupt replica for 300 s."""
        self._cache.blacklist(key, number)

    def mark_down(self, peer: NodeInfo) -> None:
        """Skip a peer that could not be reached, or did not respond, for a pause. Its address may be outdated."""
        self._cache.mark_down(peer)

    @property
    def reachability(self) -> PeerReachability:
        """Which peers can be read from."""
        return self._cache.reachability

    def live_nodes(self) -> list[NodeInfo]:
        """Return the other nodes that are known to be alive."""
        return self._cache.live_nodes()

    def refresh(self) -> None:
        """Read which nodes have changed; called at each heartbeat, outside the request path."""
        try:
            self._index.warm(_WARM)
            self._cache.note_roster(self._index.refresh_roster())
            strangers = self._cache.take_strangers()
            if strangers:
                self._cache.note_nodes(strangers, self._index.query((), strangers))
        except KVPoolError:
            return

    def _call_index(self, work: Callable[[], dict[int, _T]], deadline: float) -> dict[int, _T]:
        try:
            return self._guard.run(work, deadline - self._clock())
        except KVPoolError:
            return {}

    def _locate(self, keys: Sequence[bytes], deadline: float) -> list[ReplicaLocation | None]:
        answers = self._cache.cached(keys)
        rest = [n for n, answer in enumerate(answers) if answer is None]
        if rest:
            for n, found in self._call_index(lambda: self._query(keys, rest, deadline), deadline).items():
                answers[n] = found
        return answers

    def _query(self, keys: Sequence[bytes], rest: Sequence[int], deadline: float) -> dict[int, ReplicaLocation | None]:
        """Query exactly these positions, in ascending order."""
        records = dict(zip(rest, self._index.locate([keys[n] for n in rest]), strict=True))
        strangers = self._cache.unknown_nodes(records.values())
        if strangers and self._clock() < deadline:
            self._cache.note_nodes(strangers, self._index.query((), strangers))
        return self._cache.select(keys, records)

    def _search(self, keys: Sequence[bytes], known: Mapping[int, bool], deadline: float) -> dict[int, bool]:
        """Query what determines the length of the prefix, in ascending order. `known`: the cached positions."""
        first = [n for n, is_known in known.items() if not is_known]
        records = dict(zip(first, self._index.locate([keys[n] for n in first]), strict=True))
        strangers = self._cache.unknown_nodes(records.values())
        # a node that was not queried yet may be alive: the second query shows it
        hopeful = self._cache.possible(keys, known, records, strangers)
        window = self._cache.cached_positions(keys, prefix.second_query(hopeful))
        second = [n for n, is_known in window.items() if not is_known]
        if (second or strangers) and self._clock() < deadline:
            answer = self._index.query([keys[n] for n in second], strangers)
            self._cache.note_nodes(strangers, answer)
            records.update(zip(second, answer.records, strict=True))
            self._cache.note_unknown_nodes(answer.records)
            known = {**known, **window}
        chosen = self._cache.select(keys, records)
        return dict(sorted({**known, **{n: found is not None for n, found in chosen.items()}}.items()))
