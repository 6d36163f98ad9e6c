"""Hit rate as sidecars report it in `cache` of /status, and its sum over nodes. Pure; invalid values count as 0."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.text import parse_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["MAX_MODELS", "OTHER_MODELS", "WINDOWS", "CacheReport", "LookupTokens", "sum_reports"]

WINDOWS: Final = ("5m", "1h")
"""Sliding windows, the headline last."""
MAX_MODELS: Final = 32
OTHER_MODELS: Final = "other"
_MAX_REASONS: Final = 32
_MAX_NAME: Final = 128


@dataclass(frozen=True)
class LookupTokens:
    """Tokens that lookups asked for and found in one window, and those not found by reason."""

    asked: int = 0
    found: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheReport:
    """Lookups by window, in total and by model."""

    windows: Mapping[str, LookupTokens] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, LookupTokens]] = field(default_factory=dict)
    saved_us: int = 0
    """Microseconds that loads were faster than computing."""
    lost_us: int = 0
    """Microseconds that loads were slower than computing."""

    @classmethod
    def parse(cls, raw: Any) -> CacheReport:
        """Never raises."""
        r = raw if isinstance(raw, dict) else {}
        models = r.get("models")
        rows = [m for m in models[:MAX_MODELS] if isinstance(m, dict)] if isinstance(models, list) else []
        by_model = {m["model"][:_MAX_NAME]: _windows(m) for m in rows if isinstance(m.get("model"), str)}
        times = r["time"] if isinstance(r.get("time"), dict) else {}
        return cls(_windows(r), by_model, parse_count(times.get("saved_us")), parse_count(times.get("lost_us")))


def sum_reports(reports: Iterable[CacheReport]) -> CacheReport:
    """Return the sum over all nodes. Of more than MAX_MODELS models, those asked for least are summed as `other`."""
    reports = list(reports)
    by_model: dict[str, list[Mapping[str, LookupTokens]]] = {}
    for report in reports:
        for model, windows in report.models.items():
            by_model.setdefault(model, []).append(windows)
    summed = {model: _sum_windows(each) for model, each in by_model.items()}
    ranked = sorted(summed, key=lambda model: (model == OTHER_MODELS, -summed[model][WINDOWS[-1]].asked, model))
    kept, rest = ranked[: MAX_MODELS - 1], ranked[MAX_MODELS - 1 :]
    models = {model: summed[model] for model in kept}
    if rest:
        models[OTHER_MODELS] = _sum_windows(summed[model] for model in rest)
    saved, lost = sum(report.saved_us for report in reports), sum(report.lost_us for report in reports)
    return CacheReport(_sum_windows(report.windows for report in reports), models, saved, lost)


def _windows(raw: Mapping[str, Any]) -> dict[str, LookupTokens]:
    windows = raw.get("windows")
    rows = windows[: 2 * len(WINDOWS)] if isinstance(windows, list) else []
    by_name = {row["window"]: row for row in rows if isinstance(row, dict) and isinstance(row.get("window"), str)}
    return {name: _tokens(by_name.get(name, {})) for name in WINDOWS}


def _tokens(row: Mapping[str, Any]) -> LookupTokens:
    asked = parse_count(row.get("tokensAsked"))
    misses = row.get("misses")
    counts = list(misses.items())[:_MAX_REASONS] if isinstance(misses, dict) else []
    by_reason = {str(reason)[:64]: parse_count(n) for reason, n in counts}
    return LookupTokens(asked, min(parse_count(row.get("tokensFound")), asked), by_reason)


def _sum_windows(each: Iterable[Mapping[str, LookupTokens]]) -> dict[str, LookupTokens]:
    rows = list(each)
    return {name: _sum(row[name] for row in rows if name in row) for name in WINDOWS}


def _sum(each: Iterable[LookupTokens]) -> LookupTokens:
    asked = found = 0
    misses: Counter[str] = Counter()
    for tokens in each:
        asked += tokens.asked
        found += tokens.found
        misses.update(tokens.misses)
    return LookupTokens(asked, found, misses)
