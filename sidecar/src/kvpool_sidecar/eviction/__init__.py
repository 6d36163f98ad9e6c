"""What goes first when space is needed. Pure; the owner locks."""

from __future__ import annotations

from kvpool_sidecar.eviction.factory import EvictionConfig, adjust, expired, make_table, make_tables, must_rebuild
from kvpool_sidecar.eviction.lru_lfu_fifo import Fifo, Lfu, Lru
from kvpool_sidecar.eviction.per_tenant import PerTenant
from kvpool_sidecar.eviction.pinning import PinSet
from kvpool_sidecar.eviction.policy import SAVE_EVERY_S, Entry, EvictionPolicy, saved_ns, saved_uses
from kvpool_sidecar.eviction.prefix_aware import PrefixAware
from kvpool_sidecar.eviction.s3fifo import S3Fifo

__all__ = [
    "POLICIES",
    "SAVE_EVERY_S",
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
    "adjust",
    "expired",
    "make_table",
    "make_tables",
    "must_rebuild",
    "saved_ns",
    "saved_uses",
]

POLICIES = ("PrefixAware", "LRU", "LFU", "FIFO", "S3FIFO")
