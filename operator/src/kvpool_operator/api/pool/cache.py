"""spec.cache and spec.tenancy of a KVCachePool: block size, write policy, eviction, expiry, quotas."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from kvpool_operator.api import fields as f
from kvpool_operator.api.model import Model, section
from kvpool_operator.api.rules import with_rules

__all__ = ["Cache", "Tenancy"]


class Write(Model):
    """Write policy of new blocks."""

    policy: Literal["WriteThrough", "WriteBack", "WriteThroughSelective", "LocalOnly"] = "WriteThrough"
    """Every block is stored on the node that computed it. The policy decides when the sidecar copies it to the shared
    tier, always in the background. WriteThrough: immediately. WriteBack: when more than `maxDirty` bytes are pending
    on the node, before the block is evicted, and when the sidecar stops; a lost node loses its pending blocks.
    WriteThroughSelective: after `minHits` uses, so that prompts that never recur do not load the shared tier.
    LocalOnly: never."""
    max_dirty: f.DirtyRoom = "4Gi"
    """WriteBack: maximum bytes on each node that are not copied yet, such as 64Gi. Above it, the oldest are copied."""
    min_hits: Annotated[int, Field(ge=1, le=1000)] = 2
    """WriteThroughSelective: number of uses, by engines of this node and by peers, after which a block is copied."""
    buffer: f.WriteBuffer = "512Mi"
    """Memory of each node's sidecar for blocks that engines are writing, such as 512Mi; one tenant uses at most three
    quarters of it. It is raised to four thirds of `maxBlockSize`, and added to the memory request of the sidecar."""


class Admission(Model):
    """Which new blocks are written to the local drives, to spare them."""

    policy: Literal["Always", "SecondUse", "Budget"] = "Always"
    """Always: every new block. SecondUse: a block that engines of the node offer for the second time, so that prompts
    that never recur are not written; a prompt hits from its third use on. Budget: new blocks until the drives have
    taken `driveWritesPerDay`, of which an hour's share can be saved up; the rest is not stored. A block that is not
    written is not copied to the shared tier either."""
    drive_writes_per_day: f.DriveWrites = "1.0"
    """Budget: how often the whole size of the node's drives may be written per day, such as 0.8. Vendors rate drives
    by this number (DWPD). Writes of other programs and copies that the sidecar makes itself are not limited."""


class Eviction(Model):
    """Eviction of blocks from each node's local tiers."""

    model_config = ConfigDict(json_schema_extra=with_rules(f.LOW_BELOW_HIGH))

    policy: Literal["PrefixAware", "LRU", "LFU", "FIFO", "S3FIFO"] = "PrefixAware"
    """Eviction policy. PrefixAware: evicts from the ends of prompts, the blocks that are least likely to be reused
    first, so that prefixes shared by many prompts stay. LRU: least recently used first. LFU: least frequently used
    first. FIFO: oldest first. S3FIFO: blocks that are not reused soon after they are stored first."""
    high_watermark: Annotated[int, Field(ge=2, le=100)] = 85
    """Usage in percent of a tier's capacity at which eviction starts."""
    low_watermark: Annotated[int, Field(ge=1, le=99)] = 75
    """Usage in percent of a tier's capacity at which eviction stops. Must be below `highWatermark`."""

    @model_validator(mode="after")
    def _order(self) -> Eviction:
        f.LOW_BELOW_HIGH.check(self.low_watermark < self.high_watermark)
        return self


class Ttl(Model):
    """Expiry of blocks, independent of free space."""

    idle: f.LifeTime = "0s"
    """Removes a block that no engine has used for this time, such as 24h. The time of the last use is recorded with a
    precision of a quarter of this value, at most 10 minutes (6 hours in an object store). 0s disables idle expiry."""
    max_age: f.LifeTime = "0s"
    """Removes a block this long after it was created, such as 168h, regardless of use. 0s disables the age limit."""


