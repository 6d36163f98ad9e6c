"""Counters of the hit rate: tokens that engines requested, tokens found, and why the rest was not found."""

from __future__ import annotations

from collections import Counter as Sum
from typing import TYPE_CHECKING, Any, Final

from kvpool_sidecar.observability.catalog.families import Counter, StatusCounter
from kvpool_sidecar.serving.lookup_figures import OTHER_MODELS

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEPTH_COUNTER", "GONE", "LOOKUP_COUNTERS", "MISS_REASONS"]

GONE: Final = {
    "never-stored": "No tier has it, and the node has no record of it.",
    "evicted-capacity": "This node evicted it because the tier was full.",
    "evicted-space": "This node evicted it because the file system was full.",
    "evicted-quota": "This node evicted it because its tenant exceeded its quota.",
    "expired": "It reached its maximum age on this node.",
    "purged": "A purge deleted it on this node.",
    "quarantined": "It was corrupt and was moved to quarantine on this node.",
    "fingerprint-differs": "The node has blocks of this model under other fingerprints only.",
    "grant-unused": "A tenant that grants reads has it, and the client is too old to use grants.",
    "index-unavailable": "It is not on this node, and the prefix index does not respond.",
    "peer-unreachable": "Only peers that cannot be reached have it.",
}
"""Causes that sidecars give for lookups and loads."""
MISS_REASONS: Final = {
    **GONE,
    "slower-than-compute": "Loading it would take longer than computing it.",
    "deadline": "The answer did not arrive in time.",
    "busy": "Too many requests were in flight, in the client or on the node.",
    "no-sidecar": "There is no connection to the node's sidecar.",
    "breaker-open": "The circuit breaker is open after repeated failures; no request was sent.",
    "late": "The engine stopped waiting before the lookup was answered.",
    "connection": "The connection failed.",
    "absent": "It was not there, and the client or the sidecar is too old to give a reason.",
}


def _by_model(status: dict[str, Any], figure: str) -> Mapping[str, float]:
    models = status["cache"]["sinceStart"]["models"]
    return {OTHER_MODELS: 0, **{model: figures[figure] for model, figures in models.items()}}


def _misses(status: dict[str, Any]) -> Mapping[str, float]:
    total = Sum(dict.fromkeys(MISS_REASONS, 0))
    for figures in status["cache"]["sinceStart"]["models"].values():
        total.update(figures["misses"])
    return total


_LOOKUP_COUNTERS: Final = (
    StatusCounter(
        "kvpool_client_lookup_tokens",
        "Tokens that engines requested from the pool, by model. Each request counts once. The hit rate's denominator.",
        "model",
        lambda status: _by_model(status, "tokensAsked"),
        {OTHER_MODELS: "Models above the limit of 32, and clients that give no name."},
    ),
    StatusCounter(
        "kvpool_client_lookup_hit_tokens",
        "Of those tokens, the ones that lookups found, by model. The hit rate's numerator.",
        "model",
        lambda status: _by_model(status, "tokensFound"),
        {OTHER_MODELS: "Models above the limit of 32, and clients that give no name."},
    ),
    StatusCounter(
        "kvpool_client_lookup_miss_tokens",
        "Of those tokens, the ones that lookups did not find, by the reason of the first missing block.",
        "reason",
        _misses,
        MISS_REASONS,
    ),
)

_TIME_COUNTERS: Final = (
    StatusCounter(
        "kvpool_client_saved_seconds",
        "Seconds that loads were faster than computing the same tokens, as measured by the vLLM plug-in.",
        "",
        lambda status: {"": status["cache"]["time"]["saved_us"] / 1e6},
    ),
    StatusCounter(
        "kvpool_client_lost_seconds",
        "Seconds that loads were slower than computing the same tokens. Time saved is the difference of both.",
        "",
        lambda status: {"": status["cache"]["time"]["lost_us"] / 1e6},
    ),
    StatusCounter(
        "kvpool_client_computed_tokens",
        "Tokens that engines computed while the vLLM plug-in measured their rate.",
        "",
        lambda status: {"": status["cache"]["time"]["computed_tokens"]},
    ),
    StatusCounter(
        "kvpool_client_computed_seconds",
        "Seconds in which these tokens were computed.",
        "",
        lambda status: {"": status["cache"]["time"]["computed_us"] / 1e6},
    ),
)

LOOKUP_COUNTERS: Final = (*_LOOKUP_COUNTERS, *_TIME_COUNTERS)

DEPTH_COUNTER: Final = Counter(
    "kvpool_client_broken_lookups",
    "client_lookup_depth",
    "Lookups that found fewer blocks than they requested, by the number of blocks found before the first missing one.",
    "depth",
    {
        "start": "None: the first block was missing.",
        "below-4": "1 to 3 blocks.",
        "below-16": "4 to 15 blocks.",
        "below-64": "16 to 63 blocks.",
        "below-256": "64 to 255 blocks.",
        "deep": "256 blocks or more.",
    },
)
