"""Two plots: TTFT against QPS where sessions migrate, and TTFT by round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["draw"]

_COLOURS = {"kvpool": "#1f6f8b", "lmcache-redis": "#f2a65a", "vllm-fs": "#6d597a", "none": "#b0a8a0"}
_OTHERS = ("#e07a5f", "#c9a227", "#7f9172")


def draw(systems: dict[str, Any], file: Path) -> None:
    """Milliseconds; the first panel shows p50 (line) and p95 (dashed), the second the median of each round."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (by_rate, by_round) = plt.subplots(1, 2, figsize=(12, 4.4))
    others = iter(_OTHERS * 8)
    for name, system in systems.items():
        plays = [p for p in system.get("plays", []) if p["routing"] == "migrating"] or system.get("plays", [])
        if not plays:
            continue
        colour = _COLOURS.get(name) or next(others)
        rates = [p["qps"] for p in plays]
        for share, style in (("p50", "-"), ("p95", "--")):
            label = name if share == "p50" else None
            by_rate.plot(rates, [p["ttft_ms"][share] for p in plays], style, marker="o", color=colour, label=label)
        last = plays[-1]["by_round_ms"]
        by_round.plot([int(r) for r in last], list(last.values()), marker="o", color=colour, label=name)
    by_rate.set_title("TTFT, sessions that migrate every round: p50, p95 dashed", fontsize=10, loc="left")
    by_rate.set_xlabel("questions a second (QPS)")
    by_round.set_title("TTFT by round at the highest QPS, median", fontsize=10, loc="left")
    by_round.set_xlabel("round")
    by_round.xaxis.get_major_locator().set_params(integer=True)
    for panel in (by_rate, by_round):
        panel.set_ylabel("ms")
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)
