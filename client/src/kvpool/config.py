"""Configuration schema: the operator writes it, the sidecar and the client read it.

`PoolConfig` is the file `pool.json` of a pool's ConfigMap; only operator and sidecar use it. `ClientConfig` is the
environment variable KVPOOL_CLIENT_CONFIG of an injected engine pod. Both are plain JSON, read by kvpool.schema. A wrong
type or an invalid value is a ConfigError that names the field. client/tests/golden/*.json are read by the tests of both
sides. docs/reference/config.md is generated from this module by `make gen`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from kvpool import schema
from kvpool.errors import ConfigError
from kvpool.events_config import EventsConfig
from kvpool.hint_settings import HintsConfig
from kvpool.schema import doc

__all__ = [
    "CLIENT_CONFIG_ENV",
    "CONFIG_VERSION",
    "MAX_READS_FROM",
    "CacheConfig",
    "ClientConfig",
    "Deadlines",
    "EventsConfig",
    "FsspecTier",
    "HintsConfig",
    "IndexConfig",
    "LocalTier",
    "PeerConfig",
    "PoolConfig",
    "SharedTier",
    "TenantConfig",
    "digest",
    "dumps",
    "loads",
    "static_part",
]

CONFIG_VERSION = 1
CLIENT_CONFIG_ENV = "KVPOOL_CLIENT_CONFIG"
_ENCRYPTION = "Encryption of blocks there: None or AES256GCM, with keys of `shared-keys.json` (secret directory)."
MAX_TENANTS = 1024
MAX_READS_FROM = 8
T = TypeVar("T")


@dataclass(frozen=True)
class LocalTier:
    """A directory on each node's own drive (tier G3)."""

    name: str = doc("The tier's name in the pool's spec.")
    path: str = doc("Directory in the sidecar's file system; used by this pool only.")
    capacity_bytes: int = doc("Capacity for blocks on each node, in bytes.", live=True)
    reserve_free_bytes: int = doc("Bytes of the file system that always stay free.", default=0, live=True)
    reserve_free_percent: int = doc("Percent of the file system that always stays free.", default=5, live=True)
    dedicated_filesystem: str = doc(
        "For a directory on the node's root file system: Require (refuse to start), Prefer (warn) or Ignore.",
        default="Prefer",
    )
    is_ephemeral: bool = doc(
        "Whether the directory is in a volume that lives with the sidecar's pod: only the server prepares it.",
        default=False,
        live=True,
    )


@dataclass(frozen=True)
class SharedTier:
    """A directory that every node mounts (tier G4): NFS, NFS over RDMA, CephFS, Lustre and the like."""

    name: str = doc("The tier's name in the pool's spec.")
    path: str = doc("Directory in the sidecar's file system.")
    capacity_bytes: int = doc("Capacity for this pool's blocks, in bytes; 0: unlimited.", default=0, live=True)
    sweep_lease_s: int = doc("Seconds without renewal after which the garbage collector's lease expires.", default=60)
    sweep_every_s: int = doc("Seconds between garbage collections: count usage, delete expired blocks.", default=600)
    sweep_entries_per_s: int = doc("Files per second that a garbage collection checks at most.", default=2000)
    encryption: str = doc(_ENCRYPTION, default="None")

    def __post_init__(self) -> None:
        if min(self.sweep_lease_s, self.sweep_every_s, self.sweep_entries_per_s) <= 0:
            raise ConfigError("shared: sweep_lease_s, sweep_every_s and sweep_entries_per_s must be above 0")


