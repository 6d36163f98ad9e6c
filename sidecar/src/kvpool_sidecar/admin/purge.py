"""Operation `purge`: delete blocks by tenant, fingerprint, salt or creation time, or all blocks, from one tier.

Parameters: those of `PurgeFilter`, and `tier`: Local (this node's drives) or Shared (one node purges it for all nodes).
Counts: blocks, bytes (header and payload as stored), and quarantined (deleted files of the quarantine).

Late copies of purged blocks, from a peer or from or to the shared tier, are rejected. A read that has begun completes,
because its descriptor stays valid. The index and the routers are informed, and pending copies to the shared tier are
discarded. The engine's own memory is out of reach: it may store a block again.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvpool.errors import CorruptBlockError, PoolUnavailableError, ProtocolError
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.admin.purge_filter import PurgeFilter
from kvpool_sidecar.storage.tombstones import PurgeTombstones

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpool_sidecar.admin.context import Context
    from kvpool_sidecar.storage.base import Store
    from kvpool_sidecar.storage.local.store import LocalStore
    from kvpool_sidecar.storage.shared.tier import SharedTier

__all__ = ["Purge"]

_BATCH = 64
_PAUSE_S = 0.002  # after each batch, because requests have priority
_THREADS = 8
_SCAN_POLL_INTERVAL_S = 0.2


class Purge:
    """Operation `purge`."""

    def __init__(self, secret: bytes, local: LocalStore, shared: SharedTier | None) -> None:
        self._secret = secret
        self._local = local
        self._shared = shared
        self._tombstones = PurgeTombstones()
        local.set_tombstones(self._tombstones)
        if shared is not None:
            shared.store.set_tombstones(self._tombstones)

    def __call__(self, params: Mapping[str, object], context: Context) -> None:
        purge_filter = PurgeFilter.parse(params, self._secret)
        tier = params.get("tier")
        if tier in ("Local", "Shared"):
            self._tombstones.add(purge_filter.matches, int(time.time() * 1000))
        if tier == "Local":
            while not self._local.scanned:
                if context.cancelled.wait(_SCAN_POLL_INTERVAL_S):
                    context.check()
            self._purge(purge_filter, self._local, context, lambda _keys: None)
        elif tier == "Shared":
            if self._shared is None:
                raise ProtocolError("this pool has no shared tier")
            if not self._shared.available:
                raise PoolUnavailableError(f"the shared tier is not available: {self._shared.problem or 'no answer'}")
            self._purge(purge_filter, self._shared.store, context, self._shared.mark_deleted)
        else:
            raise ProtocolError("purge: tier is Local or Shared")

    def _purge(
        self, purge_filter: PurgeFilter, store: Store, context: Context, on_deleted: Callable[[Sequence[bytes]], None]
    ) -> None:
        context.count("blocks", 0)
        context.count("bytes", 0)
        total, seen = store.usage().blocks, 0
        entries = store.keys()
        with ThreadPoolExecutor(_THREADS, "purge") as threads:
            while batch := dict(itertools.islice(entries, _BATCH)):
                context.check()
                seen += len(batch)
                matching = threads.map(
                    lambda key: purge_filter.is_everything or self._matches(purge_filter, store, key), batch
                )
                selected = [key for key, matches in zip(batch, matching, strict=True) if matches]
                deleted = threads.map(lambda key: store.purge([key]), selected)
                removed = [key for key, n in zip(selected, deleted, strict=True) if n]
                on_deleted(removed)
                context.count("blocks", len(removed))
                context.count("bytes", sum(HEADER_BYTES + batch[key] for key in removed))
                context.set_progress(seen, max(total, seen), "blocks")
                context.cancelled.wait(_PAUSE_S)
        context.count("quarantined", store.purge_quarantine(purge_filter.matches))

    def _matches(self, purge_filter: PurgeFilter, store: Store, key: bytes) -> bool:
        try:
            header = store.header(key)
        except CorruptBlockError:
            return True
        except OSError:
            if store is self._local:  # a bad sector: the block is of no use
                return True
            raise
        return header is not None and purge_filter.matches(header)
