"""kvpool.dev/v1alpha1: what a user writes (`PoolSpec`), what the operator answers (`PoolStatus`).

The text under each field is what `kubectl explain` prints, so it says what the field means, in which unit, and what
happens otherwise. Defaults live here and nowhere else. The CRD is made from these models by `api.crdgen`.
"""

from __future__ import annotations

import itertools
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from kvpool_operator.api import fields as f
from kvpool_operator.api.rules import with_rules
from kvpool_operator.errors import InvalidPoolError

__all__ = ["API_VERSION", "GROUP", "KIND", "PLURAL", "VERSION", "KVCachePool", "Metadata", "PoolSpec", "Toleration"]

GROUP = "kvpool.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "KVCachePool"
PLURAL = "kvcachepools"


class Model(BaseModel):
    """Camel case outside, snake case inside; unknown fields are left to the API server's own check."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, use_attribute_docstrings=True, frozen=True, extra="ignore"
    )


def section(kind: type[Model]) -> Any:
    """A part of the spec that is there with all its defaults when the user leaves it out.

    The default spells out plain values, because the API server checks its rules before it fills in those of the parts.
    """
    plain: dict[str, Any] = {k: v for k, v in kind().model_dump(by_alias=True).items() if isinstance(v, (str, int))}
    return Field(default_factory=kind, json_schema_extra={"default": plain})


LabelValue = Annotated[str, Field(max_length=63)]
LabelKey = Annotated[str, Field(min_length=1, max_length=316)]
ObjectName = Annotated[str, Field(min_length=1, max_length=253)]


class LabelExpression(Model):
    """One requirement on a label."""

    key: LabelKey
    """The label's key."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """In and NotIn compare with `values`; Exists and DoesNotExist look only at the key."""
    values: Annotated[list[LabelValue], Field(max_length=64)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Values for In and NotIn; empty for Exists and DoesNotExist."""


class LabelSelector(Model):
    """What labels an object must have. An empty selector fits every object."""

    match_labels: Annotated[dict[str, LabelValue], Field(max_length=32)] = Field(default_factory=dict)
    """Labels that must be there with exactly these values."""
    match_expressions: Annotated[list[LabelExpression], Field(max_length=16)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Further requirements; all must hold."""


class Toleration(Model):
    """A taint that the sidecars tolerate, as in a pod."""

    key: Annotated[str, Field(max_length=316)] | None = None
    """Key of the taint; left out with operator Exists it tolerates every taint."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Equal compares `value`; Exists does not."""
    value: LabelValue | None = None
    """Value of the taint for operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; left out for all."""


class Drain(Model):
    """What becomes of a node's hot blocks when the node is about to leave: cordoned, or tainted by an autoscaler."""

    policy: Literal["Evacuate", "Abandon"] = "Evacuate"
    """Evacuate: blocks that were used within the last hour and exist nowhere else are copied to the shared tier, or
    where there is none to nodes that stay; progress shows in the node's KVCacheNode. Abandon: nothing is moved. Neither
    ever holds up the drain: what was not moved in time is computed again when it is asked for."""
    timeout: f.DrainTime = "10m"
    """After so long it is given up."""
    bandwidth: f.DrainBandwidth = "256Mi"
    """Most bytes per second that leave one node, such as 256Mi."""


class NodesUpdate(Model):
    """How the sidecars are replaced when something in their pods changes: node by node, warm caches kept."""

    max_unavailable: f.Unavailable = 1
    """Nodes whose sidecar is replaced at the same time, as a count or as a percentage of all nodes such as 10% (at
    least one). A sidecar that is away costs its node's engines misses, and nothing else."""
    min_ready_seconds: Annotated[int, Field(ge=0, le=3600)] = 20
    """Seconds that a new sidecar must be ready before the next one is replaced. In a pool of few nodes this keeps the
    hit rate up during the rollout; a pool of many nodes can use 0."""
    surge: bool = True
    """true: the new sidecar of a node starts beside the old one and takes over when it is ready to serve, so that the
    node is without a sidecar for a moment only. The node needs room for the requests of one more sidecar pod. false:
    the old sidecar is stopped first. The old one is always stopped first where a sidecar requests devices of the node
    (transport.rdma.resources) and while the drives of a pool are replaced by others."""


class Nodes(Model):
    """Which nodes carry a part of the pool."""

    selector: LabelSelector = section(LabelSelector)
    """Nodes with these labels get a sidecar. Left out: every node whose taints are tolerated."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Taints that the sidecars tolerate, for instance those of GPU nodes."""
    priority_class_name: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """PriorityClass of the sidecars. Left out: the cluster's default."""
    drain: Drain = section(Drain)
    """What becomes of a node's hot blocks when the node is about to leave."""
    update: NodesUpdate = section(NodesUpdate)
    """How the sidecars are replaced when something in their pods changes."""


class LocalTier(Model):
    """A directory on each node's own drive (tier G3)."""

    path: f.LocalPath
    """Directory on the node, best on an NVMe drive of its own. It is made if it is missing, given to user 65532, and
    belongs to this pool alone. It cannot be changed later."""
    capacity: f.Capacity
    """Room for blocks on each node, such as 500Gi. Eviction keeps below it."""
    reserve_free: f.Reserve = "5%"
    """Part of the drive's file system that stays free whatever `capacity` says, as a percentage or as a quantity such
    as 50Gi, so that the node does not come under disk pressure because of the pool."""
    dedicated_filesystem: Literal["Require", "Prefer", "Ignore"] = "Prefer"
    """What if the directory is on the node's own file system, where the kubelet has its files? Require: the sidecar
    refuses to start there and says so, which also catches a drive that was not mounted. Prefer: it warns and starts.
    Ignore: it starts."""


class HostPathShare(Model):
    """A directory where every node has the shared file system mounted already."""

    path: f.SharedPath
    """Directory on every node. It must exist: a mount that is missing on one node must not pass for the shared file
    system. It is given to user 65532 and belongs to this pool alone. It cannot be changed later."""


class ClaimShare(Model):
    """A PersistentVolumeClaim that many nodes can mount (ReadWriteMany)."""

    claim_name: f.ClaimName
    """Name of a PersistentVolumeClaim in the pool's namespace. It cannot be changed later."""


class NfsShare(Model):
    """An NFS export; the operator makes the PersistentVolume and the claim."""

    server: f.NfsServer
    """Host name or address of the NFS server. It cannot be changed later."""
    path: f.ExportPath
    """Exported directory, such as /exports/kv; user 65532 must be able to write there. It cannot be changed later."""
    mount_options: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=64)]],
        Field(max_length=32, json_schema_extra={"x-kubernetes-list-type": "atomic"}),
    ] = ["soft", "timeo=30", "retrans=2"]
    """Options of the mount. The default gives up on a server that is away (a lost block is computed again); a hard
    mount would hang. Add nconnect=8 or proto=rdma where the server knows them."""


