"""What a sidecar does for a shared tier besides reading and writing: its part in sweeping, and noting uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool_sidecar.evict import SAVE_EVERY_S
from kvpool_sidecar.store.fsspec_bucket import TOUCHES, split_url
from kvpool_sidecar.store.objects import ObjectStore
from kvpool_sidecar.store.packed import PackedStore
from kvpool_sidecar.store.shared import SharedStore
from kvpool_sidecar.sweep.object_sweeper import ObjectSweeper
from kvpool_sidecar.sweep.plan import Limits
from kvpool_sidecar.sweep.sweeper import SharedSweeper, Timing
from kvpool_sidecar.sweep.touches import Touches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvpool.config import CacheConfig, FsspecTier, PoolConfig
    from kvpool.config import SharedTier as DirectoryTier
    from kvpool_sidecar.shared_tier import SharedTier
    from kvpool_sidecar.stats import Stats
    from kvpool_sidecar.sweep.turns import Turns

__all__ = ["SharedKeeper", "make_keeper"]

_OBJECT_EVERY_S = 6 * 3600.0  # noting a use costs a request that is paid for
_COPIES_PER_S = 20.0
_LISTED_PER_S = 10_000.0


class SharedKeeper:
    """A sweeper and the touches of one sidecar."""

    def __init__(self, sweeper: Turns, touches: Touches, store: SharedStore | ObjectStore, every_s: float) -> None:
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
    """None where there is nothing to keep. `models()` gives fingerprints that engines named, with the model."""
    store = tier.store.inner if isinstance(tier.store, PackedStore) else tier.store
    if config.shared is not None and isinstance(store, SharedStore):
        return _of_directory(config, config.shared, node, tier, store, stats, models)
    if config.fsspec is not None and isinstance(store, ObjectStore):
        return _of_bucket(config, config.fsspec, node, tier, store, stats)
    return None


def _limits(cache: CacheConfig, capacity: int) -> Limits:
    return Limits(
        capacity,
        cache.high_watermark,
        cache.low_watermark,
        cache.tenant_quota_bytes,
        cache.idle_ttl_s,
        cache.max_age_s,
    )


def _every_s(cache: CacheConfig, usual: float) -> float:
    """How old a note of the last use may be."""
    return min(usual, cache.idle_ttl_s / 4) if cache.idle_ttl_s else usual


def _of_directory(
    config: PoolConfig,
    shared: DirectoryTier,
    node: str,
    tier: SharedTier,
    store: SharedStore,
    stats: Stats,
    models: Callable[[], Iterable[tuple[bytes, str]]],
) -> SharedKeeper:
    every_s = _every_s(config.cache, SAVE_EVERY_S)
    sweeper = SharedSweeper(
        shared.path,
        config.uid,
        _limits(config.cache, shared.capacity_bytes),
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


def _of_bucket(
    config: PoolConfig, bucket: FsspecTier, node: str, tier: SharedTier, store: ObjectStore, stats: Stats
) -> SharedKeeper:
    every_s = _every_s(config.cache, _OBJECT_EVERY_S)
    limits = _limits(config.cache, bucket.capacity_bytes)._replace(tenant_bytes=0)
    # an object has one time only: where its age since it was made counts, nothing is touched, and nothing is idle
    is_touched = not limits.max_age_s and split_url(bucket.url)[0] in TOUCHES
    sweeper = ObjectSweeper(
        limits if is_touched else limits._replace(idle_s=0.0),
        store,
        stats,
        node=node,
        timing=Timing(bucket.sweep_lease_s, bucket.sweep_every_s, _LISTED_PER_S),
        grace_s=every_s,
        available=lambda: tier.available,
        removed=tier.forget,
    )
    touch = store.touch if is_touched else lambda _key, _every_s: False
    return SharedKeeper(sweeper, Touches(touch, stats, every_s=every_s, per_s=_COPIES_PER_S), store, every_s)
