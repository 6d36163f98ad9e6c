"""One configuration schema: the operator writes it, the sidecar and the client read it.

`PoolConfig` is the file `pool.json` of a pool's ConfigMap. `ClientConfig` is what an injected engine pod finds in the
environment variable KVPOOL_CLIENT_CONFIG. Both are plain JSON; unknown fields are ignored, so that a newer operator
can serve an older reader; a missing field takes its default; a wrong type or an impossible value is a ConfigError
that names the field. client/tests/golden/*.json are read by the tests of both sides.

`python -m kvpool.config --write | --check` keeps docs/reference/config.md fresh.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from kvpool.errors import ConfigError

__all__ = [
    "CLIENT_CONFIG_ENV",
    "CONFIG_VERSION",
    "MAX_READS_FROM",
    "CacheConfig",
    "ClientConfig",
    "Deadlines",
    "EventsConfig",
    "FsspecTier",
    "IndexConfig",
    "LocalTier",
    "PeerConfig",
    "PoolConfig",
    "SharedTier",
    "TenantConfig",
    "digest",
    "dumps",
    "fixed",
    "loads",
]

CONFIG_VERSION = 1
CLIENT_CONFIG_ENV = "KVPOOL_CLIENT_CONFIG"
MAX_TENANTS = 1024
MAX_READS_FROM = 8
T = TypeVar("T")


def _doc(text: str, *, live: bool = False, **kw: Any) -> Any:
    """`live`: a running sidecar takes another value without a restart."""
    return field(metadata={"doc": text, "live": live}, **kw)


@dataclass(frozen=True)
class LocalTier:
    """A directory on each node's own drive (tier G3)."""

    name: str = _doc("The tier's name in the pool's spec.")
    path: str = _doc("Directory as the sidecar sees it; it belongs to this pool alone.")
    capacity_bytes: int = _doc("Most bytes that blocks may take on each node.", live=True)
    reserve_free_bytes: int = _doc("Bytes of the file system that are always left free.", default=0, live=True)
    reserve_free_percent: int = _doc("Percent of the file system that is always left free.", default=5, live=True)
    dedicated_filesystem: str = _doc(
        "Require (refuse to start), Prefer (warn) or Ignore a directory on the node's own file system.",
        default="Prefer",
    )


@dataclass(frozen=True)
class SharedTier:
    """A directory that every node sees (tier G4): NFS, NFS over RDMA, CephFS, Lustre and the like."""

    name: str = _doc("The tier's name in the pool's spec.")
    path: str = _doc("Directory as the sidecar sees it.")
    capacity_bytes: int = _doc(
        "Most bytes that this pool's blocks may take there; 0: no limit of ours.", default=0, live=True
    )
    sweep_lease_s: int = _doc("A sweeper that was not heard of for so many seconds is gone.", default=60)
    sweep_every_s: int = _doc("What is there is counted every so many seconds, and what is too old goes.", default=600)
    sweep_entries_per_s: int = _doc("A sweep looks at no more files than so many a second.", default=2000)

    def __post_init__(self) -> None:
        if min(self.sweep_lease_s, self.sweep_every_s, self.sweep_entries_per_s) <= 0:
            raise ConfigError("shared: sweep_lease_s, sweep_every_s and sweep_entries_per_s must be above 0")


@dataclass(frozen=True)
class FsspecTier:
    """An object store (tier G4). Credentials are files of the sidecar's object-store directory, never here."""

    name: str = _doc("The tier's name in the pool's spec.")
    url: str = _doc("s3://bucket/prefix, or another URL that fsspec knows; blocks are below the pool's id there.")
    endpoint: str = _doc("URL of an S3 endpoint other than AWS's; empty: AWS.", default="")
    region: str = _doc("S3 region; empty: the client library's default.", default="")
    capacity_bytes: int = _doc(
        "Most bytes that this pool's blocks may take there; 0: no limit of ours.", default=0, live=True
    )
    sweep_lease_s: int = _doc("A sweeper that was not heard of for so many seconds is gone.", default=600)
    sweep_every_s: int = _doc("What is there is counted every so many seconds, and what is too old goes.", default=3600)

    def __post_init__(self) -> None:
        if min(self.sweep_lease_s, self.sweep_every_s) <= 0:
            raise ConfigError("fsspec: sweep_lease_s and sweep_every_s must be above 0")