class Pinning(Model):
    """Pinning of blocks that many prompts begin with, such as the system prompt of a product."""

    capacity_percent: Annotated[int, Field(ge=0, le=50)] = 0
    """Percent of each local tier's capacity for pinned blocks, which are evicted last. With a tenant quota, percent of
    the quota. A pinned block can still expire or be lost with its drive. 0 disables pinning."""
    min_uses: Annotated[int, Field(ge=2, le=1_000_000)] = 16
    """Number of uses after which a block is pinned. The counts of a drive are halved after every 65,536 uses, and a
    block with less than half of this value is unpinned, so that blocks that are no longer popular release their
    space."""


class Prefetch(Model):
    """Prefetching after a lookup, so that the load that follows reads its blocks from the node's memory."""

    max_bytes: f.ReadAhead = "512Mi"
    """Maximum bytes on each node that are prefetched and not loaded yet, such as 512Mi. One namespace can use half of
    it. 0 disables prefetching."""


class WarmUp(Model):
    """Warm-up of a node that joins the pool: it copies the most popular blocks from its peers in the background."""

    bandwidth: f.WarmUpBandwidth = "100Mi"
    """Maximum bytes per second that the node receives, such as 100Mi; a quarter of it while engines read or write on
    the node. A warm-up runs once after a start if the node holds less than half of what its peers hold; it evicts
    nothing. The default takes less than a tenth of a 10 Gbit/s network and copies 100 GiB in about 17 minutes. 0
    disables the warm-up."""


class Compression(Model):
    """Compression of blocks in the shared file system."""

    codec: Literal["None", "Zstd", "LZ4"] = "None"
    """Codec of new blocks in a shared directory. Blocks on local drives and on the network between nodes are never
    compressed. Compression saves shared space and bandwidth and costs CPU time on the nodes; KV cache compresses
    little. The codec can be changed at any time: sidecars read blocks of every codec. A compressed block is
    decompressed into the node's local tier when an engine reads it."""


class Cache(Model):
    """Block format, write policy, eviction, and expiry."""

    block_tokens: Annotated[
        int, Field(ge=16, le=8192, multiple_of=16, json_schema_extra=with_rules(f.BLOCK_TOKENS_STAY))
    ] = 256
    """Tokens per block, a multiple of 16. Injected engines are configured with it. Immutable, because blocks of
    another size would never be found."""
    max_block_size: f.BlockSize = "256Mi"
    """Maximum size of a block. The sidecar rejects larger blocks. The size of a block is `blockTokens` times the
    model's KV bytes per token: 32 MiB for an 8B model with 128 KiB per token."""
    write: Write = section(Write)
    """Write policy of new blocks."""
    admission: Admission = section(Admission)
    """Which new blocks are written to the local drives."""
    eviction: Eviction = section(Eviction)
    """Eviction of blocks from local tiers."""
    ttl: Ttl = section(Ttl)
    """Expiry of blocks."""
    pinning: Pinning = section(Pinning)
    """Pinning of blocks that many prompts begin with."""
    compression: Compression = section(Compression)
    """Compression of blocks in the shared file system."""
    prefetch: Prefetch = section(Prefetch)
    """Prefetching after a lookup."""
    warm_up: WarmUp = section(WarmUp)
    """Warm-up of a node that joins the pool."""


class Quota(Model):
    """Capacity that one tenant can use."""

    capacity: f.TenantRoom = "0"
    """Maximum size of one tenant's blocks on each node, such as 200Gi. Above it, the tenant's own blocks are evicted.
    On a full node, the tenant with the highest usage is evicted first. The same limit applies once more to a shared
    directory, all nodes together. 0: no quota; all tenants share the capacity."""


class Tenancy(Model):
    """Sharing of the pool between tenants (namespaces)."""

    default_quota: Quota = section(Quota)
    """Quota of each tenant without a KVCacheTenant quota."""
    salt_tags: bool = False
    """true: blocks of requests with a `cache_salt` carry a keyed tag of the salt, so that a KVCacheOperation can purge
    them by salt. Not every engine reports salts. Earlier KVPool releases treat these blocks (format version 3) as
    corrupt: upgrade sidecars and clients of engines first. A change recreates the sidecar pods, one node at a time."""
