"""Gauges, computed from a status report."""

from __future__ import annotations

from typing import Any, Final

from kvpool_sidecar.observability.catalog.families import EventGauge, Gauge
from kvpool_sidecar.observability.catalog.hints import HINT_GAUGES

__all__ = ["BREAKER_PARTS", "EVENT_GAUGES", "GAUGES", "gc_status"]

BREAKER_PARTS: Final = {"index": "Prefix index.", "shared": "Shared tier."}


def gc_status(status: dict[str, Any], key: str) -> float:
    """Return a number of the shared tier's garbage collection; 0 where this node has none."""
    return float(status["shared"].get("sweep", {}).get(key, 0))


GAUGES: Final = (
    Gauge("ready", "1 if the sidecar serves.", lambda s: s["ready"]),
    Gauge("capacity_bytes", "Capacity of the node's local tiers in bytes.", lambda s: s["capacity_bytes"]),
    Gauge("used_bytes", "Bytes used by blocks on this node.", lambda s: s["used_bytes"]),
    Gauge("pinned_bytes", "Bytes of pinned blocks, which are evicted last.", lambda s: s["pinned_bytes"]),
    Gauge("blocks", "Blocks on this node.", lambda s: s["blocks"]),
    Gauge(
        "max_blocks",
        "Maximum number of blocks on this node, from the container's memory limit.",
        lambda s: s["max_blocks"],
    ),
    Gauge(
        "eviction_trust",
        "How far PrefixAware's learned order decides: 1 entirely, 0 not at all, because LRU finds more. The least of "
        "all tenants; 1 with another policy.",
        lambda s: s["eviction_trust"],
    ),
    Gauge("clients", "Open connections of clients.", lambda s: s["clients"]),
    Gauge("pods", "Pods served by this node.", lambda s: s["pods"]),
    Gauge("index_connected", "1 if the prefix index responds.", lambda s: s["index"]["connected"]),
    Gauge(
        "index_announced_blocks",
        "Blocks of this node registered in the prefix index.",
        lambda s: s["index"]["announced"],
    ),
    Gauge(
        "peers_reachable",
        "Peers from which the last probe read over a new data connection.",
        lambda s: s["reachability"]["reachable"],
    ),
    Gauge(
        "peers_unreachable",
        "Live peers from which at least two attempts in a row could not read; their blocks are misses.",
        lambda s: s["reachability"]["unreachable"],
    ),
    Gauge(
        "peer_certificate_expiry_timestamp_seconds",
        "Unix time at which this node's peer certificate expires; 0 without a certificate.",
        lambda s: s["peers"]["certificate_expiry"],
    ),
    Gauge("queued_reads", "Loads that wait for a grant.", lambda s: s["admission"]["reads"]["waiting"]),
    Gauge("queued_writes", "Stores that wait for a grant.", lambda s: s["admission"]["writes"]["waiting"]),
    Gauge("queued_requests", "Requests that wait for their turn.", lambda s: s["admission"]["requests"]["waiting"]),
    Gauge("queued_peer_reads", "Reads of peers that wait for a grant.", lambda s: s["admission"]["peers"]["waiting"]),
    Gauge("inflight_read_bytes", "Bytes of loads in flight.", lambda s: s["admission"]["reads"]["granted_bytes"]),
    Gauge("inflight_write_bytes", "Bytes of stores in flight.", lambda s: s["admission"]["writes"]["granted_bytes"]),
    Gauge(
        "landing_limit_bytes",
        "Memory for unfinished writes; one tenant may use three quarters of it.",
        lambda s: s["landing"]["limit_bytes"],
    ),
    Gauge(
        "block_table_bytes",
        "Memory of the block tables that clients look up blocks in.",
        lambda s: s["block_tables"]["bytes"],
    ),
    Gauge("block_table_blocks", "Blocks in the block tables.", lambda s: s["block_tables"]["blocks"]),
    Gauge("landing_bytes", "Memory of unfinished writes.", lambda s: s["landing"]["bytes"]),
    Gauge("landing_writes", "Unfinished writes.", lambda s: s["landing"]["places"]),
    Gauge(
        "landing_stuck_bytes",
        "Memory of ended writes that a pod keeps from being freed; charged to the pod.",
        lambda s: s["landing"]["stuck_bytes"],
    ),
    Gauge(
        "landing_small_folio_writes",
        "Writes of 2 MiB or more since the start whose memory has pages of 4 KiB only, which costs processor time.",
        lambda s: s["landing"]["small_folios"],
    ),
    Gauge(
        "held_bytes",
        "Bytes on the drives of removed blocks that pods keep open; freed 10 s after the removal.",
        lambda s: s["landing"]["held_bytes"],
    ),
    *HINT_GAUGES,
    Gauge("shared_available", "1 if the shared tier responds.", lambda s: s["shared"]["available"]),
    Gauge(
        "shared_gc_leader",
        "1 if this node runs the garbage collection.",
        lambda s: gc_status(s, "holder"),
    ),
    Gauge(
        "shared_gc_last_duration_seconds",
        "Duration of the last garbage collection of the shared tier.",
        lambda s: gc_status(s, "last_seconds"),
    ),
    Gauge("shared_used_bytes", "Bytes used by blocks in the shared tier.", lambda s: gc_status(s, "used_bytes")),
    Gauge("shared_blocks", "Blocks in the shared tier.", lambda s: gc_status(s, "blocks")),
    Gauge("shared_dirty_blocks", "Blocks not yet copied to the shared tier.", lambda s: s["shared"]["waiting"]),
    Gauge(
        "shared_dirty_bytes",
        "Payload bytes not yet copied to the shared tier.",
        lambda s: s["shared"]["dirty_bytes"],
    ),
)

EVENT_GAUGES: Final = (
    EventGauge("sequence", "Sequence number of the next batch of events.", "next"),
    EventGauge("replay_buffer_batches", "Batches available for replay.", "remembered"),
    EventGauge("queue_length", "Events and blocks that wait to be published.", "waiting"),
    EventGauge("tracked_blocks", "Blocks whose engine names are known.", "known"),
)