class SharedTier(Model):
    """A file system that every node sees (tier G4). Exactly one of hostPath, pvc and nfs."""

    model_config = ConfigDict(json_schema_extra=with_rules(f.ONE_SHARE, f.SHARE_STAYS))

    host_path: HostPathShare | None = None
    """A directory where every node has the shared file system mounted already (CephFS, Lustre, NFS over RDMA ...)."""
    pvc: ClaimShare | None = None
    """A PersistentVolumeClaim that many nodes can mount."""
    nfs: NfsShare | None = None
    """An NFS export that the operator mounts."""
    capacity: f.Capacity
    """Room for this pool's blocks in the whole shared file system, such as 20Ti, all nodes together. Whichever node
    sweeps it (docs/concepts/shared-tier.md) removes the blocks not used for longest above
    `cache.eviction.highWatermark`."""

    @model_validator(mode="after")
    def _one_share(self) -> SharedTier:
        f.ONE_SHARE.check(sum(s is not None for s in (self.host_path, self.pvc, self.nfs)) == 1)
        return self


class SecretName(Model):
    """A Secret of the pool's namespace."""

    name: ObjectName
    """Name of the Secret."""


class ObjectStoreTier(Model):
    """An object store (tier G4): blocks are objects below the pool's id. A block that is read is kept on the node."""

    url: f.ObjectUrl
    """Where: s3://bucket/prefix. The bucket must exist. gs:// and abfs:// need an image of your own with gcsfs or
    adlfs. It cannot be changed later."""
    secret_ref: SecretName | None = None
    """Secret with the credentials, one key each: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, and as needed
    AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL, AWS_CA_BUNDLE (PEM). Left out: what the node or the sidecars'
    service account gives. A changed Secret is used without a restart."""
    endpoint: f.ObjectEndpoint | None = None
    """Endpoint of an S3 server that is not AWS's, such as http://minio.storage:9000."""
    region: f.ObjectRegion | None = None
    """Region of the bucket."""
    capacity: f.Capacity
    """Room for this pool's blocks in the whole object store, such as 20Ti."""


