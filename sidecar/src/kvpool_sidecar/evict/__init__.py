"""What goes first when space is needed. Pure; the owner locks."""

from __future__ import annotations

from kvpool_sidecar.evict.keeping import Order, adjust, expired, make_table, make_tables, must_rebuild
from kvpool_sidecar.evict.pins import Pins
from kvpool_sidecar.evict.prefix import PrefixAware
from kvpool_sidecar.evict.queues import Fifo, Lfu, Lru
from kvpool_sidecar.evict.s3fifo import S3Fifo
from kvpool_sidecar.evict.table import SAVE_EVERY_S, Entry, Table, saved_ns, saved_uses
from kvpool_sidecar.evict.tenants import PerTenant

__all__ = [
    "POLICIES",
    "SAVE_EVERY_S",
    "Entry",
    "Fifo",
    "Lfu",
    "Lru",
    "Order",
    "PerTenant",
    "Pins",
    "PrefixAware",
    "S3Fifo",
    "Table",
    "adjust",
    "expired",
    "make_table",
    "make_tables",
    "must_rebuild",
    "saved_ns",
    "saved_uses",
]

POLICIES = ("PrefixAware", "LRU", "LFU", "FIFO", "S3FIFO")
