"""The store behind the shared tier (G4): a directory that every node mounts, or an object store."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from kvpool_sidecar.blocks.compression import CODECS
from kvpool_sidecar.storage.buckets.options import open_bucket
from kvpool_sidecar.storage.shared.compressed import CompressedStore
from kvpool_sidecar.storage.shared.filesystem import FilesystemStore
from kvpool_sidecar.storage.shared.object_store import ObjectStore, ObjectStoreSettings

if TYPE_CHECKING:
    from kvpool_sidecar.blocks.events import BlockEvents
    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.settings import ServeSettings
    from kvpool_sidecar.storage.base import Store

__all__ = ["open_shared"]


def open_shared(settings: ServeSettings, local: Store, events: BlockEvents, stats: Stats) -> Store | None:
    """None if the pool has no shared tier. ConfigError if it cannot be used as configured.

    Blocks that are promoted into `local` emit BlockPromoted.
    """
    config = settings.config
    if config.fsspec is not None:
        return ObjectStore(
            open_bucket(config.fsspec, settings.object_secret_dir),
            ObjectStoreSettings(
                pool_uid=config.uid,
                max_payload=config.cache.max_block_bytes,
                staging=config.local[0].path,
                capacity_bytes=config.fsspec.capacity_bytes,
                recount_s=float("inf"),  # shared GC reports the usage
            ),
            local=local,
            events=events,
        )
    if config.shared is None:
        return None
    directory = FilesystemStore(
        config.shared.path,
        pool_uid=config.uid,
        capacity_bytes=config.shared.capacity_bytes,
        read_path=settings.read_path(config.shared.path),
        events=events,
    )
    return CompressedStore(
        directory,
        local,
        codec=CODECS[config.cache.compression],
        max_payload=config.cache.max_block_bytes,
        events=events,
        count=functools.partial(stats.add, "compression"),
    )