class Tier(Model):
    """One place for blocks: a name and exactly one of local, shared and objectStore."""

    # Unknown kinds are let through to ONE_SOURCE, which answers with a sentence instead of a decoding error; an unknown
    # field beside a valid source is refused by this model (extra="forbid") and shows as a condition.
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra=with_rules(
            f.ONE_SOURCE, f.SOURCE_STAYS, **{"x-kubernetes-preserve-unknown-fields": True, "additionalProperties": None}
        ),
    )

    name: f.TierName
    """Name of the tier: at most 24 lower-case letters, digits and hyphens. It shows in the status and in metrics."""
    local: LocalTier | None = None
    """A directory on each node's own drive (tier G3)."""
    shared: SharedTier | None = None
    """A file system that every node sees (tier G4)."""
    object_store: ObjectStoreTier | None = None
    """An object store (tier G4)."""

    @model_validator(mode="after")
    def _one_source(self) -> Tier:
        f.ONE_SOURCE.check(sum(s is not None for s in (self.local, self.shared, self.object_store)) == 1)
        return self


class IndexPersistence(Model):
    """A volume for the entries of the managed index."""

    size: f.IndexDisk = "1Gi"
    """Size of the volume: twice `maxMemory` is plenty. It can grow where the storage class lets it."""
    storage_class_name: f.StorageClass | None = None
    """StorageClass of the volume. Left out: the cluster's default. It cannot be changed later."""


class ManagedIndex(Model):
    """A Redis that the operator runs for this pool alone."""

    max_memory: f.IndexMemory | None = None
    """Memory for index entries, such as 256Mi. A block takes about 110 bytes per node that holds it, so 256Mi is room
    for 2 million blocks; beyond that new blocks are found only on their own node and in the shared tier. Left out: room
    for blocks of 1 MiB in the local tiers of all nodes (at least four), 110 bytes each, in steps of four from 64Mi to
    16Gi; the status says what it is. Another step starts the index anew."""
    password_revision: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Raise it to have another password made. Both are good until every sidecar was let in with the new one; then the
    old one goes. Nothing is started anew and no lookup fails. The status says which nodes are waited for."""
    persistence: IndexPersistence | None = None
    """Keeps the entries on a volume, so that an index which starts anew knows them at once. Left out: it starts empty,
    and the nodes announce their blocks again at `rebuildRate`."""


class SecretKey(Model):
    """One value in a Secret of the pool's namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: Annotated[str, Field(min_length=1, max_length=253)] = "url"
    """Key in the Secret."""


class UsernameKey(SecretKey):
    """The user name in a Secret of the pool's namespace."""

    key: Annotated[str, Field(min_length=1, max_length=253)] = "username"
    """Key in the Secret."""


class PasswordKey(SecretKey):
    """The password in a Secret of the pool's namespace."""

    key: Annotated[str, Field(min_length=1, max_length=253)] = "password"
    """Key in the Secret."""


class CaKey(SecretKey):
    """The certificates of authorities, in PEM, in a Secret of the pool's namespace."""

    key: Annotated[str, Field(min_length=1, max_length=253)] = "ca.crt"
    """Key in the Secret."""


class TlsSecret(Model):
    """A Secret of the pool's namespace of type kubernetes.io/tls."""

    name: ObjectName
    """Name of the Secret; it has the keys tls.crt and tls.key."""


