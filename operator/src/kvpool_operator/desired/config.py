"""Conversion of a pool's spec to the configuration of sidecars and clients, and its rendering as text and digests."""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.config import (
    CacheConfig,
    ClientConfig,
    Deadlines,
    EventsConfig,
    FsspecTier,
    HintsConfig,
    IndexConfig,
    LocalTier,
    PeerConfig,
    PoolConfig,
    SharedTier,
    digest,
    dumps,
    static_part,
)
from kvpool_operator.api.duration import to_ms
from kvpool_operator.api.fields import ADMIN_PORT, HTTP_PORT, INDEX_PORT
from kvpool_operator.api.quantity import to_bytes
from kvpool_operator.desired import names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool.config import TenantConfig
    from kvpool_operator.api.v1alpha1 import KVCachePool, ObjectStoreTier
    from kvpool_operator.api.v1alpha1 import LocalTier as LocalSpec

__all__ = [
    "MOUNTS",
    "RenderedConfig",
    "deadlines",
    "in_pod",
    "managed_index_url",
    "render_config",
    "to_client_config",
    "to_pool_config",
    "write_buffer_bytes",
]

_MIB = 1 << 20
_HEADER_BYTES = 4096  # of a block's file
VOLUME_DIR = "kvpool"
MOUNTS = "/tiers"
"""Directory where the sidecar pod mounts the tiers, each under its name."""


def in_pod(tier: str) -> str:
    """Return the mount path of a tier in the sidecar pod."""
    return f"{MOUNTS}/{tier}"