@dataclass(frozen=True)
class FsspecTier:
    """An object store (tier G4). Credentials are files of the sidecar's object-store directory, never here."""

    name: str = doc("The tier's name in the pool's spec.")
    url: str = doc("s3://bucket/prefix, or another URL that fsspec supports; blocks are stored under the pool's id.")
    endpoint: str = doc("URL of an S3 endpoint other than AWS's; empty: AWS.", default="")
    region: str = doc("S3 region; empty: the client library's default.", default="")
    capacity_bytes: int = doc("Capacity for this pool's blocks, in bytes; 0: unlimited.", default=0, live=True)
    sweep_lease_s: int = doc("Seconds without renewal after which the garbage collector's lease expires.", default=600)
    sweep_every_s: int = doc("Seconds between garbage collections: count usage, delete expired blocks.", default=3600)
    encryption: str = doc(_ENCRYPTION, default="None")

    def __post_init__(self) -> None:
        if min(self.sweep_lease_s, self.sweep_every_s) <= 0:
            raise ConfigError("fsspec: sweep_lease_s and sweep_every_s must be above 0")


@dataclass(frozen=True)
class IndexConfig:
    """Address of the prefix index. The index is a hint: its loss costs peer hits until the nodes register again."""

    url: str = doc(
        "redis://host:port/db, redis+sentinel://host:port,.../service/db or redis+cluster://host:port,...; rediss for "
        "TLS. Empty: no index; each node finds its local and shared blocks only."
    )
    username: str = doc(
        "ACL user. The secret directory holds the password in `index-password` and, for TLS, optionally "
        "`index-ca.crt`, `index-client.crt` and `index-client.key`.",
        default="",
    )
    lookup_timeout_ms: int = doc("Timeout of one lookup, in milliseconds.", default=20)
    lease_s: int = doc("Seconds without a heartbeat after which a node counts as unavailable.", default=15)
    rebuild_per_s: int = doc(
        "Blocks per second that all nodes together register after the index lost its data; entries of expired nodes "
        "are scanned at a fifth of this rate.",
        default=50_000,
    )
    forget_after_s: int = doc("Seconds without a heartbeat after which a node's entries are removed.", default=3600)

    def __post_init__(self) -> None:
        if self.rebuild_per_s <= 0 or self.forget_after_s < max(1, self.lease_s):
            raise ConfigError("index: rebuild_per_s must be above 0, forget_after_s at least lease_s")


@dataclass(frozen=True)
class CacheConfig:
    """Block sizes, write policy and eviction."""

    block_tokens: int = doc("Tokens per block in injected engines.", default=256)
    max_block_bytes: int = doc(
        "Maximum payload of one block, in bytes; larger blocks are rejected.", default=256 * 1024 * 1024
    )
    write_policy: str = doc(
        "When a block is copied to the shared tier, in the background: WriteThrough (immediately), WriteBack (when too "
        "many bytes are dirty, before eviction, at shutdown), WriteThroughSelective (after enough uses) or LocalOnly "
        "(never).",
        default="WriteThrough",
    )
    write_max_dirty_bytes: int = doc("WriteBack: maximum dirty bytes per node (not yet copied).", default=4 << 30)
    write_min_hits: int = doc("WriteThroughSelective: uses after which a block is copied.", default=2)
    eviction_policy: str = doc("PrefixAware, LRU, LFU, FIFO or S3FIFO.", default="PrefixAware", live=True)
    admission: str = doc("New blocks that local drives take: Always, SecondUse or Budget.", default="Always", live=True)
    admission_percent: int = doc("Budget: percent of the drives' size per day.", default=100, live=True)
    idle_ttl_s: int = doc("Seconds without use after which a block is evicted; 0: no limit.", default=0, live=True)
    max_age_s: int = doc("Seconds since creation after which a block is evicted; 0: no limit.", default=0, live=True)
    tenant_quota_bytes: int = doc(
        "Quota of each tenant, in bytes, on each node and separately in a shared directory. A tenant over its quota "
        "loses its own blocks first; 0: no quota.",
        default=0,
        live=True,
    )
    pinned_percent: int = doc(
        "Percent of each drive for frequently used blocks, which are evicted last; 0: none.", default=0, live=True
    )
    pinned_min_uses: int = doc(
        "Uses that pin a block; counts are halved after every 65,536 uses of a drive.", default=16, live=True
    )
    high_watermark: int = doc("Percent of the capacity at which eviction starts.", default=85, live=True)
    low_watermark: int = doc("Percent of the capacity at which eviction stops.", default=75, live=True)
    prefetch_bytes: int = doc(
        "Maximum bytes prefetched after lookups and not yet loaded; 0: no prefetch.", default=512 << 20
    )
    write_buffer_bytes: int = doc(
        "Memory for unfinished writes on each node, in bytes; a tenant may use three quarters of it.",
        default=512 << 20,
    )
    compression: str = doc(
        "Compression of new blocks in a shared directory: None, Zstd or LZ4. Blocks of every codec can be read.",
        default="None",
    )
    warm_up_bytes_per_s: int = doc(
        "Bytes per second at which a joining node copies the hottest blocks of its peers; 0: no warm-up.",
        default=0,
    )