class ExternalIndex(Model):
    """A Redis or Valkey of your own (6.2 or newer): one server, the master that Sentinels name, or a Cluster."""

    url_secret_ref: SecretKey
    """Where the URL is: redis://host:port/db, redis+sentinel://host:port,host:port/service/db or
    redis+cluster://host:port,host:port; rediss in the place of redis for TLS. user:password@ may stand before the first
    host. The pool needs a database of its own. The password never appears in a ConfigMap or in the status."""
    username_secret_ref: UsernameKey | None = None
    """Where the name of the ACL user is, if it is not in the URL."""
    password_secret_ref: PasswordKey | None = None
    """Where the password is, if it is not in the URL."""
    ca_secret_ref: CaKey | None = None
    """Where the certificates are that the server's is checked with. Left out: the authorities that systems trust."""
    client_certificate_secret_ref: TlsSecret | None = None
    """The certificate and key with which the sidecars show who they are, where the server wants that."""


class Index(Model):
    """The prefix index says which node has a block. It is a hint: without it, own and shared blocks are still found."""

    model_config = ConfigDict(json_schema_extra=with_rules(f.ONE_INDEX))

    managed: ManagedIndex | None = None
    """A Redis that the operator runs. This is the default."""
    external: ExternalIndex | None = None
    """A Redis or Valkey of your own."""
    lookup_timeout: f.LookupTime = "20ms"
    """Longest wait for the index in one lookup; past it the peers' blocks count as missing."""
    rebuild_rate: Annotated[int, Field(ge=100, le=10_000_000)] = 50_000
    """Blocks per second that all nodes together announce after the index was emptied or replaced. Entries of nodes that
    are gone are looked for at a fifth of it."""
    node_expiry: f.NodeExpiry = "1h"
    """When the entries of a node that is gone are removed. They are no answers any more seconds after it has gone."""

    @model_validator(mode="after")
    def _one_index(self) -> Index:
        f.ONE_INDEX.check(self.managed is None or self.external is None)
        return self


class Write(Model):
    """Where a new block goes."""

    policy: Literal["WriteThrough", "WriteBack", "WriteThroughSelective", "LocalOnly"] = "WriteThrough"
    """Every block is kept on the node that computed it; this says when it is copied to the shared tier, always in the
    background. WriteThrough: at once. WriteBack: when more than `maxDirty` waits on the node, before it is evicted, and
    when the sidecar is stopped; a node that is lost takes with it what waited. WriteThroughSelective: once it was used
    `minHits` times, so that prompts which never come back cost the shared tier nothing. LocalOnly: never."""
    max_dirty: f.DirtyRoom = "4Gi"
    """WriteBack: most bytes on each node that wait for their copy, such as 64Gi; above it the oldest are copied."""
    min_hits: Annotated[int, Field(ge=1, le=1000)] = 2
    """WriteThroughSelective: uses of a block, by this node's engines and by peers, after which it is copied."""


class Eviction(Model):
    """How room is made on each node."""

    model_config = ConfigDict(json_schema_extra=with_rules(f.LOW_BELOW_HIGH))

    policy: Literal["PrefixAware", "LRU", "LFU", "FIFO", "S3FIFO"] = "PrefixAware"
    """What goes first. PrefixAware: of the blocks that end a prompt, those that are least likely to be read soon, so
    that prefixes which many prompts share stay. LRU: what was not read for the longest time. LFU: what was read least
    often. FIFO: what was stored first. S3FIFO: what was not read soon after it was stored."""
    high_watermark: Annotated[int, Field(ge=2, le=100)] = 85
    """Percent of a tier's capacity at which eviction starts."""
    low_watermark: Annotated[int, Field(ge=1, le=99)] = 75
    """Percent of a tier's capacity at which eviction stops; below `highWatermark`."""

    @model_validator(mode="after")
    def _order(self) -> Eviction:
        f.LOW_BELOW_HIGH.check(self.low_watermark < self.high_watermark)
        return self


class Ttl(Model):
    """When a block goes although there is room for it."""

    idle: f.LifeTime = "0s"
    """A block that no engine asked for during so long goes, such as 24h; noted to within a quarter of it, at most 10
    minutes (6 hours in an object store). 0s: it may stay."""
    max_age: f.LifeTime = "0s"
    """A block goes so long after it was made, such as 168h, however often it is used. 0s: it may stay."""


