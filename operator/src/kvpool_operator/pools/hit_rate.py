"""`status.cache` of a pool: hit rate of lookups over all nodes, and results of loads. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from kvpool_operator.api.pool.status import CacheStatus, HitRateWindow, ModelHitRate
from kvpool_operator.sidecars.cache import WINDOWS, sum_reports
from kvpool_operator.text import ratio_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvpool_operator.sidecars.cache import LookupTokens
    from kvpool_operator.sidecars.status import SidecarStatus

__all__ = ["cache_status"]

_MAX_COUNTS = 32
_HEADLINE = WINDOWS[-1]


def cache_status(reports: Sequence[SidecarStatus]) -> CacheStatus:
    """Sum the figures of all nodes."""
    total = sum_reports(report.cache for report in reports)
    hits, failures = _sum(r.hits for r in reports), _sum(r.misses for r in reports)
    loaded = sum(hits.values())
    misses = total.windows[_HEADLINE].misses
    return CacheStatus(
        **_figures(total.windows),
        models=[ModelHitRate(model=model, **_figures(windows)) for model, windows in total.models.items()],
        misses=dict(sorted(misses.items())[:_MAX_COUNTS]),
        load_success_rate=ratio_text(loaded, loaded + sum(failures.values())),
        seconds_saved=(total.saved_us - total.lost_us) // 1_000_000,
        hits=hits,
        bytes=_sum(r.bytes for r in reports),
        load_failures=failures,
    )


def _figures(windows: Mapping[str, LookupTokens]) -> dict[str, Any]:
    headline = windows[_HEADLINE]
    return {
        "tokens_asked": headline.asked,
        "tokens_found": headline.found,
        "hit_rate": ratio_text(headline.found, headline.asked),
        "windows": [
            HitRateWindow(
                window=name,
                tokens_asked=tokens.asked,
                tokens_found=tokens.found,
                hit_rate=ratio_text(tokens.found, tokens.asked),
            )
            for name, tokens in windows.items()
        ],
    }


def _sum(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return dict(sorted(total.items())[:_MAX_COUNTS])
