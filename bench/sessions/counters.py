"""What engines tell Prometheus, before and after a run. Pure."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["grown", "missed", "queueing_ms", "read", "tokens_from"]

# name and label of each place that KV can come from, by what it is called in the table
_SOURCES = {
    ("vllm:prompt_tokens_by_source_total", "local_cache_hit"): "engine",
    ("vllm:prompt_tokens_by_source_total", "external_kv_transfer"): "outside",
    ("vllm:prompt_tokens_by_source_total", "local_compute"): "computed",
    ("kvpool:loaded_tokens_total", "local"): "local",
    ("kvpool:loaded_tokens_total", "peer"): "peer",
    ("kvpool:loaded_tokens_total", "shared"): "shared",
}
_QUEUE = "vllm:request_queue_time_seconds"
_MISSED = "kvpool:missed_blocks_total"
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Counters = Counter[tuple[str, str]]


def read(pages: Iterable[str]) -> Counters:
    """The sums over all pages of what the table needs, by name and the label that matters (source, tier or reason)."""
    found: Counters = Counter()
    for page in pages:
        for line in page.splitlines():
            match = _LINE.match(line)
            if match is None or not match[1].startswith(("vllm:", "kvpool:")):
                continue
            labels = dict(_LABEL.findall(match[2] or ""))
            name = (match[1], labels.get("source") or labels.get("tier") or labels.get("reason") or "")
            if name in _SOURCES or match[1] in (_QUEUE + "_sum", _QUEUE + "_count", _MISSED):
                found[name] += float(match[3])  # type: ignore[assignment]
    return found


def grown(before: Counters, after: Counters) -> Counters:
    """What was counted between the two."""
    return Counter({name: value - before[name] for name, value in after.items()})


def tokens_from(counted: Counters) -> dict[str, int]:
    """Prompt tokens by where their KV came from. Empty where the engine does not say.

    `local`, `peer`, `shared` are the pool's tiers; `outside` is what came by the engine's connector and is in none of
    them: its host memory, or another system's storage. A loaded block may hold tokens that the engine computes anew,
    at most one block a request, so the tiers together can be above what the connector says; `outside` is then 0.
    """
    found = {shown: int(counted[name]) for name, shown in _SOURCES.items() if name in counted}
    if "outside" in found:
        found["outside"] = max(0, found["outside"] - sum(found.get(tier, 0) for tier in ("local", "peer", "shared")))
    return {name: found[name] for name in found if found[name] or name in ("engine", "computed")}


def missed(counted: Counters) -> dict[str, int]:
    """Blocks that the pool was asked for and did not deliver, by reason."""
    return {reason: int(count) for (name, reason), count in counted.items() if name == _MISSED and count}


def queueing_ms(counted: Counters) -> float | None:
    """Mean time of a request in the engine's queue."""
    count = counted[_QUEUE + "_count", ""]
    return round(counted[_QUEUE + "_sum", ""] / count * 1000, 1) if count else None
