"""What this sidecar has counted, in one place: /status and /metrics read it. Thread-safe.

Labels may come from clients, so their number is bounded: beyond it everything is counted as `other`.
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
        """`family` is one of ours; `label` may be anything."""
        if not _LABEL.fullmatch(label):
            label = "other"
        with self._lock:
            counter = self._families[family]
            if label not in counter and len(counter) >= _MAX_LABELS:
                label = "other"
            counter[label] += n  # type: ignore[assignment]  # seconds are no whole numbers

    def family(self, family: str) -> dict[str, float]:
        """Counts by label so far."""
        with self._lock:
            return dict(self._families.get(family, {}))

    def whole(self, family: str) -> dict[str, int]:
        """The same, for counts."""
        return {label: int(n) for label, n in self.family(family).items()}

    def observe(self, family: str, label: str, seconds: float) -> None:
        """One request of `label`, which is one of ours, took so long."""
        with self._lock:
            self._histogram(family, label).observe(seconds)

    def observe_packed(self, family: str, label: str, packed: Sequence[int]) -> None:
        """What a client observed, as `kvpool.stats.Histogram.packed`. `label` is one that the caller knows."""
        with self._lock:
            histogram = self._histogram(family, label)
            histogram.counts = [n + more for n, more in zip(histogram.counts, packed[:-1], strict=True)]
            histogram.micros += packed[-1]

    def histograms(self, family: str) -> dict[str, list[int]]:
        """By label, as `kvpool.stats.Histogram.packed`."""
        with self._lock:
            return {label: histogram.packed for label, histogram in self._histograms.get(family, {}).items()}

    def _histogram(self, family: str, label: str) -> Histogram:
        found = self._histograms[family]
        return found.get(label) or found.setdefault(label, Histogram())