@dataclass(frozen=True)
class IndexConfig:
    """Where the prefix index is. It is a hint: losing it costs hits on peers until the nodes have announced again."""

    url: str = _doc(
        "redis://host:port/db, redis+sentinel://host:port,.../service/db or redis+cluster://host:port,...; rediss for "
        "TLS. Empty: no index, each node finds its own and shared blocks."
    )
    username: str = _doc(
        "ACL user; the password is in the file `index-password` of the secret directory, and for TLS there may be "
        "`index-ca.crt`, `index-client.crt` and `index-client.key`.",
        default="",
    )
    lookup_timeout_ms: int = _doc("Longest wait for one lookup in milliseconds.", default=20)
    lease_s: int = _doc("A node that has not been heard of for so many seconds is gone.", default=15)
    rebuild_per_s: int = _doc(
        "Blocks per second that all nodes together announce after the index was emptied; entries of forgotten nodes "
        "are looked for at a fifth of it.",
        default=50_000,
    )
    forget_after_s: int = _doc(
        "Entries of a node that has not been heard of for so many seconds are removed.", default=3600
    )

    def __post_init__(self) -> None:
        if self.rebuild_per_s <= 0 or self.forget_after_s < max(1, self.lease_s):
            raise ConfigError("index: rebuild_per_s must be above 0, forget_after_s at least lease_s")


@dataclass(frozen=True)
class CacheConfig:
    """What is kept, and when it goes."""

    block_tokens: int = _doc("Tokens in one block as the injected engines are told.", default=256)
    max_block_bytes: int = _doc("A larger block is refused.", default=256 * 1024 * 1024)
    write_policy: str = _doc(
        "When a block is copied to the shared tier, in the background: WriteThrough (at once), WriteBack (when too "
        "much waits, before eviction, at the end), WriteThroughSelective (once it was used often enough) or "
        "LocalOnly (never).",
        default="WriteThrough",
    )
    write_max_dirty_bytes: int = _doc("WriteBack: most bytes on a node that wait for their copy.", default=4 << 30)
    write_min_hits: int = _doc("WriteThroughSelective: uses after which a block is copied.", default=2)
    eviction_policy: str = _doc(
        "What goes first on a drive that is full: PrefixAware, LRU, LFU, FIFO or S3FIFO.",
        default="PrefixAware",
        live=True,
    )
    idle_ttl_s: int = _doc("A block that is not used for so many seconds goes; 0: it may stay.", default=0, live=True)
    max_age_s: int = _doc("A block that was made so many seconds ago goes; 0: it may stay.", default=0, live=True)
    tenant_quota_bytes: int = _doc(
        "Most bytes that one tenant's blocks may take on each node, and as many in a shared directory; over it the "
        "tenant loses blocks of its own; 0: no quota.",
        default=0,
        live=True,
    )
    pinned_percent: int = _doc(
        "Percent of each drive for blocks used often, which go last; 0: none.", default=0, live=True
    )
    pinned_min_uses: int = _doc(
        "Uses that pin a block; they are halved after each 65,536 uses of a drive.", default=16, live=True
    )
    high_watermark: int = _doc("Percent of the capacity at which eviction starts.", default=85, live=True)
    low_watermark: int = _doc("Percent of the capacity at which eviction stops.", default=75, live=True)
    prefetch_bytes: int = _doc(
        "Most bytes that are read ahead after lookups and not yet loaded; 0: nothing is read ahead.", default=512 << 20
    )
    compression: str = _doc(
        "None, Zstd or LZ4: how new blocks are compressed on a shared directory. Blocks of every codec are read.",
        default="None",
    )
    warm_up_bytes_per_s: int = _doc(
        "A node that joins copies the hottest blocks of its peers at so many bytes per second; 0: it does not.",
        default=0,
    )


