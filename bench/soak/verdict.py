"""What must not be: pure functions of what was seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool_testing.residue import slope

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

__all__ = ["growing", "latency", "outcomes"]

_WARM_UP = 0.4  # of the time: caches, thread stacks and arenas fill
_MIB = 1 << 20


def growing(samples: Sequence[tuple[float, int]], *, limit_mib: float, limit_mib_min: float) -> tuple[float, bool]:
    """(MiB a minute after the warm-up, whether that is growth): a slope, and a rise that noise does not explain.

    `samples` are (seconds, bytes). Both limits must be passed: a slope alone is noise over few minutes, a rise alone is
    a cache that fills once.
    """
    if not samples:
        return 0.0, False
    first, last = samples[0][0], samples[-1][0]
    warm = [(t, float(b)) for t, b in samples if t >= first + (last - first) * _WARM_UP]
    per_minute = slope(warm) * 60 / _MIB
    third = max(1, len(warm) // 3)
    rise = (min(b for _, b in warm[-third:]) - max(b for _, b in warm[:third])) / _MIB
    return round(per_minute, 2), per_minute > limit_mib_min and rise > limit_mib


def outcomes(counts: Counter[str]) -> dict[str, Any]:
    """Hits by tier, misses by reason, stores by outcome."""
    loads = {k.partition(":")[2]: n for k, n in counts.items() if k.startswith("load:")}
    tiers = {"local", "peer", "shared", "memory"}
    return {
        "lookups": counts["lookup"],
        "reads": counts["load"],
        "writes": counts["store"],
        "hits": {k: n for k, n in sorted(loads.items()) if k in tiers},
        "misses": {k: n for k, n in sorted(loads.items()) if k not in tiers},
        "stores": {k.partition(":")[2]: n for k, n in sorted(counts.items()) if k.startswith("store:")},
    }


def latency(parts: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Of several processes: the median of each is weighed by its calls; p99 and the largest are the worst of all."""
    together: dict[str, dict[str, float]] = {}
    for op in ("lookup", "load", "store"):
        rows = [part[op] for part in parts if part.get(op)]
        if rows:
            calls = sum(row["calls"] for row in rows)
            together[op] = {
                "calls": calls,
                "p50_ms": round(sum(row["p50_ms"] * row["calls"] for row in rows) / calls, 3),
                "p99_ms": max(row["p99_ms"] for row in rows),
                "max_ms": max(row["max_ms"] for row in rows),
                "worst_over_deadline_ms": max(row["worst_over_deadline_ms"] for row in rows),
            }
    return together
