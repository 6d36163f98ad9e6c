"""Verifies blocks that clients reported as corrupt, on every tier. A report alone never takes a block offline."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError
from kvpool_sidecar.resilience.bounded_cache import BoundedCache
from kvpool_sidecar.resilience.worker import BackgroundWorker

if TYPE_CHECKING:
    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.index.resolver import BlockResolver
    from kvpool_sidecar.peers.connection import PeerDialer
    from kvpool_sidecar.storage.base import Store
    from kvpool_sidecar.storage.shared.tier import SharedTier

__all__ = ["BlockVerifier"]

_MAX_QUEUED = 256
_VERIFIED_S = 60.0
_PEER_TIMEOUT_S = 5.0


class BlockVerifier:
    """One thread, a bounded queue. A verified block is not read again for a minute, however often it is reported."""

    def __init__(
        self, local: Store, shared: SharedTier | None, peers: BlockResolver, dial: PeerDialer, stats: Stats
    ) -> None:
        self._local = local
        self._shared = shared
        self._peers = peers
        self._dial = dial
        self._stats = stats
        self._verified: BoundedCache[bytes, None] = BoundedCache(_MAX_QUEUED, _VERIFIED_S)  # used by the thread only
        self._worker = BackgroundWorker("block-verifier", self._process, max_queued=_MAX_QUEUED)

    def start(self) -> None:
        """Start the thread."""
        self._worker.start()

    def stop(self) -> None:
        """Stop the thread; queued reports are dropped."""
        self._worker.stop()

    def report(self, key: bytes) -> None:
        """Queue a block that was reported as corrupt. Returns immediately."""
        if not self._worker.submit(key):
            self._stats.add("reports", "dropped")

    def _process(self, key: bytes) -> None:
        if key not in self._verified:
            self._verified.put(key, None)
            self._verify(key)

    def _verify(self, key: bytes) -> None:
        self._stats.add("reports", "checked")
        if self._local.contains(key) and not self._local.verify(key):
            self._stats.add("reports", "corrupt")
        if self._shared is not None and self._shared.contains_many([key], 1.0)[0] and not self._shared.verify(key):
            self._stats.add("reports", "corrupt")
        found = self._peers.locate([key], 1.0)[0]
        if found is None:
            return
        try:
            link = self._dial(found.peer, _PEER_TIMEOUT_S)
        except (KVPoolError, OSError):
            return
        try:
            link.request([key], verify=True)  # the peer verifies its own copy, and quarantines it
            if link.response_size(time.monotonic() + _PEER_TIMEOUT_S) == 0:
                self._stats.add("reports", "corrupt")
                self._peers.blacklist(key, found.number)
        except (KVPoolError, OSError):
            self._peers.blacklist(key, found.number)
        finally:
            link.close()
