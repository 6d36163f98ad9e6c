"""Purge: remove the blocks of a tenant, of a fingerprint, of some salts, of before some time, or all, from one tier.

parameters: those of `PurgeFilter`, and `tier`: Local (this node's drives) or Shared (for all nodes: one of them does
it).
counts: blocks, bytes (header and payload as stored), quarantined (bad blocks that were kept for a look, and went).

Copies of what was purged that are on their way, from a peer, from or to the shared tier, are refused when they arrive.
What is being read goes on being read: its descriptor stays good. The index is told, routers are told, and copies that
wait for the shared tier are forgotten. An engine's own memory is out of reach: it may store a block again.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvpool.errors import CorruptBlockError, PoolUnavailableError, ProtocolError
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.admin.purge_filter import PurgeFilter
from kvpool_sidecar.storage.shared.compressed import CompressedStore
from kvpool_sidecar.storage.tombstones import PurgeTombstones

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpool_sidecar.admin.context import Context
    from kvpool_sidecar.storage.base import Store
    from kvpool_sidecar.storage.local.store import LocalStore
    from kvpool_sidecar.storage.shared.tier import SharedTier

__all__ = ["Purge"]

_BATCH = 64
_BREATH_S = 0.002  # after each batch: requests come first
_THREADS = 8
_SCAN_POLL_S = 0.2


class Purge:
    """A kind of operation."""

    def __init__(self, secret: bytes, local: LocalStore, shared: SharedTier | None) -> None:
        self._secret = secret
        self._local = local
        self._shared = shared
        self._bars = PurgeTombstones()
        local.tombstones = self._bars
        if shared is not None:
            shared.store.tombstones = self._bars
            if isinstance(shared.store, CompressedStore):
                shared.store.inner.tombstones = self._bars

    def __call__(self, params: Mapping[str, object], context: Context) -> None:
        wish = PurgeFilter.parse(params, self._secret)
        tier = params.get("tier")
        if tier in ("Local", "Shared"):
            self._bars.add(wish.fits, int(time.time() * 1000))
        if tier == "Local":
            while not self._local.scanned:
                if context.cancelled.wait(_SCAN_POLL_S):
                    context.check()
            self._purge(wish, self._local, context, lambda _keys: None)
        elif tier == "Shared":
            if self._shared is None:
                raise ProtocolError("this pool has no shared tier")
            if not self._shared.available:
                raise PoolUnavailableError(f"the shared tier is not available: {self._shared.problem or 'no answer'}")
            self._purge(wish, self._shared.store, context, self._shared.mark_deleted)
        else:
            raise ProtocolError("purge: tier is Local or Shared")

    def _purge(
        self, wish: PurgeFilter, store: Store, context: Context, gone: Callable[[Sequence[bytes]], None]
    ) -> None:
        context.count("blocks", 0)
        context.count("bytes", 0)
        total, seen = store.usage().blocks, 0
        found = store.keys()
        with ThreadPoolExecutor(_THREADS, "purge") as threads:
            while batch := dict(itertools.islice(found, _BATCH)):
                context.check()
                seen += len(batch)
                fitting = threads.map(lambda key: wish.is_everything or self._fits(wish, store, key), batch)
                doomed = [key for key, fits in zip(batch, fitting, strict=True) if fits]
                went = threads.map(lambda key: store.purge([key]), doomed)
                removed = [key for key, n in zip(doomed, went, strict=True) if n]
                gone(removed)
                context.count("blocks", len(removed))
                context.count("bytes", sum(HEADER_BYTES + batch[key] for key in removed))
                context.progress(seen, max(total, seen), "blocks")
                context.cancelled.wait(_BREATH_S)
        context.count("quarantined", store.purge_quarantine(wish.fits))

    def _fits(self, wish: PurgeFilter, store: Store, key: bytes) -> bool:
        try:
            header = store.header(key)
        except CorruptBlockError:
            return True
        except OSError:
            if store is self._local:  # a bad spot on the drive: nobody can use this block
                return True
            raise
        return header is not None and wish.fits(header)