class Pinning(Model):
    """Prefixes that stay on a node because so many prompts begin with them, such as a product's system prompt."""

    capacity_percent: Annotated[int, Field(ge=0, le=50)] = 0
    """Percent of each local tier's capacity for pinned blocks, which are evicted only when nothing else is left; with a
    tenant quota, percent of it. A block that was pinned can still be lost with its drive, or expire. 0 pins nothing."""
    min_uses: Annotated[int, Field(ge=2, le=1_000_000)] = 16
    """Uses of a block that pin it. Counts are halved after every 65,536 uses of a drive, and a block with less than
    half of this is pinned no more, so that what was popular gives its place back."""


class Prefetch(Model):
    """Reading ahead after a lookup, so that the load that follows finds its blocks in the node's memory."""

    max_bytes: f.ReadAhead = "512Mi"
    """Most bytes on each node that are read ahead and not yet loaded, such as 512Mi; a namespace may take half of it.
    0 turns reading ahead off."""


class WarmUp(Model):
    """A node that joins is warmed: it copies the pool's hottest blocks from its peers, in the background."""

    bandwidth: f.WarmUpBandwidth = "100Mi"
    """Most bytes per second that the node takes for it, such as 100Mi, and a quarter of that while its engines read or
    write. It happens once after a start, if the node holds less than half of what its peers hold; nothing is evicted
    for it. The default is less than a tenth of a 10 Gbit/s network, and brings 100 GiB in a quarter of an hour. 0 turns
    it off."""


class Compression(Model):
    """Whether blocks are compressed where they are shared."""

    codec: Literal["None", "Zstd", "LZ4"] = "None"
    """How new blocks are compressed on their way to a shared directory. Drives of nodes and the way between nodes are
    never compressed. It saves space and bandwidth there and costs processor time on the nodes; KV cache shrinks little:
    docs/concepts/compression.md has figures. It can be changed at any time: blocks of every codec are read. A
    compressed block
    that is asked for is decompressed into the node's local tier."""


class Cache(Model):
    """What a block is, where it goes and when it leaves."""

    block_tokens: Annotated[
        int, Field(ge=16, le=8192, multiple_of=16, json_schema_extra=with_rules(f.BLOCK_TOKENS_STAY))
    ] = 256
    """Tokens in one block, a multiple of 16. Injected engines are told; blocks of another size would never be found,
    so it cannot be changed later."""
    max_block_size: f.BlockSize = "256Mi"
    """A larger block is refused. A block takes `blockTokens` times the model's KV bytes per token: 32 MiB for an 8B
    model with 128 KiB per token."""
    write: Write = section(Write)
    """Where a new block goes."""
    eviction: Eviction = section(Eviction)
    """How room is made on each node."""
    ttl: Ttl = section(Ttl)
    """When a block goes although there is room for it."""
    pinning: Pinning = section(Pinning)
    """Prefixes that stay because many prompts begin with them."""
    compression: Compression = section(Compression)
    """Whether blocks are compressed where they are shared."""
    prefetch: Prefetch = section(Prefetch)
    """What is read ahead after a lookup."""
    warm_up: WarmUp = section(WarmUp)
    """How a node that joins is warmed."""


class Quota(Model):
    """How much one tenant may take on each node's local tiers, and in a shared directory."""

    capacity: f.TenantRoom = "0"
    """Room for the blocks of one tenant on each node, such as 200Gi. A tenant that stores more loses blocks of its own,
    nobody else's; and when a node is full, the tenant that takes the most makes room. In a shared directory it may take
    as much once more, all nodes together. 0: no quota, and all share."""


class Tenancy(Model):
    """How tenants (namespaces) share the pool."""

    default_quota: Quota = section(Quota)
    """What each tenant may take."""
    salt_tags: bool = False
    """true: blocks of requests with a `cache_salt` are stored with a tag of it, so that a KVCacheOperation can purge
    them by it (docs/how-to/operations.md says which engines tell salts). A KVPool release that does not know these
    blocks
    (format version 3) takes them for bad ones: upgrade sidecars and engines' clients first. A change makes the
    sidecars' pods anew, one node at a time."""


