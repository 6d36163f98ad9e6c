"""Tables of a result, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.sessions.asked import Row

__all__ = ["asked_table", "pairs_table", "plays_table"]

_HEAD = (
    "system", "routing", "qps", "TTFT ms p50", "p95", "p99", "after round 1: p50", "p95", "tok/s", "hit rate",
    "tokens from", "queue ms", "late ms p95", "errors", "differing",
)  # fmt: skip


def plays_table(systems: dict[str, Any]) -> str:
    """A line for each run of each system; a system that could not run says why."""
    lines: list[Sequence[str]] = [_HEAD]
    notes = []
    for name, system in systems.items():
        if system.get("why_not"):
            notes.append(f"{name}: not measured: {system['why_not']}")
        if system.get("left_out"):
            notes.append(f"{name}: {', '.join(system['left_out'])} left out, because the other systems need the time")
        for play in system.get("plays", []):
            first, later = play["ttft_ms"], play["ttft_later_ms"]
            lines.append(
                (
                    name, play["routing"], f"{play['qps']:g}", *(_n(first[k]) for k in ("p50", "p95", "p99")),
                    *(_n(later[k]) for k in ("p50", "p95")), _n(play["output_tokens_per_s"]),
                    "-" if play["hit_rate"] is None else f"{play['hit_rate']:.2f}",
                    _shares(play["tokens_from"]), _n(play["queue_ms"]), _n(play["late_ms"]["p95"]),
                    f"{play['errors']}/{play['turns']}", f"{play['differing_tokens']}/{play['compared_tokens']}",
                )
            )  # fmt: skip
    return "\n".join([_aligned(lines), *notes])


def pairs_table(systems: dict[str, Any]) -> str:
    """Second turns, by system: moved, stayed, computed anew."""
    lines: list[Sequence[str]] = [
        ("second turn, TTFT ms p50", "migrated", "from", "stayed", "from", "recompute", "migrated/stayed",
         "migrated/recompute", "differing")
    ]  # fmt: skip
    for name, system in systems.items():
        pairs = system.get("pairs")
        if pairs:
            lines.append(
                (
                    name,
                    _n(pairs["migrated"]["p50_ms"]), _shares(pairs["migrated"]["tokens_from"]),
                    _n(pairs["sticky"]["p50_ms"]), _shares(pairs["sticky"]["tokens_from"]),
                    _n(pairs["recompute"]["p50_ms"]),
                    _n(pairs["migrated_over_sticky"], 2), _n(pairs["migrated_over_recompute"], 2),
                    f"{pairs['differing_tokens']}/{pairs['compared_tokens']}",
                )
            )  # fmt: skip
    return _aligned(lines) if len(lines) > 1 else ""


def asked_table(rows: Sequence[Row]) -> str:
    says = {True: "yes", False: "NO", None: "-"}
    return _aligned([("asked", "got", "met"), *((row.asked, row.got, says[row.met]) for row in rows)])


def _n(value: float | None, digits: int | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if digits is not None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _shares(tokens: dict[str, int]) -> str:
    """Percent of all prompt tokens by where their KV came from."""
    total = sum(tokens.values())
    return " ".join(f"{name} {100 * n / total:.0f}%" for name, n in tokens.items() if n) if total else "-"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
