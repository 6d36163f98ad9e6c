"""The store behind the shared tier (G4): a directory that every node mounts, or an object store."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from kvpool.protocol.keys import tenant_tag
from kvpool_sidecar.blocks.compression import CODECS
from kvpool_sidecar.blocks.encryption import stored_len
from kvpool_sidecar.settings import SHARED_KEYS
from kvpool_sidecar.storage.buckets.options import open_bucket
from kvpool_sidecar.storage.shared.compressed import CompressedStore
from kvpool_sidecar.storage.shared.encrypted import EncryptedStore
from kvpool_sidecar.storage.shared.filesystem import FilesystemStore
from kvpool_sidecar.storage.shared.key_ring import KeyRing, TenantTags
from kvpool_sidecar.storage.shared.object_store import ObjectStore, ObjectStoreSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.blocks.events import BlockEvents
    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.settings import ServeSettings
    from kvpool_sidecar.storage.base import Store
    from kvpool_sidecar.tenancy.mapping import Tenancy

__all__ = ["open_shared"]


def open_shared(
    settings: ServeSettings, local: Store, events: BlockEvents, stats: Stats, tenancy: Callable[[], Tenancy]
) -> Store | None:
    """None if the pool has no shared tier. ConfigError if it cannot be used as configured.

    Blocks that are promoted into `local` emit BlockPromoted. `tenancy` returns the current tenants.
    """
    config = settings.config
    max_payload = config.cache.max_block_bytes
    tier = config.shared or config.fsspec
    if tier is None:
        return None
    is_encrypted = tier.encryption != "None"

    def encrypted(inner: Store) -> Store:
        if not is_encrypted:
            return inner
        ring = KeyRing(
            functools.partial(settings.secret_file, SHARED_KEYS),
            TenantTags(functools.partial(tenant_tag, settings.secret), lambda: tenancy().tags),
        )
        count = functools.partial(stats.add, "encryption")
        return EncryptedStore(inner, local, ring, max_payload=max_payload, events=events, count=count)

    if config.fsspec is not None:
        objects = ObjectStore(
            open_bucket(config.fsspec, settings.object_secret_dir),
            ObjectStoreSettings(
                pool_uid=config.uid,
                max_payload=stored_len(max_payload) if is_encrypted else max_payload,
                staging=config.local[0].path,
                capacity_bytes=config.fsspec.capacity_bytes,
                recount_s=float("inf"),  # shared GC reports the usage
                is_encrypted=is_encrypted,
            ),
            local=local,
            events=events,
        )
        return encrypted(objects)
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
        encrypted(directory),
        local,
        codec=CODECS[config.cache.compression],
        max_payload=max_payload,
        events=events,
        count=functools.partial(stats.add, "compression"),
    )
