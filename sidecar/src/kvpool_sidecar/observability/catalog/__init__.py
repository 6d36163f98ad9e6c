"""Catalog of the sidecar's metrics: name, unit, labels, label values and their meaning.

Each family has one unit, so that a sum over all of its labels is meaningful. docs/reference/metrics.md is generated
from this catalog. The `source` of a counter is a family of kvpool_sidecar.counters, whose names also stand in /status
and do not change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_sidecar.observability.catalog.gauges import BREAKER_PARTS, EVENT_GAUGES, GAUGES, gc_status
from kvpool_sidecar.observability.catalog.lookups import DEPTH_COUNTER, LOOKUP_COUNTERS
from kvpool_sidecar.observability.catalog.replication import REPLICATION_COUNTERS
from kvpool_sidecar.observability.catalog.serving import HISTOGRAMS, SERVING_COUNTERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool_sidecar.observability.catalog.families import Counter

__all__ = [
    "BREAKER_PARTS",
    "COUNTERS",
    "EVENT_GAUGES",
    "GAUGES",
    "HISTOGRAMS",
    "LOOKUP_COUNTERS",
    "gc_status",
    "select",
]

COUNTERS: Final = (*SERVING_COUNTERS, DEPTH_COUNTER, *REPLICATION_COUNTERS)


def _claimed() -> dict[str, set[str]]:
    """Return, by source, the counts that a family without label or with a closed list of values exports."""
    claimed: dict[str, set[str]] = {counter.source: set() for counter in COUNTERS}
    for counter in COUNTERS:
        if not counter.label:
            claimed[counter.source].add(counter.item)
        elif counter.is_closed:
            claimed[counter.source].update(counter.values)
    return claimed


_CLAIMED: Final = _claimed()


def select(counter: Counter, counts: Mapping[str, float]) -> dict[str, float]:
    """Return the counts of one family by label value; the key is empty for a family without a label.

    Listed values that were never counted are 0: the rate of a series that is not there is no number.
    """
    if not counter.label:
        return {"": counts.get(counter.item, 0)}
    listed: dict[str, float] = dict.fromkeys(counter.values, 0)
    if counter.is_closed:
        return listed | {value: n for value, n in counts.items() if value in counter.values}
    return listed | {value: n for value, n in counts.items() if value not in _CLAIMED[counter.source]}