@dataclass(frozen=True)
class PeerConfig:
    """How sidecars read from each other."""

    port: int = _doc("TCP port of the sidecar on the pod's address.", default=7421)
    connect_timeout_ms: int = _doc(
        "Longest wait for a connection to a peer in milliseconds, and never more than half of a load's deadline.",
        default=1000,
    )
    protocol: str = _doc("Auto (RDMA where a node can, else TCP), TCP or RDMA.", default="Auto")
    rdma_bytes: int = _doc(
        "Registered memory for RDMA on each node: half to read from, half to read into.", default=512 << 20
    )
    encryption: str = _doc("ControlOnly (control by TLS, data in the clear) or Always.", default="ControlOnly")
    streams: int = _doc("Connections over which one large load comes from one peer, 1 to 4.", default=2)
    congestion_control: str = _doc("TCP congestion control; empty: the node's default.", default="")


@dataclass(frozen=True)
class Deadlines:
    """How long an engine may wait. Past it the answer is a miss."""

    lookup_ms: int = _doc("One lookup, milliseconds.", default=20)
    load_min_ms: int = _doc("A load waits at least so long before it is a miss, milliseconds.", default=100)
    load_expected_mb_s: int = _doc("Expected bandwidth in MB/s; a load may take three times as long.", default=1000)
    store_ms: int = _doc("A store in the background is given up after so many milliseconds.", default=10_000)
    breaker_failures: int = _doc("After so many failures in a row the client answers miss by itself.", default=5)
    breaker_cooldown_ms: int = _doc("For so many milliseconds, then it tries again.", default=1000)


@dataclass(frozen=True)
class EventsConfig:
    """KV events for routers, in vLLM's wire format (docs/reference/kv-events.md)."""

    enabled: bool = _doc("Publish which blocks this node has, and answer routers.", default=False)
    port: int = _doc("ZeroMQ PUB socket on the pod's address.", default=5557)
    replay_port: int = _doc("ZeroMQ ROUTER socket for what a subscriber missed, on the pod's address.", default=5558)
    topic: str = _doc(
        "Topic of the messages; `{node}`, `{pool}` and `{namespace}` are filled in.", default="kv@{node}@"
    )
    hashes: str = _doc(
        "Bytes (the engine's hashes as they are) or Int64 (the low 64 bits, as vLLM publishes them by default).",
        default="Bytes",
    )
    token_revision: int = _doc("Another number makes another bearer token for routers.", default=0)

    def __post_init__(self) -> None:
        if not (0 <= self.port < 65536 and 0 <= self.replay_port < 65536) or self.port == self.replay_port != 0:
            raise ConfigError("events: port and replay_port are two ports")
        if self.hashes not in ("Bytes", "Int64"):
            raise ConfigError(f"events.hashes: unknown {self.hashes!r}")
        if len(self.topic) > 512 or not 0 <= self.token_revision < 1 << 32:
            raise ConfigError("events: the topic is too long, or token_revision is no number of 32 bits")


