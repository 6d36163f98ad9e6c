"""Counters of the pool at vLLM's /metrics. Needs vLLM."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Counters", "counter_definitions"]

_TOKENS = "kvpool:loaded_tokens"
_MISSES = "kvpool:missed_blocks"
_LOOKUPS = "kvpool:lookups"
_STORED = "kvpool:stored_bytes"


def counter_definitions() -> dict[str, Any]:
    """Return name -> OffloadingCounterMetadata."""
    return {
        _TOKENS: OffloadingCounterMetadata(
            documentation="Tokens whose KV was loaded from the pool, by tier.", labelnames=("tier",)
        ),
        _MISSES: OffloadingCounterMetadata(
            documentation="Blocks that were not loaded from the pool, by reason.", labelnames=("reason",)
        ),
        _LOOKUPS: OffloadingCounterMetadata(
            documentation="Lookups of requests: how many, how many were complete, blocks asked for and found.",
            labelnames=("figure",),
        ),
        _STORED: OffloadingCounterMetadata(documentation="Bytes stored, by outcome.", labelnames=("outcome",)),
    }


class Counters:
    """Growth of the counters since the last call. For one thread."""

    def __init__(self) -> None:
        self._reported: collections.Counter[tuple[str, str]] = collections.Counter()

    def grown(self, tokens: Mapping[str, int], client: Mapping[str, Any]) -> Any:
        """Return the growth as OffloadingConnectorStats, None without any. `client`: Client.stats()."""
        counters = {(_TOKENS, tier): n for tier, n in tokens.items()}
        counters.update({(_MISSES, reason): n for reason, n in client["misses"].items()})
        counters.update({(_LOOKUPS, figure): n for figure, n in client["lookup"].items()})
        counters.update({(_STORED, outcome): n for outcome, n in client["stored_bytes"].items()})
        grown = {name: n - self._reported[name] for name, n in counters.items() if n > self._reported[name]}
        if not grown:
            return None
        stats = OffloadingConnectorStats()
        for (metric, label), count in grown.items():
            stats.increase_counter(metric, count, (label,))
            self._reported[metric, label] += count
        return stats
