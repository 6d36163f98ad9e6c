"""Receiving side of a drain: fetches copies of blocks at the request of a node that is drained.

Each block is fetched from a node that has it according to the index, as in warm-up: received into an unnamed file,
header and checksum verified, then published and announced. A node that is drained itself receives nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from typing import TYPE_CHECKING

from kvpool.errors import CorruptBlockError, KVPoolError, TierFullError
from kvpool.protocol import wire
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.blocks.events import BlockPromoted, CorruptBlockReported
from kvpool_sidecar.peers.fetch import fetch_block
from kvpool_sidecar.peers.migration import Headroom, ReceiveResult
from kvpool_sidecar.resilience.rate_limiter import RateLimiter
from kvpool_sidecar.storage.base import CommitOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.blocks.events import BlockEvents
    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.peers.connection import PeerConnection
    from kvpool_sidecar.replication.peer_copy import PeerAccess
    from kvpool_sidecar.storage.local.store import LocalStore

__all__ = ["FAMILY", "DrainTarget"]

log = logging.getLogger(__name__)

FAMILY = "adopted"
_MAX_CONCURRENT = 4
_LOCATE_S = 1.0
_DIAL_S = 2.0
_UNBOUNDED = 1e12  # the requesting node limits the rate


class DrainTarget:
    """Thread-safe. `is_draining` returns whether this node is drained itself. Emits BlockPromoted."""

    def __init__(
        self,
        local: LocalStore,
        peers: PeerAccess,
        events: BlockEvents,
        stats: Stats,
        *,
        max_block_bytes: int,
        is_draining: Callable[[], bool],
    ) -> None:
        self._local = local
        self._peers = peers
        self._events = events
        self._stats = stats
        self._max_block_bytes = max_block_bytes
        self._is_draining = is_draining
        self._slots = threading.Semaphore(_MAX_CONCURRENT)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._connections: defaultdict[NodeInfo, list[PeerConnection]] = defaultdict(list)

    def headroom(self, _request: bytes, _flags: int) -> bytes:
        """Return the response to HEADROOM."""
        return Headroom(self._local.headroom_bytes, self._local.coldest_idle_s(), self._is_draining()).pack()

    def receive(self, key: bytes, flags: int) -> bytes:
        """Fetch the block and return the response to RECEIVE: a ReceiveResult."""
        if self._local.contains(key):
            return bytes([ReceiveResult.HAVE])
        if self._is_draining() or self._stop.is_set():
            return bytes([ReceiveResult.REFUSED])
        if not self._slots.acquire(blocking=False):
            return bytes([ReceiveResult.BUSY])
        try:
            result = self._copy(key, evict=bool(flags & wire.Flag.EVICT))
        except (KVPoolError, OSError) as e:
            log.info("fetching block %s for a drained node failed: %s", key.hex()[:16], e)
            result = ReceiveResult.FULL if isinstance(e, TierFullError) else ReceiveResult.ABSENT
        finally:
            self._slots.release()
        self._stats.add(FAMILY, "blocks" if result == ReceiveResult.STORED else result.name.lower())
        return bytes([result])

    def stop(self) -> None:
        """Stop receiving, and close the connections."""
        self._stop.set()
        with self._lock:
            links = [link for some in self._connections.values() for link in some]
            self._connections.clear()
        for link in links:
            link.close()

    def _copy(self, key: bytes, *, evict: bool) -> ReceiveResult:
        (found,) = self._peers.resolver.locate([key], _LOCATE_S)
        if found is None:
            return ReceiveResult.ABSENT
        if not 0 < found.payload_len <= self._max_block_bytes:
            return ReceiveResult.REFUSED
        if not evict and self._local.largest_fit() < HEADER_BYTES + found.payload_len:
            return ReceiveResult.FULL
        link = self._connection(found.peer)
        try:
            outcome = fetch_block(
                link, key, found.payload_len, self._local, RateLimiter(lambda: _UNBOUNDED, self._stop.wait)
            )
        except (CorruptBlockError, TierFullError) as e:  # the connection can be reused
            self._release(found.peer, link)
            if isinstance(e, CorruptBlockError):
                log.warning("node %s sent a corrupt block: %s", found.peer.node, e)
                self._events.emit(CorruptBlockReported(key))
            raise
        except BaseException:
            link.close()
            raise
        self._release(found.peer, link)
        if outcome is None:
            return ReceiveResult.ABSENT
        if outcome is CommitOutcome.ALREADY_PRESENT:
            return ReceiveResult.HAVE
        self._stats.add(FAMILY, "bytes", HEADER_BYTES + found.payload_len)
        self._events.emit(BlockPromoted(key, found.payload_len))
        return ReceiveResult.STORED

    def _connection(self, peer: NodeInfo) -> PeerConnection:
        while True:
            with self._lock:
                links = self._connections.get(peer)
                link = links.pop() if links else None
            if link is None:
                return self._peers.dial(peer, _DIAL_S)
            if link.alive:
                return link
            link.close()

    def _release(self, peer: NodeInfo, link: PeerConnection) -> None:
        with self._lock:
            if not self._stop.is_set():
                self._connections[peer].append(link)
                return
        link.close()
