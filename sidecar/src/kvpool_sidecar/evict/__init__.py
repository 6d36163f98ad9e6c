"""What goes first when space is needed. Pure; the owner locks."""

from __future__ import annotations

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
    "PerTenant",
    "Pins",
    "PrefixAware",
    "S3Fifo",
    "Table",
    "make_table",
    "saved_ns",
    "saved_uses",
]

POLICIES = ("PrefixAware", "LRU", "LFU", "FIFO", "S3FIFO")


def make_table(policy: str, capacity_bytes: int, pins: Pins | None = None) -> Table:
    """An empty table by the policy's name in the pool's spec; what `pins` holds goes last. KeyError: no such name."""
    table = _plain_table(policy, capacity_bytes)
    if pins is not None:
        table.pin_by(pins)
    return table


def _plain_table(policy: str, capacity_bytes: int) -> Table:
    if policy == "PrefixAware":
        return PrefixAware(capacity_bytes)
    plain: dict[str, type[Lru | Lfu | Fifo | S3Fifo]] = {"LRU": Lru, "LFU": Lfu, "FIFO": Fifo, "S3FIFO": S3Fifo}
    return plain[policy]()
