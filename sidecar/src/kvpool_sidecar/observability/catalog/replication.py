"""Counters of the shared tier, prefetch, warm-up and drains."""

from __future__ import annotations

from typing import Final

from kvpool_sidecar.observability.catalog.families import Counter

__all__ = ["REPLICATION_COUNTERS"]

_GC_REASONS: Final = {
    "idle": "Not used for longer than the configured time.",
    "age": "Older than the configured age.",
    "capacity": "The tier exceeded its capacity.",
    "quota": "A tenant exceeded its quota.",
    "superseded": "Written by a model or engine version that is no longer used.",
}
_GC_FILES: Final = {
    "temporary": "Files of unfinished writes and of nodes that no longer exist.",
    "quarantine": "Old files of quarantined blocks.",
}
_COPY_FAILURES: Final = {
    "corrupt": "A peer sent a corrupt block.",
    "refused": "The local tier was full.",
    "lost-peers": "The connection to a peer failed.",
    "missing": "The peer no longer had the block, or was overloaded.",
}

REPLICATION_COUNTERS: Final = (
    Counter(
        "kvpool_sidecar_copies",
        "copies",
        "Copies of blocks to the shared tier, by result.",
        "result",
        {
            "copied": "The block was copied.",
            "there": "The shared tier already had the block.",
            "gone": "The block was no longer on this node when its copy began.",
            "purged": "The block was purged before it was copied.",
            "no-key": "The shared tier is encrypted, and this node has no key for the block's tenant.",
            "corrupt": "The local block failed verification.",
            "failed": "Writing to the shared tier failed; the copy is retried.",
            "full": "The shared tier is full.",
            "given-up": "The copy was abandoned after repeated failures.",
            "dropped": "The limit of dirty blocks was reached.",
            "lost": "A dirty block was removed from this node before it was copied.",
        },
    ),
    Counter(
        "kvpool_sidecar_shared_gc_removed_blocks",
        "swept",
        "Blocks removed from the shared tier by garbage collection.",
        "reason",
        _GC_REASONS,
    ),
    Counter(
        "kvpool_sidecar_shared_gc_removed_files",
        "swept",
        "Other files removed from the shared tier by garbage collection.",
        "reason",
        _GC_FILES,
        is_closed=True,
    ),
    Counter(
        "kvpool_sidecar_shared_gc_removed_bytes",
        "swept_bytes",
        "Bytes removed from the shared tier by garbage collection.",
        "reason",
        _GC_REASONS | _GC_FILES,
    ),
    Counter(
        "kvpool_sidecar_shared_access_time_updates",
        "touches",
        "Updates of the last access time of shared blocks.",
        "result",
        {"touched": "The time was updated.", "failed": "The update failed."},
    ),
    Counter("kvpool_sidecar_prefetch_blocks", "prefetch", "Blocks read ahead after lookups.", item="blocks"),
    Counter("kvpool_sidecar_prefetch_bytes", "prefetch", "Bytes read ahead after lookups.", item="bytes"),
    Counter(
        "kvpool_sidecar_prefetch_outcome_blocks",
        "prefetch",
        "Blocks that were read ahead, by whether they were loaded afterwards.",
        "outcome",
        {"used": "The block was loaded.", "unused": "The block was not loaded in time."},
        is_closed=True,
    ),
    Counter(
        "kvpool_sidecar_prefetch_skipped_blocks",
        "prefetch",
        "Blocks that were not read ahead, by reason.",
        "reason",
        {
            "cached": "The block was already in the page cache.",
            "late": "The request was too old when its turn came.",
            "dropped": "The queue was full.",
            "busy": "The drive was busy with loads.",
        },
    ),
    Counter("kvpool_sidecar_warm_up_blocks", "warm_up", "Blocks copied from peers after joining.", item="blocks"),
    Counter("kvpool_sidecar_warm_up_bytes", "warm_up", "Bytes copied from peers after joining.", item="bytes"),
    Counter(
        "kvpool_sidecar_warm_up_failures",
        "warm_up",
        "Failed copies from peers after joining.",
        "reason",
        _COPY_FAILURES,
    ),
    Counter(
        "kvpool_sidecar_drain_sent_blocks",
        "evacuated",
        "Blocks moved from this node while it is drained, by destination.",
        "destination",
        {"shared": "Shared tier.", "peers": "Another node."},
        is_closed=True,
    ),
    Counter(
        "kvpool_sidecar_drain_sent_bytes", "evacuated", "Bytes moved from this node while it is drained.", item="bytes"
    ),
    Counter(
        "kvpool_sidecar_drain_sent_failures",
        "evacuated",
        "Failed attempts to move a block to a peer while the node is drained.",
        item="failed",
    ),
    Counter("kvpool_sidecar_drain_received_blocks", "adopted", "Blocks received from draining nodes.", item="blocks"),
    Counter("kvpool_sidecar_drain_received_bytes", "adopted", "Bytes received from draining nodes.", item="bytes"),
    Counter(
        "kvpool_sidecar_drain_received_skipped_blocks",
        "adopted",
        "Blocks of draining nodes that were not received, by reason.",
        "reason",
        {
            "have": "This node already had the block.",
            "full": "There was no space.",
            "absent": "No node could provide the block.",
            "busy": "Too many transfers were in flight.",
            "refused": "The block exceeds the configured size, or this node is draining too.",
        },
    ),
    Counter(
        "kvpool_sidecar_compression_blocks",
        "compression",
        "Blocks processed for the shared tier, by result.",
        "result",
        {
            "compressed": "The block was compressed.",
            "incompressible": "Compression saved too little; the block was stored as it is.",
            "decompressed": "The block was decompressed.",
        },
    ),
    Counter(
        "kvpool_sidecar_compression_input_bytes",
        "compression",
        "Bytes of compressed blocks before compression.",
        item="raw-bytes",
    ),
    Counter(
        "kvpool_sidecar_compression_output_bytes",
        "compression",
        "Bytes of compressed blocks after compression.",
        item="stored-bytes",
    ),
    Counter(
        "kvpool_sidecar_encryption_blocks",
        "encryption",
        "Blocks of an encrypted shared tier, by result.",
        "result",
        {
            "encrypted": "The block was encrypted.",
            "decrypted": "The block was decrypted.",
            "no-key": "This node does not have the block's key; the block is a miss, or is not copied.",
            "not-encrypted": "The stored block is not encrypted; it is a miss.",
            "corrupt": "The block failed its authentication twice and was quarantined.",
        },
    ),
)
