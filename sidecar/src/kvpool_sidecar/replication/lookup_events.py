"""Asynchronous fan-out of lookup results to listeners: prefetch, popularity and access times.

One thread with a short queue; results that do not fit are dropped. Listeners receive the blocks before the first miss,
at most `MAX_BLOCKS` of a prompt; `observe_sequence` receives up to `MAX_SEQUENCE` block keys, found or not.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvpool.protocol.wire import Tier
from kvpool_sidecar.resilience.worker import BackgroundWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.tenancy.identity import Tenant

__all__ = ["MAX_BLOCKS", "MAX_SEQUENCE", "LookupEvents", "LookupListener"]

MAX_BLOCKS = 256
MAX_SEQUENCE = 1280
_MAX_QUEUED = 64


class LookupListener(Protocol):
    """Receives the tenant, the block keys in the prompt's order, the tier of each, and the time of the reply.

    The time is monotonic. Keys may belong to another tenant whose blocks this tenant may read. Must not block.
    """

    def __call__(self, tenant: bytes, keys: Sequence[bytes], tiers: bytes, asked_at: float, /) -> None: ...


class _Lookup(NamedTuple):
    tenant: Tenant
    block_ids: list[bytes]
    found: list[bytes]  # block keys, as many as tiers
    tiers: bytes
    at: float


class LookupEvents:
    """Thread-safe."""

    def __init__(
        self,
        listeners: Sequence[LookupListener],
        stats: Stats,
        observe_sequence: Callable[[Sequence[bytes], bytes], None] | None = None,
    ) -> None:
        self._observe_sequence = observe_sequence
        self._listeners = listeners
        self._stats = stats
        self._worker = BackgroundWorker("lookup-events", self._deliver, max_queued=_MAX_QUEUED)

    def start(self) -> None:
        """Start the thread."""
        self._worker.start()

    def stop(self) -> None:
        """Stop the thread; queued results are dropped."""
        self._worker.stop()

    @property
    def queued(self) -> int:
        """Results that wait."""
        return self._worker.queued

    def publish(self, tenant: Tenant, block_ids: Sequence[bytes], tiers: bytes, keys: Sequence[bytes]) -> None:
        """Queue the result of one lookup: `tiers` of `block_ids`, and their `keys` at least up to the first miss.

        Returns immediately.
        """
        first_miss = tiers.find(Tier.MISS)
        count = min(len(tiers) if first_miss < 0 else first_miss, MAX_BLOCKS)
        observed = count if self._observe_sequence is None else min(len(block_ids), MAX_SEQUENCE)
        if not observed:
            return
        if self._worker.queued >= _MAX_QUEUED:
            self._stats.add("prefetch", "dropped", count)
            return
        lookup = _Lookup(tenant, list(block_ids[:observed]), list(keys[:count]), tiers[:count], time.monotonic())
        if not self._worker.submit(lookup):
            self._stats.add("prefetch", "dropped", count)

    def _deliver(self, lookup: _Lookup) -> None:
        if lookup.tiers:
            for listener in self._listeners:
                listener(lookup.tenant.tag, lookup.found, lookup.tiers, lookup.at)
        if self._observe_sequence is not None:  # own keys only: the order of another tenant's blocks is not known
            self._observe_sequence(
                [lookup.tenant.block_key(block_id) for block_id in lookup.block_ids], lookup.tenant.tag
            )
