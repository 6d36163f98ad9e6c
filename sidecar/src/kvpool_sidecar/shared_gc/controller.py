"""A sidecar's part in shared GC: the collector and the access times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool_sidecar.blocks.events import SharedBlockOpened
from kvpool_sidecar.eviction import PERSIST_EVERY_S
from kvpool_sidecar.shared_gc.access_times import AccessTimes
from kvpool_sidecar.shared_gc.filesystem_collector import FilesystemCollector
from kvpool_sidecar.shared_gc.loop import CollectorSettings, Schedule
from kvpool_sidecar.shared_gc.object_collector import ObjectCollector
from kvpool_sidecar.shared_gc.plan import CollectionLimits
from kvpool_sidecar.storage.base import WrapperStore
from kvpool_sidecar.storage.buckets.fsspec import TOUCHES, split_url
from kvpool_sidecar.storage.shared.filesystem import FilesystemStore
from kvpool_sidecar.storage.shared.object_store import ObjectStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvpool.config import PoolConfig
    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.shared_gc.loop import LeasedLoop
    from kvpool_sidecar.storage.shared.tier import SharedTier
    from kvpool_sidecar.tenancy.mapping import Tenancy

__all__ = ["GcConfig", "SharedGcController", "create_controller", "gc_config"]

_OBJECT_EVERY_S = 6 * 3600.0  # noting a use costs a request that is paid for
_COPIES_PER_S = 20.0
_LISTED_PER_S = 10_000.0


class GcConfig(NamedTuple):
    """Shared GC settings derived from a configuration."""

    limits: CollectionLimits
    access_time_precision_s: float  # a note of the last use may be as old
    tracks_access: bool = True  # are uses noted at all?


class SharedGcController:
    """Collector and access times of one sidecar."""

    def __init__(
        self,
        rules: GcConfig,
        create_collector: Callable[[GcConfig], LeasedLoop],
        store: FilesystemStore | ObjectStore,
        stats: Stats,
        *,
        per_s: float = 500.0,
    ) -> None:
        self._config = rules
        self._store = store
        self.collector = create_collector(rules)
        self.access_times = AccessTimes(self._touch, stats, every_s=rules.access_time_precision_s, per_s=per_s)
        store.events.subscribe(SharedBlockOpened, self._on_opened)

    def start(self) -> None:
        self.collector.start()
        self.access_times.start()

    def stop(self) -> None:
        """Release the lease. Waits at most two seconds."""
        self.access_times.stop()
        self.collector.stop()

    def reconfigure(self, config: PoolConfig, tenancy: Tenancy) -> None:
        """Apply another capacity, quotas and ages. The holder of the lease follows at its next step."""
        rules = gc_config(config, tenancy)
        if rules is None:
            return
        self._config = rules
        self._store.set_capacity(rules.limits.capacity)
        self.access_times.every_s = rules.access_time_precision_s
        self.collector.reconfigure(rules.limits, rules.access_time_precision_s)

    def status(self) -> dict[str, Any]:
        """For /status."""
        return self.collector.status()

    def _on_opened(self, event: SharedBlockOpened) -> None:
        if self._store.now - event.used_at >= self._config.access_time_precision_s:
            self.access_times.record(event.block_key)

    def _touch(self, block_key: bytes, every_s: float) -> bool:
        return self._config.tracks_access and self._store.touch(block_key, every_s)


def create_controller(
    config: PoolConfig,
    tenancy: Tenancy,
    node: str,
    tier: SharedTier,
    stats: Stats,
    models: Callable[[], Iterable[tuple[bytes, str]]],
) -> SharedGcController | None:
    """Return None without a shared tier. `models()` yields fingerprints that engines reported, with the model."""
    store = tier.store
    while isinstance(store, WrapperStore):
        store = store.inner
    rules = gc_config(config, tenancy)
    if rules is None:
        return None
    if config.shared is not None and isinstance(store, FilesystemStore):
        shared = config.shared

        def sweeper(rules: GcConfig) -> LeasedLoop:
            return FilesystemCollector(
                shared.path,
                config.uid,
                rules.limits,
                store,
                stats,
                CollectorSettings(
                    schedule=Schedule(shared.sweep_lease_s, shared.sweep_every_s, shared.sweep_entries_per_s),
                    node=node,
                    grace_s=rules.access_time_precision_s,
                    available=lambda: tier.available,
                    removed=tier.mark_absent,
                ),
                models=models,
            )

        return SharedGcController(rules, sweeper, store, stats)
    if config.fsspec is not None and isinstance(store, ObjectStore):
        bucket, objects = config.fsspec, store

        def object_sweeper(rules: GcConfig) -> LeasedLoop:
            return ObjectCollector(
                rules.limits,
                objects,
                stats,
                CollectorSettings(
                    schedule=Schedule(bucket.sweep_lease_s, bucket.sweep_every_s, _LISTED_PER_S),
                    node=node,
                    grace_s=rules.access_time_precision_s,
                    available=lambda: tier.available,
                    removed=tier.mark_absent,
                ),
            )

        return SharedGcController(rules, object_sweeper, store, stats, per_s=_COPIES_PER_S)
    return None


def gc_config(config: PoolConfig, tenancy: Tenancy) -> GcConfig | None:
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
            capacity=config.shared.capacity_bytes,
            tenant_bytes=cache.tenant_quota_bytes,
            tenants=tenancy.shared_limits(),
        )
        return GcConfig(limits, _every_s(limits, PERSIST_EVERY_S))
    if config.fsspec is not None:
        # an object has one time only: where its age since it was made counts, nothing is touched, and nothing is idle
        touched = not limits.max_age_s and split_url(config.fsspec.url)[0] in TOUCHES
        every_s = _every_s(limits, _OBJECT_EVERY_S)
        idle_s = limits.idle_s if touched else 0.0
        return GcConfig(limits._replace(capacity=config.fsspec.capacity_bytes, idle_s=idle_s), every_s, touched)
    return None


def _every_s(limits: CollectionLimits, usual: float) -> float:
    """Return the precision of access times that the limits need."""
    idle = [one.idle_s for one in (limits.of(b""), *limits.tenants.values()) if one.idle_s]
    return min([usual, *(one / 4 for one in idle)])
