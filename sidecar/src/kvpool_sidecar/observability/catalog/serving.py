"""Counters and histograms of requests, clients, drives, peers and published events."""

from __future__ import annotations

from typing import Final

from kvpool_sidecar.observability.catalog.families import Counter, Histogram
from kvpool_sidecar.observability.catalog.hints import HINT_COUNTERS
from kvpool_sidecar.observability.catalog.lookups import GONE

__all__ = ["HISTOGRAMS", "SERVING_COUNTERS"]

_TIERS: Final = {
    "local": "Drive of the client's own node.",
    "peer": "Drive of another node, over the network.",
    "shared": "Shared tier.",
}
_OPERATIONS: Final = {
    "hello": "Handshake of a connection.",
    "lookup": "Query for the tiers that hold blocks.",
    "open": "Open blocks for reading.",
    "begin": "Begin to write blocks.",
    "commit": "Publish written blocks.",
    "report": "Report of a client's counters and corrupt blocks.",
    "done": "End of a read that held a grant.",
    "hint": "Session hint.",
    "map": "Request for the block table of a tenant and fingerprint.",
    "used": "Report of a lookup that a client answered from the block table.",
    "loaded": "Report of blocks that a client read again by descriptors that it had.",
}

_ADMIN_OPERATIONS: Final = (
    "purge", "verify", "warm", "evacuate", "remain", "preflight", "release", "reload", "confirm-key-forgotten",
)  # fmt: skip
SERVING_COUNTERS: Final = (
    Counter("kvpool_sidecar_requests", "requests", "Requests of clients.", "op", _OPERATIONS),
    Counter("kvpool_sidecar_lookup_blocks", "lookup", "Blocks in LOOKUP requests, repeats included.", item="asked"),
    Counter("kvpool_sidecar_lookup_hit_blocks", "lookup", "Blocks found by LOOKUP requests.", item="found"),
    Counter(
        "kvpool_sidecar_opened_blocks",
        "served",
        "Blocks requested for reading, by the tier that served them.",
        "tier",
        {**_TIERS, "miss": "The block was not available."},
    ),
    Counter("kvpool_client_hit_blocks", "client_hits", "Blocks that clients loaded and verified.", "tier", _TIERS),
    Counter("kvpool_client_bytes", "client_bytes", "Payload bytes that clients loaded and verified.", "tier", _TIERS),
    Counter(
        "kvpool_client_tokens",
        "client_tokens",
        "Tokens that engines did not have to compute, as counted by the vLLM plug-in.",
        "tier",
        _TIERS,
    ),
    Counter(
        "kvpool_client_misses",
        "client_misses",
        "Blocks that engines tried to load, and did not get. Blocks that a lookup did not find are not in it.",
        "reason",
        {
            **GONE,
            "absent": "The block was gone, and the client or the sidecar is too old to give a reason.",
            "no-sidecar": "There is no connection to the node's sidecar.",
            "breaker-open": "The circuit breaker is open after repeated failures; no request was sent.",
            "deadline": "The block did not arrive in time.",
            "connection": "The connection failed during the transfer.",
            "protocol": "The other side violated the protocol.",
            "corrupt": "Header or payload failed verification.",
            "length": "The block's length differs from the buffer's.",
            "peer-absent": "The index named a peer that no longer has the block.",
            "io": "Reading the file failed.",
            "bad-buffer": "The engine's buffer is read-only or not contiguous.",
            "closed": "The client was closed.",
            "internal": "A defect in the client; see the engine's log.",
            "busy": "Too many transfers were in flight, in the client or on the node.",
        },
    ),
    Counter(
        "kvpool_sidecar_admission_blocks",
        "admission",
        "New blocks that an admission policy other than Always decided on.",
        "result",
        {"admitted": "The block was written.", "skipped": "The block was not written, to spare the drive."},
    ),
    Counter("kvpool_sidecar_stored_blocks", "stored", "Blocks stored.", item="blocks"),
    Counter("kvpool_sidecar_stored_bytes", "stored", "Payload bytes stored.", item="bytes"),
    Counter(
        "kvpool_sidecar_rejected",
        "rejected",
        "Written blocks that were not accepted.",
        "reason",
        {
            "corrupt": "Header or payload failed verification.",
            "full": "The drive had no space for the block.",
            "still-writable": "The client could still write to the file, had sealed it, or the write was given up.",
            "io": "Writing to the drive failed.",
            "token": "The write was unknown or had expired.",
        },
    ),
    Counter(
        "kvpool_sidecar_operations",
        "operations",
        "Finished operations of the operator; the result is KIND-STATE.",
        "result",
        {
            f"{kind}-{state}": text
            for kind in (
                "purge",
                "verify",
                "warm",
                "evacuate",
                "remain",
                "preflight",
                "release",
                "reload",
                "confirm-key-forgotten",
            )
            for state, text in (
                ("succeeded", "The operation finished."),
                ("failed", "The operation failed or was cancelled."),
            )
        },
    ),
    *HINT_COUNTERS,
    Counter(
        "kvpool_sidecar_refused",
        "refused",
        "Refused requests, connections and writes.",
        "reason",
        {
            "admin-certificate": "A caller of the admin API showed no valid certificate.",
            "busy-peers": "Peers' reads exceeded the limit of bytes in flight.",
            "busy-reads": "Loads exceeded the limit of bytes in flight.",
            "busy-requests": "A tenant's requests exceeded its share of the processor time.",
            "busy-writes": "Stores exceeded the limit of bytes in flight.",
            "client-connections": "A pod opened too many connections.",
            "descriptors-in-flight": "A client did not receive the file descriptors sent to it.",
            "full": "The drive had no space and eviction could not free enough.",
            "held-files": "A tenant keeps too many removed blocks open.",
            "io": "The drive returned an error.",
            "peer-certificate": "A peer showed no valid certificate.",
            "peer-connections": "Peers opened too many connections.",
            "peer-proof": "A peer could not prove that it belongs to the pool.",
            "peer-request": "A peer violated the protocol.",
            "protocol": "A client violated the protocol.",
            "stream-not-dialed": "A client did not dial a stream of a peer's blocks in time.",
            "stream-token": "A connection to a stream socket showed no valid token.",
            "streams": "A tenant or a client connection has too many streams of peers' blocks.",
            "too-large": "The block exceeds the configured size.",
            "too-many-writes": "A pod has too many unfinished writes.",
            "unread-descriptors": "A client requested more before it received the file descriptors sent to it.",
        },
    ),
    Counter(
        "kvpool_sidecar_evicted_blocks",
        "evictions",
        "Blocks evicted from the local tier.",
        "cause",
        {
            "capacity": "The tier reached its capacity.",
            "space": "The file system ran out of space.",
            "memory": "The node has the maximum number of blocks, which its memory limit sets.",
            "quota": "A tenant exceeded its quota.",
            "expired": "The block reached its maximum age.",
        },
    ),
    Counter(
        "kvpool_sidecar_removed_miss_lookups",
        "removed_misses",
        "Lookups whose first missing block this node had removed, by the time since its removal.",
        "age",
        {
            "minute": "Less than a minute.",
            "ten-minutes": "Less than 10 minutes.",
            "hour": "Less than an hour.",
            "six-hours": "Less than 6 hours.",
            "day": "Less than a day.",
            "older": "A day or more.",
        },
    ),
    Counter(
        "kvpool_sidecar_drive_events",
        "events",
        "Events of the local drives.",
        "event",
        {
            "evicted": "A block was evicted.",
            "expired": "A block reached its maximum age.",
            "over_quota": "A block was evicted because of its tenant's quota.",
            "purged": "A block was deleted by a purge.",
            "quarantined": "A corrupt block was moved to quarantine.",
            "junk": "A file that is not a valid block was removed.",
            "writers_given_up": "An unfinished write timed out.",
            "io_error": "The drive returned an error.",
        },
    ),
    Counter(
        "kvpool_sidecar_peer_blocks",
        "peer_served",
        "Blocks requested by peers, by result.",
        "result",
        {"blocks": "The block was sent.", "miss": "The block was not on this node."},
        is_closed=True,
    ),
    Counter("kvpool_sidecar_peer_sent_bytes", "peer_served", "Bytes of blocks sent to peers.", item="bytes"),
    Counter(
        "kvpool_sidecar_peer_errors",
        "peer_errors",
        "Failed connections to peers.",
        "reason",
        {
            "unreachable": "The connection failed or timed out.",
            "refused": "A certificate, ticket or address was refused.",
        },
    ),
    Counter(
        "kvpool_sidecar_peer_probes",
        "peer_probes",
        "Probes of peers, which read a response over a new data connection.",
        "result",
        {
            "ok": "The response arrived.",
            "timeout": "The peer did not answer in time.",
            "refused": "The peer or this node did not accept the other's certificate or ticket.",
            "protocol": "The answer was no response of a peer.",
            "unreachable": "No connection could be made, or it ended.",
        },
    ),
    Counter("kvpool_sidecar_rdma_blocks", "rdma", "Blocks read from peers by RDMA.", item="blocks"),
    Counter(
        "kvpool_sidecar_rdma_fallbacks",
        "rdma",
        "Reads from peers that used TCP instead of RDMA.",
        "reason",
        {
            "failed": "The RDMA transfer failed.",
            "no-room": "No registered memory was free on this node.",
            "not-staged": "The peer did not place the block in registered memory.",
            "peer-has-none": "The peer has no RDMA.",
        },
    ),
    Counter(
        "kvpool_sidecar_reports",
        "reports",
        "Verifications of blocks that clients reported as corrupt.",
        "result",
        {
            "checked": "The block was verified.",
            "corrupt": "Of those, the block was corrupt and was moved to quarantine.",
            "dropped": "The queue was full.",
        },
    ),
    Counter(
        "kvpool_events_published",
        "kv_events",
        "Events published to routers.",
        "event",
        {
            "stored": "A block was stored.",
            "removed": "A block was removed.",
            "cleared": "All blocks of the node were cleared; the current ones follow.",
        },
    ),
    Counter("kvpool_events_batches", "kv_events", "Batches of events published.", item="batches"),
    Counter("kvpool_events_replays", "kv_events", "Replays requested by routers.", item="replays"),
    Counter(
        "kvpool_events_lost",
        "kv_events_lost",
        "Changes of blocks that were not published.",
        "reason",
        {
            "unnamed": "The engine gave the block no name.",
            "false-name": "The block's name does not match its id.",
            "too-many": "The limit of tracked blocks was reached.",
            "dropped": "The queue was full; all blocks are published again.",
            "details": "The limit of hashes and token ids was reached; the block is published by its own hash.",
        },
    ),
    Counter(
        "kvpool_events_malformed_replay_requests",
        "kv_events_lost",
        "Malformed replay requests of routers.",
        item="bad-request",
    ),
    Counter(
        "kvpool_events_subscribers_refused",
        "kv_events_lost",
        "Subscribers that presented another key than that of the Secret NAME-events.",
        item="refused",
    ),
    Counter(
        "kvpool_events_prefix_queries",
        "prefix_queries",
        "Queries of routers for the nodes that hold a prompt's prefix.",
        "result",
        {
            "answered": "Answered with the blocks of all nodes.",
            "without-index": "Answered for this node only, because the index did not respond.",
            "malformed": "The request was malformed.",
            "refused": "The request showed no valid token.",
        },
    ),
)

HISTOGRAMS: Final = (
    Histogram(
        "kvpool_sidecar_request_seconds",
        "Duration from a client's request to the sidecar's reply, without the transfer of the payload.",
        "op",
        _OPERATIONS,
    ),
    Histogram(
        "kvpool_client_load_seconds",
        "Duration from the start of a load until the last block of the tier was verified in the engine's buffer.",
        "tier",
        _TIERS,
    ),
    Histogram(
        "kvpool_client_store_seconds", "Duration of a store of one or more new blocks, until they were accepted."
    ),
)
