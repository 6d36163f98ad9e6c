"""Warms up a node that joins: copies the pool's hottest blocks from its peers, rate limited, roots before leaves.

Runs once after a start, and only if this node's drives hold less than half of the median of its peers. It never evicts:
it stops before the low watermark or the file system's reserve would be passed. While clients of this node read or
write, it uses a quarter of its bandwidth. Blocks keep their keys, with which only permitted tenants find them; no
tenant names are needed. After a restart it continues with the missing blocks.
"""

from __future__ import annotations

import logging
import secrets
import statistics
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.errors import KVPoolError
from kvpool_sidecar.blocks.popularity import roots_first
from kvpool_sidecar.peers import hottest
from kvpool_sidecar.replication.peer_copy import CopyRequest, CopyResult, Replicator
from kvpool_sidecar.resilience.rate_limiter import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvpool_sidecar.blocks.events import BlockEvents
    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.index.location_cache import ReplicaLocation
    from kvpool_sidecar.peers.hottest import HotList
    from kvpool_sidecar.replication.peer_copy import PeerAccess
    from kvpool_sidecar.storage.local.store import LocalStore

__all__ = ["WarmUp", "WarmUpLimits", "is_cold", "plan"]

log = logging.getLogger(__name__)

FAMILY = "warm_up"
_MAX_PEERS = 8
_MAX_ROUNDS = 32
_POLL_S = 0.2
_ROUND_INTERVAL_S = 1.0
_LIST_S = 10.0
_LOCATE_S = 1.0
_BUSY_S = 1.0
_BUSY_DIVISOR = 4


def is_cold(used_bytes: int, peers_used: Sequence[int]) -> bool:
    """Return whether `used_bytes` is less than half of the median of the peers."""
    return bool(peers_used) and 2 * used_bytes < statistics.median(peers_used)


def plan(
    lists: Mapping[NodeInfo, HotList], locate: Callable[[list[bytes]], list[ReplicaLocation | None]]
) -> list[CopyRequest]:
    """Merge the peers' lists into copy requests, roots first. `locate` finds blocks that no listed peer has."""
    heat: defaultdict[bytes, float] = defaultdict(float)
    parents: dict[bytes, bytes] = {}
    lengths: dict[bytes, int] = {}
    sources: defaultdict[bytes, list[NodeInfo]] = defaultdict(list)
    for peer, found in lists.items():
        for row in found.rows:
            heat[row.key] += row.heat
            if row.parent is not None:
                parents.setdefault(row.key, row.parent)
            if row.payload_len:
                lengths.setdefault(row.key, row.payload_len)
                if lengths[row.key] == row.payload_len:
                    sources[row.key].append(peer)
    order = roots_first(heat, parents, len(heat))
    elsewhere = [key for key in order if key not in sources]
    for key, there in zip(elsewhere, locate(elsewhere), strict=True):
        if there is not None:
            lengths[key], sources[key] = there.payload_len, [there.peer]
    turn = {peer: n for n, peer in enumerate(lists)}
    return [
        CopyRequest(key, lengths[key], _rotated(sources[key], n, turn)) for n, key in enumerate(order) if key in sources
    ]


def _rotated(peers: list[NodeInfo], by: int, turn: Mapping[NodeInfo, int]) -> tuple[NodeInfo, ...]:
    """Rotate each block's sources, so that the peers share the load."""
    ordered = sorted(peers, key=lambda peer: turn.get(peer, 0))
    at = by % len(ordered)
    return tuple(ordered[at:] + ordered[:at])


class WarmUpLimits(NamedTuple):
    """`bytes_per_s`: bandwidth while this node is idle; under load a quarter of it. Larger blocks are skipped."""

    bytes_per_s: int
    max_block_bytes: int