@dataclass(frozen=True)
class TenantConfig:
    """Namespaces that are one tenant: they find each other's blocks, and what is said here holds for all together."""

    name: str = _doc("Name of the KVCacheTenant.")
    id: str = _doc("What names of its blocks are made with; it has a colon, so no namespace is called so.")
    namespaces: tuple[str, ...] = _doc("Its namespaces; each is of one tenant.", default=())
    quota_bytes: int = _doc("Most bytes of its blocks on each node; 0: no quota.", default=0)
    shared_quota_bytes: int = _doc("Most bytes of its blocks in a shared directory; 0: no quota.", default=0)
    idle_ttl_s: int = _doc("Its blocks go when not used for so many seconds; 0: they may stay.", default=0)
    max_age_s: int = _doc("Its blocks go so many seconds after they were made; 0: they may stay.", default=0)
    priority: int = _doc("On a full drive tenants with the lowest number make room; all others have 0.", default=0)
    reads_from: tuple[str, ...] = _doc(
        f"Ids of tenants whose blocks it may read beside its own, in the order they are looked at; {MAX_READS_FROM} at "
        "most. One that is not in the configuration has no effect.",
        default=(),
    )

    def __post_init__(self) -> None:
        if not self.name or ":" not in self.id:
            raise ConfigError("tenants: a name is needed, and an id with a colon")
        reads = self.reads_from
        if len(reads) > MAX_READS_FROM or len({self.id, *reads}) <= len(reads) or not all(":" in i for i in reads):
            raise ConfigError(
                f"tenants: {self.name} may read at most {MAX_READS_FROM} other tenants, each once, by ids with a colon"
            )
        if min(self.quota_bytes, self.shared_quota_bytes, self.idle_ttl_s, self.max_age_s) < 0:
            raise ConfigError(f"tenants: quotas and times of {self.name} must not be below 0")


@dataclass(frozen=True)
class PoolConfig:
    """Everything a sidecar must know of its pool; the same on every node."""

    pool: str = _doc("Name of the KVCachePool.")
    namespace: str = _doc("Namespace of the KVCachePool.")
    uid: str = _doc("UID of the KVCachePool: directories of another pool are refused.")
    local: tuple[LocalTier, ...] = _doc("Local tiers in order; several drives are striped by key.")
    index: IndexConfig = _doc("The prefix index.")
    shared: SharedTier | None = _doc("The shared tier.", default=None)
    fsspec: FsspecTier | None = _doc(
        "The shared tier, where it is an object store; then `shared` is null.", default=None
    )
    cache: CacheConfig = _doc("Block sizes, write policy, eviction.", default_factory=CacheConfig)
    peer: PeerConfig = _doc("Reads from other nodes.", default_factory=PeerConfig)
    deadlines: Deadlines = _doc("Deadlines that the sidecar tells its clients.", default_factory=Deadlines)
    events: EventsConfig = _doc("KV events for routers.", default_factory=EventsConfig)
    salt_tags: bool = _doc(
        "Clients tag the blocks of requests that have a salt, so that they can be purged by it; a sidecar or client of "
        "before block format 3 takes such a block for a bad one.",
        default=False,
    )
    allowed_namespaces: tuple[str, ...] = _doc(
        "Namespaces whose pods are served; `*` is every namespace. The operator resolves selectors.",
        default=("*",),
        live=True,
    )
    tenants: tuple[TenantConfig, ...] = _doc(
        "Tenants of more, or of other rights, than one namespace. Every other namespace is a tenant by itself.",
        default=(),
        live=True,
    )
    http_port: int = _doc("Port of /healthz, /readyz, /metrics and /status on the pod's address.", default=7422)
    admin_port: int = _doc(
        "Port where the operator starts operations (TLS, the operator's certificate only); 0: none.", default=0
    )
    generation: int = _doc("Generation of the spec that this was written from.", default=0, live=True)
    version: int = _doc("Version of this schema.", default=CONFIG_VERSION)

    def __post_init__(self) -> None:
        c = self.cache
        if self.version != CONFIG_VERSION:
            raise ConfigError(f"version is {self.version}, this build reads {CONFIG_VERSION}: upgrade the older side")
        if not self.local:
            raise ConfigError("local: at least one local tier is needed")
        if self.shared is not None and self.fsspec is not None:
            raise ConfigError("shared and fsspec: there is one shared tier; give one of them")
        if not 0 < c.low_watermark < c.high_watermark <= 100:
            raise ConfigError("cache: 0 < low_watermark < high_watermark <= 100 must hold")
        if any(t.dedicated_filesystem not in ("Require", "Prefer", "Ignore") for t in self.local):
            raise ConfigError("local.dedicated_filesystem: Require, Prefer or Ignore")
        if c.max_block_bytes <= 0 or c.block_tokens <= 0 or any(t.capacity_bytes <= 0 for t in self.local):
            raise ConfigError("cache and local: sizes must be above 0")
        if self.peer.encryption not in ("ControlOnly", "Always"):
            raise ConfigError(f"peer.encryption: unknown {self.peer.encryption!r}")
        if not 1 <= self.peer.streams <= 4:
            raise ConfigError("peer.streams: 1 to 4")
        if min(c.idle_ttl_s, c.max_age_s, c.tenant_quota_bytes) < 0:
            raise ConfigError("cache: idle_ttl_s, max_age_s and tenant_quota_bytes must not be below 0")
        if c.prefetch_bytes < 0 or c.warm_up_bytes_per_s < 0:
            raise ConfigError("cache: prefetch_bytes and warm_up_bytes_per_s must not be below 0")
        if c.compression not in ("None", "Zstd", "LZ4"):
            raise ConfigError(f"cache.compression: unknown codec {c.compression!r}")
        if c.write_policy not in ("WriteThrough", "WriteBack", "WriteThroughSelective", "LocalOnly"):
            raise ConfigError(f"cache.write_policy: unknown policy {c.write_policy!r}")
        if c.write_max_dirty_bytes < 0 or c.write_min_hits < 1:
            raise ConfigError("cache: write_max_dirty_bytes must not be below 0, nor write_min_hits below 1")
        if not 0 <= c.pinned_percent <= 50 or c.pinned_min_uses < 1:
            raise ConfigError("cache: pinned_percent must be from 0 to 50, and pinned_min_uses above 0")
        if self.peer.protocol not in ("Auto", "TCP", "RDMA"):
            raise ConfigError(f"peer.protocol: unknown protocol {self.peer.protocol!r}")
        if not 0 < self.peer.rdma_bytes <= 1 << 44:
            raise ConfigError("peer.rdma_bytes: must be above 0 and at most 16 TiB")
        if c.eviction_policy not in ("PrefixAware", "LRU", "LFU", "FIFO", "S3FIFO"):
            raise ConfigError(f"cache.eviction_policy: unknown policy {c.eviction_policy!r}")
        members = [namespace for tenant in self.tenants for namespace in tenant.namespaces]
        if len(self.tenants) > MAX_TENANTS or len({tenant.id for tenant in self.tenants}) != len(self.tenants):
            raise ConfigError(f"tenants: at most {MAX_TENANTS}, each with an id of its own")
        if len(set(members)) != len(members):
            raise ConfigError("tenants: a namespace is of one tenant")


