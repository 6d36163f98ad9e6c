"""What is asked of the pool, and what a run got. Pure: from the numbers that are written to the JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Row", "rows"]

OURS = "kvpool"


@dataclass(frozen=True)
class Row:
    """`met` is None where the run did not measure it; then `got` says why."""

    asked: str
    got: str
    met: bool | None


def rows(result: dict[str, Any]) -> list[Row]:
    """One for each promise of the pool, from a whole run's result."""
    pairs = result["systems"].get(OURS, {}).get("pairs") or {}
    return [
        _same_tier(pairs),
        _recompute(pairs),
        *(_beside_others(result["systems"], share) for share in ("p50", "p95")),
        *_overhead(result.get("overhead") or {}),
        _tokens(result),
    ]


def _same_tier(pairs: dict[str, Any]) -> Row:
    asked = "migrated turn's TTFT <= 1.15 x the same turn that stayed, served by the same kind of tier"
    value = pairs.get("migrated_over_sticky")
    if value is None:
        return Row(asked, "not measured", None)
    moved, stayed = pairs["migrated"]["tokens_from"], pairs["sticky"]["tokens_from"]
    whence = f"moved: {_whence(moved)}; stayed: {_whence(stayed)}"
    if not moved.get("peer") or not stayed.get("local"):
        return Row(asked, f"{value:.2f}, but not by way of the tiers ({whence})", None)
    return Row(asked, f"{value:.2f} ({whence})", value <= 1.15)


def _recompute(pairs: dict[str, Any]) -> Row:
    asked = "migrated turn's TTFT <= 0.35 x computing the prompt"
    value = pairs.get("migrated_over_recompute")
    if value is None:
        return Row(asked, "not measured", None)
    turns = pairs["migrated"]["turns"] or 1
    length = sum(pairs["recompute"]["tokens_from"].values()) // turns
    return Row(asked, f"{value:.2f} ({length} tokens)", value <= 0.35)


def _beside_others(systems: dict[str, Any], share: str) -> Row:
    asked = f"at or ahead of every other system on TTFT {share}, sessions that migrate, turns after the first"
    found = {name: value for name in systems if (value := _migrating(systems[name], share)) is not None}
    ours = found.pop(OURS, None)
    if ours is None or not found:
        return Row(asked, "not measured", None)
    others = ", ".join(f"{name} {value:.0f}" for name, value in sorted(found.items(), key=lambda kv: kv[1]))
    missing = ", ".join(name for name in systems if name not in found and name != OURS)
    note = f" (not measured: {missing})" if missing else ""
    return Row(asked, f"{ours:.0f} ms beside {others}{note}", ours <= min(found.values()))


def _migrating(system: dict[str, Any], share: str) -> float | None:
    """Over all rates. None if turns failed: who answers only some of them is not compared."""
    found = system.get("migrating_later_ms") or {}
    return found.get(share) if not found.get("errors") else None


def _overhead(found: dict[str, Any]) -> list[Row]:
    ttft, rate = found.get("ttft_ratio"), found.get("tokens_per_s_ratio")
    asked = "cold overhead (pool on, no hits) <= 3 % of TTFT", "cold overhead <= 3 % of tokens/s"
    if ttft is None or rate is None:
        return [Row(one, "not measured", None) for one in asked]
    return [
        Row(asked[0], f"{(ttft - 1) * 100:+.1f} % ({_spread(found, 'ttft_ratios')})", ttft <= 1.03),
        Row(asked[1], f"{(rate - 1) * 100:+.1f} % ({_spread(found, 'tokens_per_s_ratios')})", rate >= 0.97),
    ]


def _spread(found: dict[str, Any], name: str) -> str:
    """How many pairs the median is of, and how far apart they are: what this machine could tell."""
    percents = [(value - 1) * 100 for value in found.get(name, [])]
    apart = f", from {min(percents):+.0f} to {max(percents):+.0f} %" if percents else ""
    return f"median of {found['pairs']} pairs{apart}"


def _tokens(result: dict[str, Any]) -> Row:
    asked = "0 differing tokens in all runs"
    ours = result["systems"].get(OURS) or {}
    parts = [*ours.get("plays", []), ours.get("pairs") or {}, result.get("overhead") or {}]
    compared = sum(p.get("compared_tokens", 0) for p in parts)
    wrong = sum(p.get("differing_tokens", 0) for p in parts)
    if not compared:
        return Row(asked, "not measured", None)
    return Row(asked, f"{wrong} of {compared}", wrong == 0)


def _whence(tokens: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in tokens.items() if count)