def to_pool_config(
    pool: KVCachePool,
    *,
    pool_id: str,
    index_url: str,
    index_username: str = "kvpool",
    allowed_namespaces: Sequence[str] = ("*",),
    tenants: Sequence[TenantConfig] = (),
    tier_path: Callable[[str], str] = in_pod,
) -> PoolConfig:
    """Return the content of `pool.json`.

    `pool_id` names the pool's data (config.uid). `index_url` holds no password; empty means no index.
    `allowed_namespaces` is what the selector came to, `tenants` what the KVCacheTenants came to. `tier_path` maps a
    tier's name to its directory.
    """
    spec = pool.spec
    shared = next((t for t in spec.tiers if t.shared is not None), None)
    objects = next((_objects(t.name, t.object_store) for t in spec.tiers if t.object_store is not None), None)
    eviction = spec.cache.eviction
    return PoolConfig(
        pool=pool.metadata.name,
        namespace=pool.metadata.namespace,
        uid=pool_id,
        local=tuple(_local(t.name, t.local, tier_path) for t in spec.tiers if t.local is not None),
        shared=(
            SharedTier(
                name=shared.name,
                path=tier_path(shared.name),
                capacity_bytes=to_bytes(shared.shared.capacity),
                encryption=shared.shared.encryption,
            )
            if shared is not None and shared.shared is not None
            else None
        ),
        fsspec=objects,
        index=IndexConfig(
            url=index_url,
            username=index_username if index_url else "",
            lookup_timeout_ms=to_ms(spec.index.lookup_timeout),
            rebuild_per_s=spec.index.rebuild_rate,
            forget_after_s=to_ms(spec.index.node_expiry) // 1000,
        ),
        cache=CacheConfig(
            block_tokens=spec.cache.block_tokens,
            max_block_bytes=to_bytes(spec.cache.max_block_size),
            write_policy=spec.cache.write.policy,
            write_max_dirty_bytes=to_bytes(spec.cache.write.max_dirty),
            write_min_hits=spec.cache.write.min_hits,
            write_buffer_bytes=write_buffer_bytes(pool),
            eviction_policy=eviction.policy,
            admission=spec.cache.admission.policy,
            admission_percent=round(float(spec.cache.admission.drive_writes_per_day) * 100),
            idle_ttl_s=-(-to_ms(spec.cache.ttl.idle) // 1000),
            max_age_s=-(-to_ms(spec.cache.ttl.max_age) // 1000),
            tenant_quota_bytes=to_bytes(spec.tenancy.default_quota.capacity),
            pinned_percent=spec.cache.pinning.capacity_percent,
            pinned_min_uses=spec.cache.pinning.min_uses,
            high_watermark=eviction.high_watermark,
            low_watermark=eviction.low_watermark,
            compression=spec.cache.compression.codec,
            prefetch_bytes=to_bytes(spec.cache.prefetch.max_bytes),
            warm_up_bytes_per_s=to_bytes(spec.cache.warm_up.bandwidth),
        ),
        peer=PeerConfig(
            port=spec.transport.port,
            protocol=spec.transport.protocol,
            streams=spec.transport.streams,
            encryption=spec.transport.encryption,
            rdma_bytes=to_bytes(spec.transport.rdma.memory),
        ),
        deadlines=deadlines(pool),
        events=EventsConfig(
            enabled=spec.events.enabled,
            port=spec.events.port,
            replay_port=spec.events.replay_port,
            topic=spec.events.topic,
            hashes=spec.events.hashes,
            token_revision=spec.events.token_revision,
            authentication=spec.events.authentication,
            prompt_tokens_of=spec.events.prompt_tokens_of or "",
        ),
        hints=HintsConfig(
            enabled=spec.hints.enabled,
            share_percent=spec.hints.share,
            max_keep_s=-(-to_ms(spec.hints.max_keep) // 1000),
            token_revision=spec.hints.token_revision,
        ),
        salt_tags=spec.tenancy.salt_tags,
        allowed_namespaces=tuple(allowed_namespaces),
        tenants=tuple(tenants),
        http_port=HTTP_PORT,
        admin_port=ADMIN_PORT,
        generation=pool.metadata.generation,
    )


def to_client_config(pool: KVCachePool) -> ClientConfig:
    """Return the configuration of the client in injected pods. The sidecar sends it the current deadlines."""
    breaker = pool.spec.fail_open.breaker
    return ClientConfig(
        pool=pool.key,
        deadlines=Deadlines(breaker_failures=breaker.failures, breaker_cooldown_ms=to_ms(breaker.cooldown)),
    )


def deadlines(pool: KVCachePool) -> Deadlines:
    """Return the deadlines of spec.failOpen."""
    f = pool.spec.fail_open
    return Deadlines(
        lookup_ms=to_ms(f.lookup_deadline),
        load_min_ms=to_ms(f.load_deadline),
        load_expected_mb_s=max(1, to_bytes(f.expected_bandwidth) // 1_000_000),
        store_ms=to_ms(f.store_deadline),
        breaker_failures=f.breaker.failures,
        breaker_cooldown_ms=to_ms(f.breaker.cooldown),
    )


def _objects(name: str, tier: ObjectStoreTier) -> FsspecTier:
    return FsspecTier(
        name=name,
        url=tier.url,
        endpoint=tier.endpoint or "",
        region=tier.region or "",
        capacity_bytes=to_bytes(tier.capacity),
        encryption=tier.encryption,
    )


def _local(name: str, tier: LocalSpec, tier_path: Callable[[str], str]) -> LocalTier:
    reserve = tier.reserve_free
    percent = int(reserve[:-1]) if reserve.endswith("%") else 0
    return LocalTier(
        name=name,
        # the sidecar owns a directory in the volume, because only root could change the owner of the volume itself
        path=tier_path(name) if tier.path is not None else f"{tier_path(name)}/{VOLUME_DIR}",
        is_ephemeral=tier.path is None,
        capacity_bytes=tier.capacity_bytes,
        reserve_free_percent=percent,
        dedicated_filesystem=tier.dedicated_filesystem,
        reserve_free_bytes=0 if reserve.endswith("%") else to_bytes(reserve),
    )


def write_buffer_bytes(pool: KVCachePool) -> int:
    """Return the memory for unfinished writes on each node: at least what lets one tenant write the largest block."""
    largest = to_bytes(pool.spec.cache.max_block_size)
    needed = -(-(largest + _HEADER_BYTES) * 4 // (3 * _MIB)) * _MIB  # a tenant may use three quarters
    return max(to_bytes(pool.spec.cache.write.buffer), needed)


def managed_index_url(pool: KVCachePool) -> str:
    """Return the URL of the managed index, without a password."""
    scheme = "rediss" if pool.spec.index.is_encrypted else "redis"
    return f"{scheme}://{names.index(pool.metadata.name)}.{pool.metadata.namespace}.svc:{INDEX_PORT}/0"


@dataclass(frozen=True)
class RenderedConfig:
    """The configuration of a pool's sidecars, rendered once per reconcile."""

    config: PoolConfig
    text: str
    """pool.json."""
    digest: str
    """kvpool.config.digest of the text; a sidecar that runs it reports the same digest."""
    restart_digest: str
    """Changes with every setting that a running sidecar must be restarted for, and with no other."""


def render_config(config: PoolConfig, pool_secret: str) -> RenderedConfig:
    """Render the configuration. Use `Inputs.config`, which caches the result.

    The restart digest leaves out passwords and certificates, because a sidecar reads them again for each connection.
    It is keyed with the pool's secret, because it is an annotation that many may read.
    """
    text = dumps(config)
    restart_text = json.dumps(static_part(config), sort_keys=True)
    keyed = hmac.new(pool_secret.encode(), restart_text.encode(), hashlib.sha256)
    return RenderedConfig(config, text, digest(text), keyed.hexdigest()[:16])