@dataclass(frozen=True)
class ClientConfig:
    """What the client in an engine's process must know; it learns the rest from the sidecar."""

    socket: str = _doc("Path of this pod's unix socket.", default="/run/kvpool/kv.sock")
    pool: str = _doc("namespace/name of the pool, for messages only.", default="")
    connections: int = _doc("Connections to the sidecar (at most 8).", default=4)
    connect_retry_ms: int = _doc(
        "While no sidecar is there, look again after so many milliseconds, sooner at first.", default=1000
    )
    max_inflight_stores: int = _doc("Stores under way before new ones are dropped.", default=64)
    trust_lora_names: bool = _doc(
        "vLLM with LoRA adapters: name and path of an adapter stand for the same weights on every pod. Without it "
        "such an engine shares its blocks with no other.",
        default=False,
    )
    deadlines: Deadlines = _doc("Deadlines.", default_factory=Deadlines)
    version: int = _doc("Version of this schema.", default=CONFIG_VERSION)


def dumps(config: PoolConfig | ClientConfig) -> str:
    """Stable, human-readable JSON: the same config gives the same text."""
    return json.dumps(asdict(config), indent=2, sort_keys=True) + "\n"


def loads(kind: type[T], text: str, *, where: str = "") -> T:
    """Read JSON into `kind` (PoolConfig or ClientConfig). ConfigError names the field and what is wrong."""
    try:
        value = json.loads(text)
    except ValueError as e:
        raise ConfigError(f"not JSON: {e}", where=where) from None
    built: T = _build(kind, value, kind.__name__, where)
    return built


