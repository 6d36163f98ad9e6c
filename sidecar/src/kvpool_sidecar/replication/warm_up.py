"""A node that joins is warmed: the pool's hottest blocks are copied from its peers, slowly, roots before leaves.

It happens once after a start, and only if this node's drives hold less than half of what the peers' hold. It never
evicts: it stops where the low watermark or the file system's reserve would be passed. While clients of this node read
or write, it goes at a quarter of its bandwidth. Blocks come with their keys, under which nobody finds them but who may;
no tenant's name is needed. After a restart it goes on with what is still missing.
"""

from __future__ import annotations

import functools
import logging
import secrets
import statistics
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from kvpool.errors import KVPoolError
from kvpool_sidecar.blocks.popularity import roots_first
from kvpool_sidecar.peers import hottest
from kvpool_sidecar.replication.peer_copy import CopyRequest, CopyResult, Replicator
from kvpool_sidecar.resilience.rate_limiter import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.index.resolver import ReplicaLocation
    from kvpool_sidecar.peers.connection import PeerConnection
    from kvpool_sidecar.peers.hottest import HotList
    from kvpool_sidecar.storage.local.store import LocalStore

__all__ = ["WarmUp", "is_cold", "plan"]

log = logging.getLogger(__name__)

FAMILY = "warm_up"
_MAX_PEERS = 8
_ROUNDS = 32
_POLL_S = 0.2
_AGAIN_S = 1.0
_LIST_S = 10.0
_LOCATE_S = 1.0
_BUSY_S = 1.0
_BUSY_SHARE = 4


def is_cold(used_bytes: int, peers_used: Sequence[int]) -> bool:
    """Does a node with `used_bytes` hold less than half of what is usual among its peers?"""
    return bool(peers_used) and 2 * used_bytes < statistics.median(peers_used)


def plan(
    lists: Mapping[NodeInfo, HotList], locate: Callable[[list[bytes]], list[ReplicaLocation | None]]
) -> list[CopyRequest]:
    """What to copy, in order: the heat of all lists together, roots first. `locate` finds blocks no list's peer has."""
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
    """Each block starts with another of its sources, so that the peers share the work."""
    ordered = sorted(peers, key=lambda peer: turn.get(peer, 0))
    at = by % len(ordered)
    return tuple(ordered[at:] + ordered[:at])