@dataclass(frozen=True)
class PeerConfig:
    """Reads between sidecars."""

    port: int = doc("TCP port of the sidecar on the pod's address.", default=7421)
    connect_timeout_ms: int = doc(
        "Timeout of a connection to a peer, in milliseconds; at most half of a load's deadline.",
        default=1000,
    )
    protocol: str = doc("Auto (RDMA on nodes that support it, else TCP), TCP or RDMA.", default="Auto")
    rdma_bytes: int = doc(
        "Registered memory for RDMA on each node, in bytes: half to serve reads, half to receive.", default=512 << 20
    )
    encryption: str = doc("ControlOnly (TLS for control, plaintext for data) or Always.", default="ControlOnly")
    streams: int = doc("Connections to one peer that one large load uses, 1 to 4.", default=2)
    congestion_control: str = doc("TCP congestion control; empty: the node's default.", default="")


@dataclass(frozen=True)
class Deadlines:
    """How long an engine may wait. Past it the answer is a miss."""

    lookup_ms: int = doc("Deadline of a lookup, in milliseconds.", default=20)
    load_min_ms: int = doc("Shortest deadline of a load, in milliseconds.", default=100)
    load_expected_mb_s: int = doc("Expected bandwidth in MB/s; a load may take three times as long.", default=1000)
    store_ms: int = doc("Deadline of a small background store, in milliseconds; more bytes get longer.", default=10_000)
    breaker_failures: int = doc("Consecutive failures that open the circuit breaker: calls then miss.", default=5)
    breaker_cooldown_ms: int = doc("Milliseconds that the circuit breaker stays open before a trial.", default=1000)


@dataclass(frozen=True)
class TenantConfig:
    """Namespaces that form one tenant: they share blocks, and the limits apply to all of them together."""

    name: str = doc("Name of the KVCacheTenant.")
    id: str = doc(
        "Identity from which its block keys are derived; contains a colon, so it never equals a namespace's name."
    )
    namespaces: tuple[str, ...] = doc("Its namespaces; each belongs to one tenant.", default=())
    quota_bytes: int = doc("Quota on each node, in bytes; 0: no quota.", default=0)
    shared_quota_bytes: int = doc("Quota in a shared directory, in bytes; 0: no quota.", default=0)
    idle_ttl_s: int = doc("Seconds without use after which its blocks are evicted; 0: no limit.", default=0)
    max_age_s: int = doc("Seconds since creation after which its blocks are evicted; 0: no limit.", default=0)
    priority: int = doc("On a full drive, tenants with the lowest number lose blocks first.", default=0)
    hints_share_percent: int = doc("`hints.share_percent` of this tenant, if it is lower.", default=100)
    reads_from: tuple[str, ...] = doc(
        f"Ids of other tenants whose blocks it may read, in lookup order; at most {MAX_READS_FROM}. An id that is not "
        "in the configuration has no effect.",
        default=(),
    )

    def __post_init__(self) -> None:
        if not self.name or ":" not in self.id:
            raise ConfigError("tenants: a name and an id with a colon are required")
        reads = self.reads_from
        if len(reads) > MAX_READS_FROM or len({self.id, *reads}) <= len(reads) or not all(":" in i for i in reads):
            raise ConfigError(
                f"tenants: {self.name} may read at most {MAX_READS_FROM} other tenants, each once, by ids with a colon"
            )
        limits = (self.quota_bytes, self.shared_quota_bytes, self.idle_ttl_s, self.max_age_s, self.hints_share_percent)
        if min(limits) < 0:
            raise ConfigError(f"tenants: quotas and times of {self.name} must not be below 0")


