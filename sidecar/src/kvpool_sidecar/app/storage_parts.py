"""Builds the tiers of the node: local drives, shared tier, write-back and garbage collection."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool_sidecar.blocks.events import (
    BlockReplicated,
    BlocksEvicted,
    BlocksOpened,
    BlocksRemoved,
    BlockStored,
    BlockUnreplicated,
    DriveIncident,
    SharedBlocksAbsent,
)
from kvpool_sidecar.events.feed import Locality
from kvpool_sidecar.eviction.footprint import block_limit
from kvpool_sidecar.peers.rdma.selection import detect_rdma
from kvpool_sidecar.replication.write_back import WriteBack
from kvpool_sidecar.serving.block_tables import MAX_BYTES
from kvpool_sidecar.shared_gc.controller import create_controller
from kvpool_sidecar.storage.landing.ledger import Share
from kvpool_sidecar.storage.landing.zone import LandingZone
from kvpool_sidecar.storage.local.store import open_local
from kvpool_sidecar.storage.shared.factory import open_shared
from kvpool_sidecar.storage.shared.tier import SharedTier
from kvpool_sidecar.system.memory import memory_limit

if TYPE_CHECKING:
    from kvpool.config import PoolConfig
    from kvpool_sidecar.app.context import AppContext, Component
    from kvpool_sidecar.blocks.events import BlockEvents
    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.events.feed import EventFeed
    from kvpool_sidecar.shared_gc.controller import SharedGcController
    from kvpool_sidecar.storage.local.store import LocalStore

__all__ = ["StorageParts", "build_storage"]

_PLACES_PER_DRIVE = 1024
_DESCRIPTORS_PER_PLACE = 8


@dataclass(frozen=True)
class StorageParts:
    """Tiers of the node. `shared`, `write_back` and `gc` are None where the pool has none."""

    local: LocalStore
    landing: LandingZone
    shared: SharedTier | None
    write_back: WriteBack | None
    gc: SharedGcController | None

    def components(self) -> list[Component]:
        """Return the parts to start once the network is up."""
        return [part for part in (self.landing, self.write_back, self.gc) if part is not None]


def build_storage(context: AppContext) -> StorageParts:
    """Open the tiers. ConfigError or OSError if one cannot be used."""
    settings, config = context.settings, context.config.current
    read_paths = {tier.path: path for tier in config.local if (path := settings.read_path(tier.path)) is not None}
    local = open_local(
        config.local,
        config.cache,
        config.uid,
        tenants=context.config.tenancy.local_limits,
        hints_percent=context.config.tenancy.hints_percent,
        read_paths=read_paths,
        events=context.events,
        read_headers=context.feed is not None,
        max_blocks=block_limit(memory_limit(), config.cache.write_buffer_bytes + _pinned_bytes(config) + MAX_BYTES),
    )
    context.cleanup.callback(local.stop)
    landing = LandingZone(local, _landing_limit(config))
    context.cleanup.callback(landing.stop)
    _count_drive_events(context.events, context.stats)
    if context.feed is not None:
        _feed_events(context.events, context.feed, local)
    store = open_shared(settings, local, context.events, context.stats, lambda: context.config.tenancy)
    if store is None:
        return StorageParts(local, landing, None, None, None)
    shared = SharedTier(store, events=context.events)
    context.cleanup.callback(shared.close)
    gc = create_controller(
        config, context.config.tenancy, settings.node, shared, context.stats, context.fingerprints.known
    )
    if gc is not None:
        context.cleanup.callback(gc.stop)
    return StorageParts(local, landing, shared, _write_back(context, local, shared), gc)


def _pinned_bytes(config: PoolConfig) -> int:
    """Return the bytes of the container's memory limit that are for RDMA."""
    return config.peer.rdma_bytes if detect_rdma()[1] else 0


def _landing_limit(config: PoolConfig) -> Share:
    """Return the zone's size: a place takes a descriptor, and most descriptors are for connections and reads."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    places = min(_PLACES_PER_DRIVE * len(config.local), descriptors // _DESCRIPTORS_PER_PLACE)
    return Share(max(places, 1), config.cache.write_buffer_bytes)


def _write_back(context: AppContext, local: LocalStore, shared: SharedTier) -> WriteBack | None:
    cache = context.config.current.cache
    if cache.write_policy == "LocalOnly":
        return None
    write_back = WriteBack(
        local,
        shared,
        context.stats,
        policy=cache.write_policy,
        max_dirty=cache.write_max_dirty_bytes,
        min_hits=cache.write_min_hits,
    )
    context.cleanup.callback(write_back.stop)
    local.set_pending_copies(write_back)
    context.events.subscribe(BlockUnreplicated, lambda event: write_back.enqueue(*event))
    context.events.subscribe(BlocksRemoved, lambda event: write_back.discard(event.block_keys))
    if cache.write_policy == "WriteThroughSelective":
        context.events.subscribe(BlocksOpened, lambda event: write_back.record_hits(event.block_keys))
    return write_back


def _count_drive_events(events: BlockEvents, stats: Stats) -> None:
    events.subscribe(DriveIncident, lambda event: stats.add("events", event.kind, event.occurrences))
    events.subscribe(BlocksEvicted, lambda event: stats.add("evictions", event.cause, event.blocks))


def _feed_events(events: BlockEvents, feed: EventFeed, local: LocalStore) -> None:
    """Publish changes of the tiers to routers."""

    def on_stored(event: BlockStored) -> None:
        feed.stored(event.block_key, event.header)
        if not local.contains(event.block_key):  # evicted before it was published
            feed.removed([event.block_key], Locality.LOCAL)

    events.subscribe(BlockStored, on_stored)
    events.subscribe(BlockReplicated, lambda event: feed.shared(event.block_key))
    events.subscribe(BlocksRemoved, lambda event: feed.removed(event.block_keys, Locality.LOCAL))
    events.subscribe(SharedBlocksAbsent, lambda event: feed.removed(event.block_keys, Locality.SHARED))