class WarmUp:
    """One thread. `members` are the nodes of the pool (self too), `ready` says that this node knows what it has.

    `requests` is a number that grows with every request of a client for data.
    """

    def __init__(
        self,
        local: LocalStore,
        own: NodeInfo,
        members: Callable[[], Sequence[NodeInfo]],
        locate: Callable[[list[bytes], float], list[ReplicaLocation | None]],
        dial: Callable[[NodeInfo, float], PeerConnection],
        *,
        bytes_per_s: int,
        max_block_bytes: int,
        ready: Callable[[], bool],
        requests: Callable[[], float],
        stats: Stats,
        on_stored: Callable[[bytes, int], None],
        on_corrupt: Callable[[bytes], None],
    ) -> None:
        self._local = local
        self._own = own
        self._members = members
        self._locate = locate
        self._dial = dial
        self._bytes_per_s = bytes_per_s
        self._ready = ready
        self._requests = requests
        self._stats = stats
        self._stop = threading.Event()
        self._state = "waiting"
        self._seen_requests = 0.0
        self._busy_until = 0.0
        self._on_stored = on_stored
        self._new_replicator = functools.partial(
            Replicator, local, dial, max_block_bytes=max_block_bytes, stats=stats, family=FAMILY, on_corrupt=on_corrupt
        )
        self._replicator = self._new_replicator(stop=self._stop, on_stored=on_stored)

    def start(self) -> None:
        threading.Thread(target=self._run, name="warm-up", daemon=True).start()

    def stop(self) -> None:
        """Copy no more; a block under way is given up."""
        self._stop.set()

    def run_once(
        self,
        bytes_per_s: int,
        stop: threading.Event,
        stored: Callable[[int], None],
        progress: Callable[[int, int], None],
    ) -> bool:
        """Copy the hottest blocks that are not here now, in this thread. True if there was no room for all.

        `stored(payload_len)` is told of each that came, `progress(done, total)` how far it is. KVPoolError if the index
        does not tell who the peers are.
        """

        def came(key: bytes, payload_len: int) -> None:
            self._on_stored(key, payload_len)
            stored(payload_len)

        peers = [node for node in self._members() if node.node != self._own.node]
        wanted = [
            one for one in plan(self._request_lists(peers), self._locate_all) if not self._local.contains(one.key)
        ]

        def counted() -> Iterator[CopyRequest]:
            for done, one in enumerate(wanted):
                progress(done, len(wanted))
                yield one
            progress(len(wanted), len(wanted))

        replicator = self._new_replicator(stop=stop, on_stored=came)
        return replicator.copy(counted(), RateLimiter(lambda: self._rate(bytes_per_s), stop.wait)) == CopyResult.FULL

    def status(self) -> dict[str, Any]:
        """`state` is waiting, copying, done, full (no room without eviction), unneeded, alone or stopped."""
        counts = self._stats.whole(FAMILY)
        return {"state": self._state, "blocks": 0, "bytes": 0, **counts}

    def _run(self) -> None:
        try:
            while not self._ready():
                if self._stop.wait(_POLL_S):
                    break
            for _ in range(_ROUNDS):
                if self._stop.is_set() or self._round():
                    break
                self._stop.wait(_AGAIN_S)
        except Exception:
            log.exception("warming up")
            self._state = "failed"
        if self._stop.is_set():
            self._state = "stopped"
        log.info("warm-up: %s", self.status())

    def _round(self) -> bool:
        """Ask the peers, copy what is missing. True when there is nothing more to do."""
        try:
            peers = [node for node in self._members() if node.node != self._own.node]
        except KVPoolError as e:
            log.info("warm-up: %s", e)
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
        wanted = [one for one in plan(lists, self._locate_all) if not self._local.contains(one.key)]
        before = self._stats.whole(FAMILY).get("blocks", 0)
        self._state = "copying"
        outcome = self._replicator.copy(wanted, RateLimiter(lambda: self._rate(self._bytes_per_s), self._stop.wait))
        copied = self._stats.whole(FAMILY).get("blocks", 0) - before
        if outcome == CopyResult.FULL:
            self._state = "full"
            return True
        if outcome == CopyResult.DONE and not copied:
            self._state = "done"
            return True
        return False

    def _request_lists(self, peers: Sequence[NodeInfo]) -> dict[NodeInfo, HotList]:
        """The lists of a few peers, whichever; those that do not answer are left out."""
        chosen = secrets.SystemRandom().sample(peers, min(_MAX_PEERS, len(peers)))
        lists: dict[NodeInfo, HotList] = {}
        for peer in chosen:
            if self._stop.is_set():
                break
            try:
                link = self._dial(peer, _LIST_S)
                try:
                    lists[peer] = hottest.request_hot_list(link, hottest.MAX_ROWS, time.monotonic() + _LIST_S)
                finally:
                    link.close()
            except (KVPoolError, OSError) as e:
                log.info("warm-up: node %s: %s", peer.node, e)
        return lists

    def _locate_all(self, keys: list[bytes]) -> list[ReplicaLocation | None]:
        found: list[ReplicaLocation | None] = []
        for at in range(0, len(keys), 256):
            found += self._locate(keys[at : at + 256], _LOCATE_S)
        return found

    def _rate(self, bytes_per_s: int) -> float:
        """Bytes per second now."""
        now, requests = time.monotonic(), self._requests()
        if requests != self._seen_requests:
            self._seen_requests = requests
            self._busy_until = now + _BUSY_S
        return bytes_per_s / (_BUSY_SHARE if now < self._busy_until else 1)