@dataclass(frozen=True)
class PoolConfig:
    """Configuration of a sidecar, identical on every node of the pool."""

    pool: str = doc("Name of the KVCachePool.")
    namespace: str = doc("Namespace of the KVCachePool.")
    uid: str = doc("UID of the KVCachePool: directories of other pools are rejected.")
    local: tuple[LocalTier, ...] = doc("Local tiers in order; blocks are striped over drives by key.")
    index: IndexConfig = doc("The prefix index.")
    shared: SharedTier | None = doc("The shared tier.", default=None)
    fsspec: FsspecTier | None = doc("The shared tier if it is an object store; `shared` is null then.", default=None)
    cache: CacheConfig = doc("Block sizes, write policy, eviction.", default_factory=CacheConfig)
    peer: PeerConfig = doc("Reads from other nodes.", default_factory=PeerConfig)
    deadlines: Deadlines = doc("Deadlines that the sidecar sends to its clients.", default_factory=Deadlines)
    events: EventsConfig = doc("KV events for routers.", default_factory=EventsConfig)
    hints: HintsConfig = doc("Session hints.", default_factory=HintsConfig)
    salt_tags: bool = doc(
        "Clients tag the blocks of requests that have a cache salt, so that they can be purged by salt. Sidecars and "
        "clients older than block format 3 treat such blocks as corrupt.",
        default=False,
    )
    allowed_namespaces: tuple[str, ...] = doc(
        "Namespaces whose pods are served; `*` matches every namespace. The operator resolves selectors.",
        default=("*",),
        live=True,
    )
    tenants: tuple[TenantConfig, ...] = doc(
        "Tenants with several namespaces or other limits. Every other namespace is its own tenant.",
        default=(),
        live=True,
    )
    http_port: int = doc("Port of /healthz, /readyz, /metrics and /status on the pod's address.", default=7422)
    admin_port: int = doc(
        "Port on which the operator starts operations (TLS, operator's certificate only); 0: none.", default=0
    )
    generation: int = doc("Generation of the spec that this file was generated from.", default=0, live=True)
    version: int = doc("Version of this schema.", default=CONFIG_VERSION)

    def __post_init__(self) -> None:
        c = self.cache
        if self.version != CONFIG_VERSION:
            raise ConfigError(f"version is {self.version}, this build reads {CONFIG_VERSION}: upgrade the older side")
        if not self.local:
            raise ConfigError("local: at least one local tier is required")
        if self.shared is not None and self.fsspec is not None:
            raise ConfigError("shared and fsspec: only one shared tier is allowed")
        if not 0 < c.low_watermark < c.high_watermark <= 100:
            raise ConfigError("cache: 0 < low_watermark < high_watermark <= 100 must hold")
        if c.max_block_bytes <= 0 or c.block_tokens <= 0 or any(t.capacity_bytes <= 0 for t in self.local):
            raise ConfigError("cache and local: sizes must be above 0")
        if any(t.dedicated_filesystem not in ("Require", "Prefer", "Ignore") for t in self.local):
            raise ConfigError("local.dedicated_filesystem: Require, Prefer or Ignore")
        schema.require_known(
            ("peer.encryption", self.peer.encryption, ("ControlOnly", "Always")),
            ("peer.protocol", self.peer.protocol, ("Auto", "TCP", "RDMA")),
            ("cache.compression", c.compression, ("None", "Zstd", "LZ4")),
            ("cache.eviction_policy", c.eviction_policy, ("PrefixAware", "LRU", "LFU", "FIFO", "S3FIFO")),
            ("cache.write_policy", c.write_policy, ("WriteThrough", "WriteBack", "WriteThroughSelective", "LocalOnly")),
            *((f"{t.name}.encryption", t.encryption, ("None", "AES256GCM")) for t in (self.shared, self.fsspec) if t),
        )
        if not 1 <= self.peer.streams <= 4:
            raise ConfigError("peer.streams: 1 to 4")
        if min(c.idle_ttl_s, c.max_age_s, c.tenant_quota_bytes) < 0:
            raise ConfigError("cache: idle_ttl_s, max_age_s and tenant_quota_bytes must not be below 0")
        if min(c.prefetch_bytes, c.warm_up_bytes_per_s, c.write_buffer_bytes) < 0:
            raise ConfigError("cache: prefetch_bytes, warm_up_bytes_per_s and write_buffer_bytes must not be below 0")
        if c.write_max_dirty_bytes < 0 or c.write_min_hits < 1:
            raise ConfigError("cache: write_max_dirty_bytes must be at least 0, write_min_hits at least 1")
        if not 0 <= c.pinned_percent <= 50 or c.pinned_min_uses < 1:
            raise ConfigError("cache: pinned_percent must be from 0 to 50, and pinned_min_uses above 0")
        if not 0 < self.peer.rdma_bytes <= 1 << 44:
            raise ConfigError("peer.rdma_bytes: must be above 0 and at most 16 TiB")
        members = [namespace for tenant in self.tenants for namespace in tenant.namespaces]
        if len(self.tenants) > MAX_TENANTS or len({tenant.id for tenant in self.tenants}) != len(self.tenants):
            raise ConfigError(f"tenants: at most {MAX_TENANTS}, each with a unique id")
        if len(set(members)) != len(members):
            raise ConfigError("tenants: a namespace belongs to one tenant only")


