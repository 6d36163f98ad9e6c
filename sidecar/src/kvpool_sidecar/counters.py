"""Counters and histograms of this process, read by /status and /metrics. Thread-safe.

Labels may come from clients, so their number is bounded; further labels are counted as `other`.
"""

from __future__ import annotations

import re
import threading
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from kvpool.stats import Histogram

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Stats"]

_LABEL = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_MAX_LABELS = 48


class Stats:
    """Counters by family and label: `add("served", "local", 3)`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._histograms: defaultdict[str, dict[str, Histogram]] = defaultdict(dict)

    def add(self, family: str, label: str, n: float = 1) -> None:
        """Add to a counter. `label` may be any text; an invalid one is counted as `other`."""
        if not _LABEL.fullmatch(label):
            label = "other"
        with self._lock:
            counter = self._families[family]
            if label not in counter and len(counter) >= _MAX_LABELS:
                label = "other"
            counter[label] += n  # type: ignore[assignment]  # seconds are not integers

    def family(self, family: str) -> dict[str, float]:
        """Return the counts by label."""
        with self._lock:
            return dict(self._families.get(family, {}))

    def whole(self, family: str) -> dict[str, int]:
        """Return the counts by label as integers."""
        return {label: int(n) for label, n in self.family(family).items()}

    def observe(self, family: str, label: str, seconds: float) -> None:
        """Record the duration of one request; the caller bounds the labels."""
        with self._lock:
            self._histogram(family, label).observe(seconds)

    def observe_packed(self, family: str, label: str, packed: Sequence[int]) -> None:
        """Add a client's histogram, as `kvpool.stats.Histogram.packed`; the caller bounds the labels."""
        with self._lock:
            histogram = self._histogram(family, label)
            histogram.counts = [n + more for n, more in zip(histogram.counts, packed[:-1], strict=True)]
            histogram.micros += packed[-1]

    def histograms(self, family: str) -> dict[str, list[int]]:
        """Return the histograms by label, as `kvpool.stats.Histogram.packed`."""
        with self._lock:
            return {label: histogram.packed for label, histogram in self._histograms.get(family, {}).items()}

    def _histogram(self, family: str, label: str) -> Histogram:
        by_label = self._histograms[family]
        return by_label.get(label) or by_label.setdefault(label, Histogram())