def _build(kind: Any, value: Any, path: str, where: str) -> Any:
    if get_origin(kind) in (Union, UnionType):
        if value is None:
            return None
        kind = next(a for a in get_args(kind) if a is not type(None))
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{path}: a list is needed", where=where)
        return tuple(_build(get_args(kind)[0], v, f"{path}[{i}]", where) for i, v in enumerate(value))
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: an object is needed", where=where)
        hints = get_type_hints(kind)
        make: Any = kind
        args = {}
        for f in fields(kind):
            if f.name in value:
                args[f.name] = _build(hints[f.name], value[f.name], f"{path}.{f.name}", where)
            elif f.default is MISSING and f.default_factory is MISSING:
                raise ConfigError(f"{path}.{f.name} is missing", where=where)
        return make(**args)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{path}: {kind.__name__} is needed, not {type(value).__name__}", where=where)
    return value


def digest(text: str) -> str:
    """Short name of a configuration's text but for its generation, 16 hexadecimal digits. ValueError if it is not JSON.

    Sidecars tell by it which configuration they run. Fields that this build does not know count.
    """
    value = json.loads(text)
    if isinstance(value, dict):
        value.pop("generation", None)
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def fixed(config: PoolConfig) -> dict[str, Any]:
    """The part of a configuration that a running sidecar cannot change: where it differs, the process must restart."""
    found: dict[str, Any] = _fixed(config)
    return found


def _fixed(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _fixed(getattr(value, f.name)) for f in fields(value) if not f.metadata["live"]}
    if isinstance(value, tuple):
        return [_fixed(v) for v in value]
    return value


_DOC_FILE = Path("docs/reference/config.md")


def _reference() -> str:
    out = [
        "# Configuration files",
        "",
        "Written by the operator, read by the sidecar (`PoolConfig`, `pool.json` of the pool's ConfigMap) and by the",
        f"client (`ClientConfig`, environment variable `{CLIENT_CONFIG_ENV}`). Users do not write them: they follow",
        "from the KVCachePool. Generated from `kvpool.config` by `make gen`.",
        "",
        "A running sidecar applies the fields marked *live* without a restart",
        "([Change a running pool](../how-to/resize.md)).",
        "For any other field the operator restarts the sidecars, one node at a time.",
    ]
    for kind in (
        PoolConfig,
        LocalTier,
        SharedTier,
        FsspecTier,
        IndexConfig,
        CacheConfig,
        PeerConfig,
        Deadlines,
        TenantConfig,
        ClientConfig,
    ):
        out += [
            "",
            f"## {kind.__name__}",
            "",
            (kind.__doc__ or "").strip(),
            "",
            "| field | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for f in fields(kind):
            if f.default_factory is not MISSING:
                default = "see below"
            else:
                default = "required" if f.default is MISSING else f"`{json.dumps(f.default)}`"
            kind_name = str(f.type).replace("|", "or")
            live = " *Live.*" if f.metadata["live"] else ""
            out.append(f"| `{f.name}` | {kind_name} | {default} | {f.metadata['doc']}{live} |")
    return "\n".join(out) + "\n"


def _main(argv: list[str]) -> int:
    text = _reference()
    if argv == ["--write"]:
        _DOC_FILE.parent.mkdir(parents=True, exist_ok=True)
        _DOC_FILE.write_text(text)
        return 0
    if argv == ["--check"]:
        if _DOC_FILE.exists() and _DOC_FILE.read_text() == text:
            return 0
        print(f"{_DOC_FILE} is stale: run `make gen` and commit the result", file=sys.stderr)
        return 1
    print("usage: python -m kvpool.config --write | --check", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
