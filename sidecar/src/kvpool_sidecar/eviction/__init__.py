"""What goes first when space is needed. Pure; the owner locks."""

from __future__ import annotations

from kvpool_sidecar.eviction.factory import (
    EvictionConfig,
    create,
    create_policy,
    expiries,
    reconfigure,
    requires_rebuild,
)
from kvpool_sidecar.eviction.lru_lfu_fifo import Fifo, Lfu, Lru
from kvpool_sidecar.eviction.per_tenant import PerTenant
from kvpool_sidecar.eviction.pinning import PinSet
from kvpool_sidecar.eviction.policy import PERSIST_EVERY_S, Entry, EvictionPolicy, decode_uses, encode_mtime_ns
from kvpool_sidecar.eviction.prefix_aware import PrefixAware
from kvpool_sidecar.eviction.s3fifo import S3Fifo

__all__ = [
    "PERSIST_EVERY_S",
    "POLICIES",
    "Entry",
    "EvictionConfig",
    "EvictionPolicy",
    "Fifo",
    "Lfu",
    "Lru",
    "PerTenant",
    "PinSet",
    "PrefixAware",
    "S3Fifo",
    "create",
    "create_policy",
    "decode_uses",
    "encode_mtime_ns",
    "expiries",
    "reconfigure",
    "requires_rebuild",
]

POLICIES = ("PrefixAware", "LRU", "LFU", "FIFO", "S3FIFO")
