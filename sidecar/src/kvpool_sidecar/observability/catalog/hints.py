"""Counters and gauges of session hints."""

from __future__ import annotations

from typing import Final

from kvpool_sidecar.observability.catalog.families import Counter, Gauge

__all__ = ["HINT_COUNTERS", "HINT_GAUGES"]

_KINDS: Final = {
    "ended": "A session has ended",
    "keep": "A session continues in about a given time",
    "ttl": "An application asked to retain the blocks",
    "resume": "A session continues on this node soon",
    "forget": "Earlier hints no longer hold",
    "turn": "A prompt of a session",
}
_OUTCOMES: Final = {
    "accepted": "the hint was applied.",
    "clipped": "some blocks took the hint; the tenant's share is used up.",
    "no-blocks": "none of the blocks is here, or all are shared with other sessions.",
    "unknown-session": "this node knows no block of the session.",
    "limited": "dropped: more than 100 a second of one tenant, or too many were waiting.",
    "off": "dropped: the pool accepts no hints.",
}
HINT_COUNTERS: Final = (
    Counter(
        "kvpool_sidecar_hints",
        "hints",
        "Session hints; the result is KIND-OUTCOME.",
        "result",
        {
            f"{kind}-{outcome}": f"{said}; {text}"
            for kind, said in _KINDS.items()
            for outcome, text in _OUTCOMES.items()
        },
    ),
    Counter(
        "kvpool_sidecar_forwarded_hints",
        "hints_forwarded",
        "Hints sent to other nodes that have the session's blocks.",
        "result",
        {
            "applied": "The node had blocks of the session.",
            "unknown": "The node does not know the session.",
            "failed": "The node did not answer, or is of an older release; it gets no hints for 10 minutes.",
        },
    ),
    Counter(
        "kvpool_sidecar_resumed_blocks",
        "resumed",
        "Blocks of sessions that were announced on this node.",
        "result",
        {
            "prefetched": "Queued for prefetching from a drive or the shared tier.",
            "copied": "Copied from a peer.",
            "have": "A copy had arrived by then.",
            "full": "There was no space for the copy.",
            "absent": "No peer has the block, or none delivered it.",
            "refused": "This node is drained, or the block is too large.",
            "busy": "Too many copies were in flight.",
            "dropped": "Too many sessions were waiting (counted once each).",
        },
    ),
    Counter(
        "kvpool_sidecar_hint_requests",
        "hint_requests",
        "POST /hints requests.",
        "result",
        {
            "answered": "Answered.",
            "malformed": "The request was invalid.",
            "refused": "The token was missing or wrong.",
        },
    ),
)
HINT_GAUGES: Final = (
    Gauge(
        "hint_truth",
        "Share of the sessions that continued as announced, lately, 0 to 1; 0 without any.",
        lambda s: s["hints"]["truth"],
    ),
    Gauge(
        "hint_expected_bytes",
        "Bytes of blocks that sessions expect to use again.",
        lambda s: s["hints"]["expected_bytes"],
    ),
    Gauge("hint_sessions", "Sessions whose blocks this node knows.", lambda s: s["hints"]["sessions"]),
    Gauge(
        "residency_seconds",
        "Time in which the stores of hinting tenants fill the drives once: a session must be reported as ended within "
        "it to free room. 0: unknown.",
        lambda s: s["hints"]["residency_seconds"],
    ),
)