class Breaker(Model):
    """When a client stops asking."""

    failures: Annotated[int, Field(ge=1, le=1000)] = 5
    """After so many failures in a row the client answers "miss" by itself, in less than a millisecond."""
    cooldown: f.Cooldown = "1s"
    """For so long; then it tries again."""


class FailOpen(Model):
    """How long an engine may wait for the pool. Past it the answer is a miss, and the engine computes."""

    lookup_deadline: f.LookupTime = "20ms"
    """Longest wait for the answer which blocks there are."""
    load_deadline: f.LoadTime = "100ms"
    """A load may take at least so long; for many blocks it may take three times what `expectedBandwidth` promises."""
    expected_bandwidth: f.Bandwidth = "1G"
    """Bytes per second that a load should reach, such as 1G."""
    store_deadline: f.StoreTime = "10s"
    """A store in the background is given up after so long. Engines never wait for it."""
    breaker: Breaker = section(Breaker)
    """When a client stops asking."""


class DeviceResource(Model):
    """An extended resource."""

    name: f.ResourceName
    """Its name, such as rdma/hca_shared_devices_a; the cluster's device plugin gives it."""
    count: Annotated[int, Field(ge=1, le=99)] = 1
    """How many."""


class Rdma(Model):
    """What sidecars need for RDMA."""

    resources: Annotated[list[DeviceResource], Field(max_length=8)] = Field(
        default_factory=list,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """Extended resources that bring an RDMA device into the sidecars' pods."""
    memory: f.RdmaMemory = "512Mi"
    """Registered memory on each node: half holds blocks that peers read, half receives what this node reads. It is
    added to the sidecar's memory limit where `resources` are given."""


class Transport(Model):
    """How blocks travel between nodes."""

    protocol: Literal["Auto", "TCP", "RDMA"] = "Auto"
    """Auto: RDMA between nodes that both can, else TCP. RDMA: the same, and TransportReady is False while a node
    cannot. TCP: never RDMA. What is really used, and why, shows in status.transport."""
    rdma: Rdma = section(Rdma)
    """What sidecars need for RDMA."""
    encryption: Literal["ControlOnly", "Always"] = "ControlOnly"
    """ControlOnly: sidecars prove themselves by certificates over TLS, blocks travel in the clear. Always: blocks are
    encrypted, too, at several times the processor time, and RDMA is not used."""
    streams: Annotated[int, Field(ge=1, le=4)] = 2
    """TCP connections over which one large load comes from one peer. So many lie dialled ahead for each peer, too."""
    port: Annotated[int, Field(ge=1024, le=65535, json_schema_extra=with_rules(f.PORT_IS_FREE))] = 7421
    """TCP port of the sidecars on their pods' addresses."""

    @model_validator(mode="after")
    def _port(self) -> Transport:
        f.PORT_IS_FREE.check(self.port not in (f.HTTP_PORT, f.ADMIN_PORT))
        return self


class Events(Model):
    """KV events, so that routers can send a request to where its prompt's blocks are (docs/reference/kv-events.md)."""

    enabled: bool = False
    """true: each sidecar publishes which blocks its node has, in vLLM's wire format on ZeroMQ, and answers routers that
    show the token in the Secret NAME-events how far each node has a prompt. Events tell which prompts were seen: let
    none but routers reach these ports (docs/reference/kv-events.md has a NetworkPolicy). Blocks get a format that
    sidecars and
    clients of before this field cannot read: upgrade all of them first."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 5557
    """TCP port of the events on the sidecars' pods' addresses (a PUB socket)."""
    replay_port: Annotated[int, Field(ge=1024, le=65535)] = 5558
    """TCP port where a subscriber asks again for what it missed (a ROUTER socket)."""
    topic: f.EventTopic = "kv@{node}@"
    """Topic of the messages. llm-d reads it as kv@<pod>@<model>: write kv@{node}@ and the model's name where a pool
    serves one model."""
    hashes: Literal["Bytes", "Int64"] = "Bytes"
    """How block hashes are written. Int64: their low 64 bits, as vLLM does by default; Bytes: whole, as vLLM does with
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0. Take what the engines of the pool publish."""
    token_revision: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Another number makes another token for routers; the one before is refused once the sidecars have restarted."""


class AllowedNamespaces(Model):
    """Whose pods may use the pool. Tenants stay apart either way: a namespace never finds another one's blocks."""

    model_config = ConfigDict(json_schema_extra=with_rules(f.SELECTOR_FITS_FROM))

    from_: Annotated[Literal["Same", "All", "Selector"], Field(alias="from")] = "All"
    """All: every namespace. Same: only the pool's own. Selector: the pool's own and those with the labels of
    `selector`."""
    selector: LabelSelector | None = None
    """Labels of the namespaces, for `from: Selector`."""

    @model_validator(mode="after")
    def _fits(self) -> AllowedNamespaces:
        f.SELECTOR_FITS_FROM.check((self.from_ == "Selector") == (self.selector is not None))
        return self


class VllmInjection(Model):
    """What injected vLLM engines are told."""

    host_memory: f.HostMemory = "4Gi"
    """Host memory of vLLM's own tier above the pool, per engine, such as 4Gi; it counts against the container's
    memory limit, and an engine whose limit is small gets less."""


class DynamoInjection(Model):
    """What engines with Dynamo's block manager (KVBM) are told; it keeps blocks on their node and shares none."""

    host_memory: f.HostMemory = "4Gi"
    """Host memory of KVBM's own tier, per engine, such as 4Gi; it should hold more than the device's cache, and counts
    against the container's memory limit."""
    disk_cache: f.DiskCache = "16Gi"
    """Room for KVBM's private file on the node, per engine, such as 16Gi, more than hostMemory; 0 means none. It counts
    against the node's ephemeral storage, unless the pod mounts a volume at /var/lib/kvpool-kvbm."""


class Injection(Model):
    """What happens to pods with the label kvpool.dev/inject: "true"."""

    enabled: bool = True
    """false: new pods start without the pool; running ones keep what they have."""
    allowed_namespaces: AllowedNamespaces = section(AllowedNamespaces)
    """Whose pods may use the pool."""
    watchdog: Literal["Report", "Restart"] = "Report"
    """What about pods that run without the pool, because the webhook was away when they were made, or with an older
    client or configuration? Report: they are counted, and an Event on each says so. Restart: they are evicted, too, so
    that their owners make them again: one after the other, never a tenth of an owner's pods at once (of a small owner
    one), as PodDisruptionBudgets allow it, and not those of Jobs. The chart must let the operator do it
    (operator.restartPods)."""
    restart_every: f.RestartPause = "1m"
    """Shortest time between two evictions for this pool."""
    vllm: VllmInjection = section(VllmInjection)
    """What injected vLLM engines are told."""
    dynamo: DynamoInjection = section(DynamoInjection)
    """What engines with Dynamo's block manager are told."""


class PoolSpec(Model):
    """A pool of KV cache blocks on the drives of a cluster's nodes. Only `tiers` must be given."""

    model_config = ConfigDict(json_schema_extra=with_rules(f.WRITES_SOMEWHERE, f.EVENT_PORTS_DIFFER))

    mode: Literal["Enforce", "DryRun", "Paused"] = "Enforce"
    """Enforce: the operator keeps the cluster as this spec says. DryRun: it looks at the nodes (`preflight`) and writes
    into the ConfigMap NAME-plan what it would make, change and delete; it does nothing else. Paused: it only watches
    and reports. A deleted pool is cleaned up in every mode."""
    preflight: Literal["Require", "Warn", "Skip"] = "Warn"
    """Whether nodes are looked at before sidecars are made there, or changed because of other tiers, transport, index
    or nodes: drives, file systems, speed, room, shared tier, index, RDMA (docs/reference/preflight.md). The verdict
    is in
    status.preflight and the condition PreflightPassed. Warn: they are rolled out as soon as some node passes, for a
    node that fails holds up no other; while none does, nothing is. Require: nothing is rolled out before every node
    has passed. Skip: no node is looked at."""
    nodes: Nodes = section(Nodes)
    """Which nodes carry a part of the pool."""
    tiers: Annotated[
        list[Tier],
        Field(
            min_length=1,
            max_length=8,
            json_schema_extra=with_rules(
                f.SOME_LOCAL,
                f.ONE_SHARED,
                f.PATHS_DIFFER,
                **{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
            ),
        ),
    ]
    """Where blocks are kept, from the fastest to the slowest: one or more local tiers (several drives share the
    blocks between them) and at most one shared tier. A tier that is removed here leaves its blocks where they are."""
    index: Index = section(Index)
    """The prefix index says which node has a block."""
    cache: Cache = section(Cache)
    """What a block is, where it goes and when it leaves."""
    tenancy: Tenancy = section(Tenancy)
    """How tenants (namespaces) share the pool."""
    fail_open: FailOpen = section(FailOpen)
    """How long an engine may wait for the pool; past it the answer is a miss."""
    transport: Transport = section(Transport)
    """How blocks travel between nodes."""
    events: Events = section(Events)
    """KV events, so that routers can send a request to where its prompt's blocks are."""
    injection: Injection = section(Injection)
    """What happens to pods with the label kvpool.dev/inject: "true"."""
    deletion_policy: Literal["Retain", "Delete"] = "Retain"
    """What happens to the blocks when this pool is deleted. Retain: they stay on the drives, and the Secret
    NAME-secret that names them stays too; a new pool of the same name, namespace and paths finds them again. Delete:
    a wipe on every node that `nodes` selects removes them, and the Secret goes."""
    cleanup_timeout: f.CleanupTime = "5m"
    """The deletion of this pool waits at most so long for nodes that do not answer; what is left there is named in an
    Event."""

    @model_validator(mode="after")
    def _tiers(self) -> PoolSpec:
        local = [f"{t.local.path}/" for t in self.tiers if t.local]
        every = local + [f"{t.shared.host_path.path}/" for t in self.tiers if t.shared and t.shared.host_path]
        f.SOME_LOCAL.check(bool(local))
        f.ONE_SHARED.check(len(self.tiers) - len(local) <= 1)
        needs_shared = self.cache.write.policy in ("WriteBack", "WriteThroughSelective")
        f.WRITES_SOMEWHERE.check(not needs_shared or len(self.tiers) > len(local))
        ports = [f.HTTP_PORT, f.ADMIN_PORT, self.transport.port, self.events.port, self.events.replay_port]
        f.EVENT_PORTS_DIFFER.check(not self.events.enabled or len(set(ports)) == len(ports))
        f.PATHS_DIFFER.check(not any(a.startswith(b) for a, b in itertools.permutations(every, 2)))
        if len({t.name for t in self.tiers}) != len(self.tiers):
            raise ValueError("give each tier a name of its own")
        return self


class Metadata(Model):
    """The part of an object's metadata that the operator reads."""

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    finalizers: list[str] = Field(default_factory=list)
    annotations: dict[str, str] = Field(default_factory=dict)


class KVCacheObject(Model):
    """An object of one of our kinds, as the API server holds it."""

    metadata: Metadata

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Self:
        """Read it from the API or from a file. InvalidPoolError names the first fields that are wrong."""
        try:
            return cls.model_validate(raw)
        except ValidationError as e:
            raise InvalidPoolError(sentences(e)) from None
        except RecursionError:
            raise InvalidPoolError("the object is nested too deeply") from None


class KVCachePool(KVCacheObject):
    """One pool, as the API server holds it."""

    spec: PoolSpec

    @model_validator(mode="after")
    def _name(self) -> KVCachePool:
        f.POOL_NAME.check(re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", self.metadata.name) is not None)
        return self

    @property
    def key(self) -> str:
        """namespace/name"""
        return f"{self.metadata.namespace}/{self.metadata.name}"


def sentences(error: ValidationError) -> str:
    """Field and sentence, never the value: it may be large or secret."""
    told = []
    for e in error.errors(include_url=False, include_context=False, include_input=False)[:5]:
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in e["loc"] if p not in ("int", "str"))
        sentence = "no such field: remove it" if e["type"] == "extra_forbidden" else e["msg"]
        told.append(f"{where.lstrip('.')[:200]}: {sentence.removeprefix('Value error, ')}")
    return "; ".join(told)
