"""Results of loads and stores, one per block, and the counters they add to a client's statistics."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kvpool.protocol.wire import Tier
from kvpool.stats import STORE, Reason
from kvpool.transport.store import StoreOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool.stats import Stats
    from kvpool.transport.pending import PendingRead

__all__ = ["LoadResult", "StoreResult", "load_results", "store_results"]


class LoadResult(NamedTuple):
    """Outcome of loading one block. Unless `ok`, the buffer may hold garbage and must not be used.

    `tier`: where the block came from; `reason`: Reason.NONE if ok; `bytes`: payload length, 0 unless ok.
    """

    ok: bool
    tier: Tier
    reason: Reason
    bytes: int


class StoreResult(NamedTuple):
    """Outcome of storing one block.

    `ok`: the pool has the block now; `stored`: this call wrote it; `reason`: Reason.NONE if ok; `bytes`: written by
    this call.
    """

    ok: bool
    stored: bool
    reason: Reason
    bytes: int


def load_results(
    views: Sequence[memoryview | None], loads: Sequence[PendingRead], reason: Reason, stats: Stats, began: float
) -> list[LoadResult]:
    """Build one result per buffer and count hits, misses, bytes and times.

    `views`: None for a buffer that cannot be used; `reason`: of blocks that were never requested; `began`: start of the
    call by time.monotonic().
    """
    by_position = {load.position: load for load in loads}
    results = []
    counts: Counter[tuple[str, str]] = Counter()
    hits: Counter[tuple[Tier, int]] = Counter()  # by tier and size: few distinct keys, so cheap
    seconds: dict[str, float] = {}
    for i, view in enumerate(views):
        load = by_position.get(i)
        if load is not None and load.ok:
            size = len(load.view)
            result = LoadResult(True, load.tier, Reason.NONE, size)
            hits[load.tier, size] += 1
            if load.done > seconds.get(name := load.tier.name.lower(), 0.0):
                seconds[name] = load.done
        else:
            why = Reason.BUFFER if view is None else (load.reason if load else Reason.NONE) or reason
            result = LoadResult(False, load.tier if load else Tier.MISS, why, 0)
            counts["misses", why] += 1
        results.append(result)
    for (tier, size), count in hits.items():
        counts["hits", tier.name.lower()] += count
        counts["bytes", tier.name.lower()] += count * size
    stats.add_all(counts, {name: done - began for name, done in seconds.items()})
    return results


def store_results(
    views: Sequence[memoryview | None],
    outcomes: dict[int, StoreOutcome | Reason],
    reason: Reason,
    stats: Stats,
    seconds: float,
) -> list[StoreResult]:
    """Build one result per buffer and count outcomes and bytes; `seconds`: duration of the call."""
    results = []
    counts: Counter[tuple[str, str]] = Counter()
    for i, view in enumerate(views):
        outcome = Reason.BUFFER if view is None else outcomes.get(i, reason)
        if view is not None and outcome is StoreOutcome.STORED:
            results.append(StoreResult(True, True, Reason.NONE, len(view)))
            counts["stored_bytes", outcome] += len(view)
        elif isinstance(outcome, StoreOutcome):
            results.append(StoreResult(True, False, Reason.NONE, 0))
        else:
            results.append(StoreResult(False, False, outcome, 0))
        counts["stores", outcome] += 1
    stored = any(result.stored for result in results)
    stats.add_all(counts, {STORE: seconds} if stored else None)
    return results
