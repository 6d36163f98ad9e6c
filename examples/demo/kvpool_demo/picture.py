"""Draw out/demo.png: time to first token by round, with and without the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_demo.results import Results, by_round
from kvpool_demo.statistics import percentile, sources

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from kvpool_demo.statistics import Turn

__all__ = ["draw"]

COLOURS = {"none": "#b3402a", "pool": "#1f6f8b", "stayed": "#7a7a7a"}
TIER_COLOURS = {
    "local": "#1f6f8b",
    "peer": "#5aa9c4",
    "shared": "#a9d6e5",
    "engine": "#c9c9c9",
    "computed": "#e3a08f",
}
TIER_NAMES = {
    "local": "pool: local tier",
    "peer": "pool: peer node",
    "shared": "pool: shared tier",
    "engine": "engine's cache",
    "computed": "computed",
}


def draw(results: Results, path: Path) -> None:
    """Draw the latency of each round (a dot per user, a line through the medians) above the sources of the tokens."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8.5, 7.6), dpi=130, sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    runs: list[tuple[str, str, Sequence[Turn]]] = [("pool", "with the pool", results.pool)]
    if results.with_engine:
        runs.insert(0, ("none", "without the pool", results.none))
        runs.append(("stayed", "same node (engine's own cache)", results.stayed))
    for offset, (key, label, turns) in zip((-0.08, 0.0, 0.08), runs, strict=False):
        rounds = by_round(turns)
        numbers = [i + 1 + offset for i in range(len(rounds))]
        medians = [percentile([t.wait_ms for t in r], 0.5) / 1000 for r in rounds]
        style = "--" if key == "stayed" else "-"
        above.plot(numbers, medians, style, color=COLOURS[key], linewidth=2, label=f"{label}, median")
        for x, r in zip(numbers, rounds, strict=True):
            above.scatter(
                [x] * len(r), [t.wait_ms / 1000 for t in r], s=18, color=COLOURS[key], alpha=0.55, linewidths=0
            )
    if results.with_engine:
        above.set_title(_title(results), loc="left", fontsize=13, pad=10)
        above.set_ylabel("time to first token (s)")
    else:
        above.set_title("Replay without an engine: lookup and load of the blocks", loc="left", fontsize=13, pad=10)
        above.set_ylabel("lookup and load (s)")
    above.set_ylim(0, above.get_ylim()[1] * 1.18)
    above.legend(loc="upper right", ncols=1, frameon=False, fontsize=9)
    _stack(below, results)
    below.set_xlabel(
        f"round (dots: each of {results.shape.users} users"
        + (f"; {results.lost} was stopped before round {results.shape.rounds})" if results.lost else ")")
    )
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
    figure.savefig(path)
    plt.close(figure)


def _title(results: Results) -> str:
    """Return the result: the ratio of median times from the second round on, when there are blocks to load."""
    none, pool = (
        percentile([turn.wait_ms for turns in (by_round(run)[1:] or by_round(run)) for turn in turns], 0.5)
        for run in (results.none, results.pool)
    )
    return f"Sessions that move to another node: first token {none / pool:.1f}x faster (median)" if pool else ""


def _stack(axes: Axes, results: Results) -> None:
    rounds = by_round(results.pool)
    numbers = [i + 1 for i in range(len(rounds))]
    floor = [0.0] * len(rounds)
    for name in sources(()):
        heights = [sources(r)[name] / len(r) / 1000 for r in rounds]
        axes.bar(numbers, heights, 0.6, bottom=floor, color=TIER_COLOURS[name], label=TIER_NAMES[name])
        floor = [a + b for a, b in zip(floor, heights, strict=True)]
    axes.set_xticks(numbers)
    axes.set_ylabel("thousand tokens\nof a prompt")
    axes.set_ylim(0, max(floor) * 1.35)
    axes.legend(loc="upper center", ncols=3, frameon=False, fontsize=8)