class WarmUp:
    """One thread. `ready` returns whether the drives are scanned and the node is registered in the index.

    `requests` returns a counter of the clients' requests for data; it grows while this node is under load.
    """

    def __init__(
        self,
        local: LocalStore,
        peers: PeerAccess,
        events: BlockEvents,
        stats: Stats,
        limits: WarmUpLimits,
        *,
        ready: Callable[[], bool],
        requests: Callable[[], float],
    ) -> None:
        self._local = local
        self._peers = peers
        self._events = events
        self._stats = stats
        self._limits = limits
        self._ready = ready
        self._requests = requests
        self._stop = threading.Event()
        self._state = "waiting"
        self._last_requests = 0.0
        self._busy_until = 0.0
        self._replicator = self._new_replicator(self._stop)

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="warm-up", daemon=True).start()

    def stop(self) -> None:
        """Stop; a copy in progress is aborted."""
        self._stop.set()

    def run_once(
        self,
        bytes_per_s: int,
        stop: threading.Event,
        on_copied: Callable[[int], None],
        progress: Callable[[int, int], None],
    ) -> bool:
        """Copy the hottest missing blocks, in this thread. True if not all of them fit without eviction.

        Calls `on_copied(payload_len)` for each copied block and `progress(done, total)`. KVPoolError if the index does
        not respond.
        """
        wanted = self._missing(self._request_lists(self._peers.peers()))

        def counted() -> Iterator[CopyRequest]:
            for done, one in enumerate(wanted):
                progress(done, len(wanted))
                yield one
            progress(len(wanted), len(wanted))

        limiter = RateLimiter(lambda: self._rate(bytes_per_s), stop.wait)
        return self._new_replicator(stop).copy(counted(), limiter, on_copied) == CopyResult.FULL

    def status(self) -> dict[str, Any]:
        """For /status. `state`: waiting, copying, done, full (no free space), unneeded, alone or stopped."""
        counts = self._stats.whole(FAMILY)
        return {"state": self._state, "blocks": 0, "bytes": 0, **counts}

    def _run(self) -> None:
        try:
            while not self._ready():
                if self._stop.wait(_POLL_S):
                    break
            for _ in range(_MAX_ROUNDS):
                if self._stop.is_set() or self._round():
                    break
                self._stop.wait(_ROUND_INTERVAL_S)
        except Exception:
            log.exception("warm-up failed")
            self._state = "failed"
        if self._stop.is_set():
            self._state = "stopped"
        log.info("warm-up: %s", self.status())

    def _round(self) -> bool:
        """Query the peers and copy the missing blocks. True when there is nothing more to do."""
        try:
            peers = self._peers.peers()
        except KVPoolError as e:
            log.info("warm-up waits for the index: %s", e)
            return False
        if not peers:
            self._state = "alone"
            return False
        lists = self._request_lists(peers)
        if not lists:
            return False
        if not is_cold(self._local.usage().used_bytes, [found.used_bytes for found in lists.values()]):
            self._state = "done" if self._state == "copying" else "unneeded"
            return True
        wanted = self._missing(lists)
        before = self._stats.whole(FAMILY).get("blocks", 0)
        self._state = "copying"
        limiter = RateLimiter(lambda: self._rate(self._limits.bytes_per_s), self._stop.wait)
        outcome = self._replicator.copy(wanted, limiter)
        copied = self._stats.whole(FAMILY).get("blocks", 0) - before
        if outcome == CopyResult.FULL:
            self._state = "full"
            return True
        if outcome == CopyResult.DONE and not copied:
            self._state = "done"
            return True
        return False

    def _request_lists(self, peers: Sequence[NodeInfo]) -> dict[NodeInfo, HotList]:
        """Request the lists of a random sample of peers; peers that do not respond are left out."""
        chosen = secrets.SystemRandom().sample(peers, min(_MAX_PEERS, len(peers)))
        lists: dict[NodeInfo, HotList] = {}
        for peer in chosen:
            if self._stop.is_set():
                break
            try:
                link = self._peers.dial(peer, _LIST_S)
                try:
                    lists[peer] = hottest.request_hot_list(link, hottest.MAX_ROWS, time.monotonic() + _LIST_S)
                finally:
                    link.close()
            except (KVPoolError, OSError) as e:
                log.info("warm-up: no list from node %s: %s", peer.node, e)
        return lists

    def _missing(self, lists: Mapping[NodeInfo, HotList]) -> list[CopyRequest]:
        return [request for request in plan(lists, self._locate_all) if not self._local.contains(request.key)]

    def _new_replicator(self, stop: threading.Event) -> Replicator:
        return Replicator(
            self._local,
            self._peers.dial,
            self._events,
            self._stats,
            max_block_bytes=self._limits.max_block_bytes,
            family=FAMILY,
            stop=stop,
        )

    def _locate_all(self, keys: list[bytes]) -> list[ReplicaLocation | None]:
        found: list[ReplicaLocation | None] = []
        for at in range(0, len(keys), 256):
            found += self._peers.resolver.locate(keys[at : at + 256], _LOCATE_S)
        return found

    def _rate(self, bytes_per_s: int) -> float:
        """Return the bytes per second that are allowed now."""
        now, requests = time.monotonic(), self._requests()
        if requests != self._last_requests:
            self._last_requests = requests
            self._busy_until = now + _BUSY_S
        return bytes_per_s / (_BUSY_DIVISOR if now < self._busy_until else 1)
