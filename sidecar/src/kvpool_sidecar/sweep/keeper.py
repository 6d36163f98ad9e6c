"""What a sidecar does for a shared directory besides reading and writing: its part in sweeping, and noting uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool_sidecar.evict import SAVE_EVERY_S
from kvpool_sidecar.store.packed import PackedStore
from kvpool_sidecar.store.shared import SharedStore
from kvpool_sidecar.sweep.plan import Limits
from kvpool_sidecar.sweep.sweeper import SharedSweeper, Timing
from kvpool_sidecar.sweep.touches import Touches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvpool.config import PoolConfig
    from kvpool_sidecar.shared_tier import SharedTier
    from kvpool_sidecar.stats import Stats

__all__ = ["SharedKeeper", "make_keeper"]


class SharedKeeper:
    """A sweeper and the touches of one sidecar."""

    def __init__(self, sweeper: SharedSweeper, touches: Touches, store: SharedStore, every_s: float) -> None:
        self.sweeper = sweeper
        self.touches = touches
        self._store = store
        self._every_s = every_s
        store.on_use = self._used

    def start(self) -> None:
        self.sweeper.start()
        self.touches.start()

    def stop(self) -> None:
        """Give the lease back. Waits two seconds at most."""
        self.touches.stop()
        self.sweeper.stop()

    def status(self) -> dict[str, Any]:
        """For /status."""
        return self.sweeper.status()

    def _used(self, key: bytes, used_at: float) -> None:
        if self._store.now - used_at >= self._every_s:
            self.touches.offer(key)


def make_keeper(
    config: PoolConfig, node: str, tier: SharedTier, stats: Stats, models: Callable[[], Iterable[tuple[bytes, str]]]
) -> SharedKeeper | None:
    """None where the shared tier is no directory. `models()` gives fingerprints that engines named, with the model."""
    store = tier.store.inner if isinstance(tier.store, PackedStore) else tier.store
    if config.shared is None or not isinstance(store, SharedStore):
        return None
    cache, shared = config.cache, config.shared
    every_s = min(SAVE_EVERY_S, cache.idle_ttl_s / 4) if cache.idle_ttl_s else SAVE_EVERY_S
    limits = Limits(
        shared.capacity_bytes,
        cache.high_watermark,
        cache.low_watermark,
        cache.tenant_quota_bytes,
        cache.idle_ttl_s,
        cache.max_age_s,
    )
    sweeper = SharedSweeper(
        shared.path,
        config.uid,
        limits,
        store,
        stats,
        node=node,
        timing=Timing(shared.sweep_lease_s, shared.sweep_every_s, shared.sweep_entries_per_s),
        grace_s=every_s,
        available=lambda: tier.available,
        models=models,
        removed=tier.forget,
    )
    return SharedKeeper(sweeper, Touches(store.touch, stats, every_s=every_s), store, every_s)
