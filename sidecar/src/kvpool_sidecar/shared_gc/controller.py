"""What a sidecar does for a shared tier besides reading and writing: its part in sweeping, and noting uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool_sidecar.eviction import SAVE_EVERY_S
from kvpool_sidecar.shared_gc.access_times import AccessTimes
from kvpool_sidecar.shared_gc.filesystem_collector import FilesystemCollector, Schedule
from kvpool_sidecar.shared_gc.object_collector import ObjectCollector
from kvpool_sidecar.shared_gc.plan import CollectionLimits
from kvpool_sidecar.storage.buckets.fsspec import TOUCHES, split_url
from kvpool_sidecar.storage.shared.compressed import CompressedStore
from kvpool_sidecar.storage.shared.filesystem import SharedStore
from kvpool_sidecar.storage.shared.object_store import ObjectStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvpool.config import PoolConfig
    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.shared_gc.loop import LeasedLoop
    from kvpool_sidecar.storage.shared.tier import SharedTier
    from kvpool_sidecar.tenancy.mapping import Tenancy

__all__ = ["GcConfig", "SharedGcController", "make_keeper", "rules_of"]

_OBJECT_EVERY_S = 6 * 3600.0  # noting a use costs a request that is paid for
_COPIES_PER_S = 20.0
_LISTED_PER_S = 10_000.0


class GcConfig(NamedTuple):
    """What a configuration says of a shared tier."""

    limits: CollectionLimits
    every_s: float  # a note of the last use may be as old
    touched: bool = True  # are uses noted at all?


class SharedGcController:
    """A sweeper and the touches of one sidecar."""

    def __init__(
        self,
        rules: GcConfig,
        make_sweeper: Callable[[GcConfig], LeasedLoop],
        store: SharedStore | ObjectStore,
        stats: Stats,
        *,
        per_s: float = 500.0,
    ) -> None:
        self._rules = rules
        self._store = store
        self.sweeper = make_sweeper(rules)
        self.touches = AccessTimes(self._touch, stats, every_s=rules.every_s, per_s=per_s)
        store.on_use = self._used

    def start(self) -> None:
        self.sweeper.start()
        self.touches.start()

    def stop(self) -> None:
        """Give the lease back. Waits two seconds at most."""
        self.touches.stop()
        self.sweeper.stop()

    def reconfigure(self, config: PoolConfig, tenancy: Tenancy) -> None:
        """Another capacity, other quotas and ages. Whichever sidecar sweeps follows them with its next turn."""
        rules = rules_of(config, tenancy)
        if rules is None:
            return
        self._rules = rules
        self._store.limit(rules.limits.capacity)
        self.touches.every_s = rules.every_s
        self.sweeper.limit(rules.limits, rules.every_s)

    def status(self) -> dict[str, Any]:
        """For /status."""
        return self.sweeper.status()

    def _used(self, key: bytes, used_at: float) -> None:
        if self._store.now - used_at >= self._rules.every_s:
            self.touches.offer(key)

    def _touch(self, key: bytes, every_s: float) -> bool:
        return self._rules.touched and self._store.touch(key, every_s)


def make_keeper(
    config: PoolConfig,
    tenancy: Tenancy,
    node: str,
    tier: SharedTier,
    stats: Stats,
    models: Callable[[], Iterable[tuple[bytes, str]]],
) -> SharedGcController | None:
    """None where there is nothing to keep. `models()` gives fingerprints that engines named, with the model."""
    store = tier.store.inner if isinstance(tier.store, CompressedStore) else tier.store
    rules = rules_of(config, tenancy)
    if rules is None:
        return None
    if config.shared is not None and isinstance(store, SharedStore):
        shared = config.shared

        def sweeper(rules: GcConfig) -> LeasedLoop:
            return FilesystemCollector(
                shared.path,
                config.uid,
                rules.limits,
                store,
                stats,
                node=node,
                timing=Schedule(shared.sweep_lease_s, shared.sweep_every_s, shared.sweep_entries_per_s),
                grace_s=rules.every_s,
                available=lambda: tier.available,
                models=models,
                removed=tier.forget,
            )

        return SharedGcController(rules, sweeper, store, stats)
    if config.fsspec is not None and isinstance(store, ObjectStore):
        bucket, objects = config.fsspec, store

        def object_sweeper(rules: GcConfig) -> LeasedLoop:
            return ObjectCollector(
                rules.limits,
                objects,
                stats,
                node=node,
                timing=Schedule(bucket.sweep_lease_s, bucket.sweep_every_s, _LISTED_PER_S),
                grace_s=rules.every_s,
                available=lambda: tier.available,
                removed=tier.forget,
            )

        return SharedGcController(rules, object_sweeper, store, stats, per_s=_COPIES_PER_S)
    return None


def rules_of(config: PoolConfig, tenancy: Tenancy) -> GcConfig | None:
    """None without a shared tier."""
    cache = config.cache
    limits = CollectionLimits(
        high_percent=cache.high_watermark,
        low_percent=cache.low_watermark,
        idle_s=cache.idle_ttl_s,
        max_age_s=cache.max_age_s,
    )
    if config.shared is not None:
        limits = limits._replace(
            capacity=config.shared.capacity_bytes, tenant_bytes=cache.tenant_quota_bytes, tenants=tenancy.shared()
        )
        return GcConfig(limits, _every_s(limits, SAVE_EVERY_S))
    if config.fsspec is not None:
        # an object has one time only: where its age since it was made counts, nothing is touched, and nothing is idle
        touched = not limits.max_age_s and split_url(config.fsspec.url)[0] in TOUCHES
        every_s = _every_s(limits, _OBJECT_EVERY_S)
        idle_s = limits.idle_s if touched else 0.0
        return GcConfig(limits._replace(capacity=config.fsspec.capacity_bytes, idle_s=idle_s), every_s, touched)
    return None


def _every_s(limits: CollectionLimits, usual: float) -> float:
    """How old a note of the last use may be."""
    idle = [one.idle_s for one in (limits.of(b""), *limits.tenants.values()) if one.idle_s]
    return min([usual, *(one / 4 for one in idle)])
