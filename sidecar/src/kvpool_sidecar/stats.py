"""What this sidecar has counted, in one place: /status and /metrics read it. Thread-safe.

Labels may come from clients, so their number is bounded: beyond it everything is counted as `other`.
"""

from __future__ import annotations

import re
import threading
from collections import Counter, defaultdict

__all__ = ["Stats"]

_LABEL = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_MAX_LABELS = 48


class Stats:
    """Counters by family and label: `add("served", "local", 3)`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: defaultdict[str, Counter[str]] = defaultdict(Counter)

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
