"""Hit rate of lookups: tokens found over tokens asked, by model, over sliding windows. Thread-safe and bounded.

A lookup counts once for each request as the engine's user sees it: clients count their lookups and report them. For
older clients the sidecar counts each LOOKUP request. Times are those of a monotonic clock.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvpool.stats import ratio_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["MAX_MODELS", "MAX_TENANT_MODELS", "OTHER_MODELS", "WINDOWS", "LookupCounts", "LookupFigures"]

WINDOWS: Final = {"5m": 300, "1h": 3600}
"""Length in seconds by name; the last one is the headline."""
MAX_MODELS: Final = 32
OTHER_MODELS: Final = "other"
"""Stands for all models above MAX_MODELS, and for clients that give no name."""
MAX_TENANT_MODELS: Final = 128
"""Pairs of tenant and model with figures of their own."""
_BUCKET_S: Final = 15
_MAX_NAME: Final = 128


@dataclass(frozen=True)
class LookupCounts:
    """Lookups of one model. Blocks become tokens by the tokens of one block."""

    asked: int = 0
    found: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)
    """Tokens that were not found, by the reason of the first missing block."""
    requests: int = 0
    complete: int = 0
    """Lookups whose blocks were all found."""

    def in_tokens(self, per_block: int) -> LookupCounts:
        """Return the counts of blocks as counts of tokens."""
        misses = {reason: n * per_block for reason, n in self.misses.items()}
        return LookupCounts(self.asked * per_block, self.found * per_block, misses, self.requests, self.complete)


class _Sum:
    """Mutable sum of LookupCounts."""

    __slots__ = ("asked", "complete", "found", "misses", "requests")

    def __init__(self) -> None:
        self.asked = self.found = self.requests = self.complete = 0
        self.misses: Counter[str] = Counter()

    def add(self, counts: LookupCounts | _Sum) -> None:
        self.asked += counts.asked
        self.found += counts.found
        self.requests += counts.requests
        self.complete += counts.complete
        self.misses.update(counts.misses)

    def report(self) -> dict[str, Any]:
        return {
            "tokensAsked": self.asked,
            "tokensFound": self.found,
            "hitRate": ratio_text(self.found, self.asked),
            "requests": self.requests,
            "complete": self.complete,
            "misses": dict(sorted(self.misses.items())),
        }


class LookupFigures:
    """Lookups by model, in total since the process started and in buckets of 15 s for an hour.

    `per_tenant`: by the tag of the tenant, too. `most`: names with figures of their own.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, per_tenant: bool = False, most: int = MAX_MODELS
    ) -> None:
        self._clock = clock
        self._most = most
        self._by_tenant = LookupFigures(clock, most=MAX_TENANT_MODELS) if per_tenant else None
        self._lock = threading.Lock()
        self._totals: dict[str, _Sum] = {}
        self._buckets: OrderedDict[int, dict[str, _Sum]] = OrderedDict()  # by number, oldest first

    def record(self, model: str, counts: LookupCounts, tag: bytes = b"") -> None:
        """Add lookups of `model` that have ended. `tag`: of the tenant."""
        if self._by_tenant is not None:
            self._by_tenant.record(f"{tag.hex()} {model}", counts)
        with self._lock:
            name = self._name(model)
            self._totals.setdefault(name, _Sum()).add(counts)
            number = int(self._clock()) // _BUCKET_S
            self._buckets.setdefault(number, {}).setdefault(name, _Sum()).add(counts)
            self._expire(number)

    def status(self) -> dict[str, Any]:
        """Return the figures for /status: the headline, each window, each model, and totals since the start."""
        with self._lock:
            number = int(self._clock()) // _BUCKET_S
            self._expire(number)
            models = sorted(self._totals)
            windows = {
                name: self._window(number - seconds // _BUCKET_S, self._buckets) for name, seconds in WINDOWS.items()
            }
            totals = {model: self._totals[model].report() for model in models}
        tenants = {"tenants": self._by_tenant.tenants()} if self._by_tenant is not None else {}
        return {
            **_headline(windows, None),
            **tenants,
            "models": [{"model": model, **_headline(windows, model)} for model in models],
            "sinceStart": {"models": totals},
        }

    def tenants(self) -> list[dict[str, Any]]:
        """Return the last hour by tag and model, of figures that were recorded under `tag model`."""
        rows = []
        for row in self.status()["models"]:
            has_tag = row["model"] != OTHER_MODELS
            tag, _, model = row["model"].partition(" ") if has_tag else ("", "", OTHER_MODELS)
            tokens = {name: row[name] for name in ("tokensAsked", "tokensFound")}
            rows.append({"tenant": tag, "model": model or OTHER_MODELS, **tokens})
        return rows

    def _name(self, model: str) -> str:
        name = "".join(c for c in model if c.isprintable())[:_MAX_NAME] or OTHER_MODELS
        return name if name in self._totals or len(self._totals) < self._most - 1 else OTHER_MODELS

    def _expire(self, number: int) -> None:
        oldest = number - max(WINDOWS.values()) // _BUCKET_S
        while self._buckets and (first := next(iter(self._buckets))) <= oldest:
            del self._buckets[first]

    @staticmethod
    def _window(after: int, buckets: Mapping[int, Mapping[str, _Sum]]) -> dict[str, _Sum]:
        found: dict[str, _Sum] = {}
        for number, models in buckets.items():
            if number > after:
                for model, counts in models.items():
                    found.setdefault(model, _Sum()).add(counts)
        return found


def _headline(windows: Mapping[str, Mapping[str, _Sum]], model: str | None) -> dict[str, Any]:
    """Return the figures of one model, or of all for None, by window; those of the longest window are on top."""
    rows = []
    for name, sums in windows.items():
        total = _total(counts for each, counts in sums.items() if model in (None, each))
        rows.append({"window": name, **total.report()})
    headline = {name: value for name, value in rows[-1].items() if name != "window"}
    return {**headline, "windows": rows}


def _total(sums: Iterable[_Sum]) -> _Sum:
    total = _Sum()
    for one in sums:
        total.add(one)
    return total