@dataclass(frozen=True)
class ClientConfig:
    """Configuration of the client in an engine's process; the sidecar sends the rest."""

    socket: str = doc("Path of this pod's unix socket.", default="/run/kvpool/kv.sock")
    pool: str = doc("namespace/name of the pool, for messages only.", default="")
    connections: int = doc("Connections to the sidecar (at most 8).", default=4)
    connect_retry_ms: int = doc("Longest pause between connection attempts, in milliseconds.", default=1000)
    max_inflight_stores: int = doc(
        "Blocks being stored before new stores are dropped; of LMCache, blocks of one batch.", default=64
    )
    trust_lora_names: bool = doc(
        "vLLM with LoRA adapters: an adapter's name and path identify the same weights on every pod. If false, such "
        "an engine shares its blocks with no other.",
        default=False,
    )
    break_even: bool = doc("Do not promise blocks that load slower than this vLLM computes them.", default=False)
    deadlines: Deadlines = doc("Deadlines.", default_factory=Deadlines)
    version: int = doc("Version of this schema.", default=CONFIG_VERSION)


def dumps(config: PoolConfig | ClientConfig) -> str:
    """Encode as stable, human-readable JSON: equal configurations give equal text."""
    return json.dumps(asdict(config), indent=2, sort_keys=True) + "\n"


def loads(kind: type[T], text: str, *, where: str = "") -> T:
    """Decode JSON into `kind` (PoolConfig or ClientConfig). ConfigError names the field and the problem."""
    try:
        value = json.loads(text)
    except ValueError as e:
        raise ConfigError(f"not JSON: {e}", where=where) from None
    built: T = schema.build(kind, value, kind.__name__, where)
    return built


def digest(text: str) -> str:
    """Digest of a configuration's text without its generation, 16 hexadecimal digits. ValueError if it is not JSON.

    Sidecars report by it which configuration they run. Fields that this build does not know are included.
    """
    value = json.loads(text)
    if isinstance(value, dict):
        value.pop("generation", None)
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def static_part(config: PoolConfig) -> dict[str, Any]:
    """Return the part of a configuration that a running sidecar cannot change: a difference requires a restart."""
    found: dict[str, Any] = schema.static_part(config)
    return found
