"""Reads the blocks of a session ahead that continues on this node: peers' blocks are copied, others prefetched."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvpool.protocol.wire import Flag, Tier
from kvpool_sidecar.peers.migration import ReceiveResult
from kvpool_sidecar.resilience.worker import BackgroundWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.replication.prefetch import Prefetcher
    from kvpool_sidecar.storage.local.store import LocalStore
    from kvpool_sidecar.storage.shared.tier import SharedTier

__all__ = ["FAMILY", "SessionReader"]

FAMILY = "resumed"
_MAX_QUEUED = 16
_MAX_BLOCKS = 1024
_SHARED_S = 1.0
_MIN_KEEP_S, _MAX_KEEP_S = 5.0, 60.0  # for which prefetched blocks may wait


class SessionReader:
    """Thread-safe. `receive` copies one block from a peer (DrainTarget.receive). One session at a time, in order."""

    def __init__(
        self,
        local: LocalStore,
        shared: SharedTier | None,
        prefetcher: Prefetcher | None,
        receive: Callable[[bytes, int], bytes],
        stats: Stats,
    ) -> None:
        self._local = local
        self._shared = shared
        self._prefetcher = prefetcher
        self._receive = receive
        self._stats = stats
        self._worker = BackgroundWorker[tuple[bytes, list[bytes], float]](
            "resume", lambda item: self._read(*item), max_queued=_MAX_QUEUED
        )

    def start(self) -> None:
        """Start the thread."""
        self._worker.start()

    def stop(self) -> None:
        """Stop the thread; sessions that wait are dropped."""
        self._worker.stop()

    def resume(self, tenant: bytes, keys: Sequence[bytes], seconds: float) -> None:
        """Queue a session that continues within `seconds`. Returns immediately."""
        if not self._worker.submit((tenant, list(keys[:_MAX_BLOCKS]), seconds)):
            self._stats.add(FAMILY, "dropped")

    def _read(self, tenant: bytes, keys: list[bytes], seconds: float) -> None:
        """Copy blocks of peers until one is nowhere, then prefetch those before it."""
        in_shared = self._in_shared([key for key in keys if not self._local.contains(key)])
        found: list[bytes] = []
        tiers = bytearray()
        for key in keys:
            if self._local.contains(key):
                tier = Tier.LOCAL
            elif key in in_shared:
                tier = Tier.SHARED
            elif self._copied(key):
                continue  # it was just written, so it is in memory
            else:
                break
            found.append(key)
            tiers.append(tier)
        if found and self._prefetcher is not None:
            keep_s = min(max(seconds, _MIN_KEEP_S), _MAX_KEEP_S)
            self._prefetcher.enqueue_resumed(found, bytes(tiers), time.monotonic(), keep_s)
            self._stats.add(FAMILY, "prefetched", len(found))

    def _in_shared(self, missing: list[bytes]) -> set[bytes]:
        if self._shared is None or not self._shared.available or not missing:
            return set()
        there = self._shared.contains_many(missing, _SHARED_S)
        return {key for key, is_there in zip(missing, there, strict=False) if is_there}

    def _copied(self, key: bytes) -> bool:
        result = ReceiveResult(self._receive(key, Flag.EVICT)[0])
        self._stats.add(FAMILY, "copied" if result is ReceiveResult.STORED else result.name.lower())
        return result in (ReceiveResult.STORED, ReceiveResult.HAVE)
