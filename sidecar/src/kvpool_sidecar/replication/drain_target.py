"""The other side of a drain: this node takes copies of blocks that a node which leaves has asked it to take.

Each is read from whoever the index says has it, by the way of warm-up: received into an unnamed file, header and
checksum verified, then named and announced. A node that leaves itself takes nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from typing import TYPE_CHECKING

from kvpool.errors import CorruptBlockError, KVPoolError, TierFullError
from kvpool.protocol import wire
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.peers.fetch import fetch_block
from kvpool_sidecar.peers.migration import Headroom, ReceiveResult
from kvpool_sidecar.resilience.rate_limiter import RateLimiter
from kvpool_sidecar.storage.base import CommitOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.index.resolver import ReplicaLocation
    from kvpool_sidecar.peers.connection import PeerConnection
    from kvpool_sidecar.storage.local.store import LocalStore

__all__ = ["FAMILY", "DrainTarget"]

log = logging.getLogger(__name__)

FAMILY = "adopted"
_AT_ONCE = 4
_LOCATE_S = 1.0
_DIAL_S = 2.0
_UNBOUNDED = 1e12  # who asks has its own pace


class DrainTarget:
    """Thread-safe. `leaving` says whether this node is drained itself."""

    def __init__(
        self,
        local: LocalStore,
        locate: Callable[[Sequence[bytes], float], list[ReplicaLocation | None]],
        dial: Callable[[NodeInfo, float], PeerConnection],
        *,
        max_block_bytes: int,
        leaving: Callable[[], bool],
        stats: Stats,
        on_stored: Callable[[bytes, int], None],
        on_corrupt: Callable[[bytes], None],
    ) -> None:
        self._local = local
        self._locate = locate
        self._dial = dial
        self._max_block_bytes = max_block_bytes
        self._is_draining = leaving
        self._stats = stats
        self._on_stored = on_stored
        self._on_corrupt = on_corrupt
        self._slots = threading.Semaphore(_AT_ONCE)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._connections: defaultdict[NodeInfo, list[PeerConnection]] = defaultdict(list)

    def headroom(self, _request: bytes, _flags: int) -> bytes:
        """Answer to HEADROOM."""
        return Headroom(self._local.headroom_bytes, self._local.coldest_idle_s(), self._is_draining()).pack()

    def receive(self, key: bytes, flags: int) -> bytes:
        """Answer to RECEIVE; returns when the block is there, or is not to be."""
        if self._local.contains(key):
            return bytes([ReceiveResult.HAVE])
        if self._is_draining() or self._stop.is_set():
            return bytes([ReceiveResult.REFUSED])
        if not self._slots.acquire(blocking=False):
            return bytes([ReceiveResult.BUSY])
        try:
            result = self._copy(key, evict=bool(flags & wire.Flag.EVICT))
        except (KVPoolError, OSError) as e:
            log.info("taking over %s: %s", key.hex()[:16], e)
            result = ReceiveResult.FULL if isinstance(e, TierFullError) else ReceiveResult.ABSENT
        finally:
            self._slots.release()
        self._stats.add(FAMILY, "blocks" if result == ReceiveResult.STORED else result.name.lower())
        return bytes([result])

    def stop(self) -> None:
        """Take nothing more."""
        self._stop.set()
        with self._lock:
            links = [link for some in self._connections.values() for link in some]
            self._connections.clear()
        for link in links:
            link.close()

    def _copy(self, key: bytes, *, evict: bool) -> ReceiveResult:
        (found,) = self._locate([key], _LOCATE_S)
        if found is None:
            return ReceiveResult.ABSENT
        if not 0 < found.payload_len <= self._max_block_bytes:
            return ReceiveResult.REFUSED
        if not evict and self._local.headroom_for(key) < HEADER_BYTES + found.payload_len:
            return ReceiveResult.FULL
        link = self._connection(found.peer)
        try:
            outcome = fetch_block(
                link, key, found.payload_len, self._local, RateLimiter(lambda: _UNBOUNDED, self._stop.wait)
            )
        except (CorruptBlockError, TierFullError) as e:  # the link is in order
            self._release(found.peer, link)
            if isinstance(e, CorruptBlockError):
                log.warning("node %s gave a block that is not right: %s", found.peer.node, e)
                self._on_corrupt(key)
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
        self._on_stored(key, found.payload_len)
        return ReceiveResult.STORED

    def _connection(self, peer: NodeInfo) -> PeerConnection:
        while True:
            with self._lock:
                links = self._connections.get(peer)
                link = links.pop() if links else None
            if link is None:
                return self._dial(peer, _DIAL_S)
            if link.alive:
                return link
            link.close()

    def _release(self, peer: NodeInfo, link: PeerConnection) -> None:
        with self._lock:
            if not self._stop.is_set():
                self._connections[peer].append(link)
                return
        link.close()
