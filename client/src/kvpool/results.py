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


_NAMES = {tier: tier.name.lower() for tier in Tier}


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
    counts: dict[tuple[str, str], int] = {}
    hits: dict[tuple[Tier, int], LoadResult] = {}  # by tier and size: few distinct keys, so cheap
    numbers: dict[tuple[Tier, int], int] = {}
    last: dict[Tier, float] = {}
    for i, view in enumerate(views):
        load = by_position.get(i)
        if load is not None and load.ok:
            hit = load.tier, len(load.view)
            if (result := hits.get(hit)) is None:
                result = hits[hit] = LoadResult(True, load.tier, Reason.NONE, hit[1])
            numbers[hit] = numbers.get(hit, 0) + 1
            if load.done > last.get(load.tier, 0.0):
                last[load.tier] = load.done
        else:
            why = Reason.BUFFER if view is None else (load.reason if load else Reason.NONE) or reason
            result = LoadResult(False, load.tier if load else Tier.MISS, why, 0)
            counts["misses", why] = counts.get(("misses", why), 0) + 1
        results.append(result)
    for (tier, size), count in numbers.items():
        name = _NAMES[tier]
        counts["hits", name] = counts.get(("hits", name), 0) + count
        counts["bytes", name] = counts.get(("bytes", name), 0) + count * size
    stats.add_all(counts, {_NAMES[tier]: done - began for tier, done in last.items()})
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
