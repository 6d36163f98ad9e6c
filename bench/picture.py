"""Draws rows of the data benchmark: for each path and kind of batch, what each system reaches of the limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bench.measure import Row

__all__ = ["draw"]

_COLOURS = {
    "kvpool": "#1f6f8b",
    "lmcache-fs": "#e07a5f",
    "lmcache-redis": "#f2a65a",
    "lmcache-resp": "#c9a227",
    "vllm-fs": "#6d597a",
    "mooncake-tcp": "#7f9172",
    "redis": "#b0a8a0",
}


def draw(rows: Sequence[Row], file: Path) -> None:
    """One panel for each path; logarithmic, because peers differ by a factor of a hundred."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    paths = list(dict.fromkeys(row.path for row in rows))
    figure, panels = plt.subplots(len(paths), 1, figsize=(11, 3.1 * len(paths)), squeeze=False)
    for panel, path in zip(panels[:, 0], paths, strict=True):
        mine = [row for row in rows if row.path == path and row.concurrency == 1 and row.system != "limit"]
        shapes = list(dict.fromkeys((row.size, row.batch) for row in mine))
        systems = [name for name in _COLOURS if any(row.system == name for row in mine)]
        width = 0.8 / max(1, len(systems))
        for i, system in enumerate(systems):
            by_shape = {(row.size, row.batch): row.ratio_to_limit for row in mine if row.system == system}
            places = [n + (i - (len(systems) - 1) / 2) * width for n, shape in enumerate(shapes) if shape in by_shape]
            values = [by_shape[shape] for shape in shapes if shape in by_shape]
            bars = panel.bar(places, values, width * 0.92, color=_COLOURS[system], label=system)
            panel.bar_label(bars, fmt="%.2g", fontsize=6, padding=1, rotation=90)
        panel.axhline(1, color="black", linewidth=0.8, linestyle="--")
        panel.set_yscale("log")
        panel.set_ylim(0.03, 20)
        panel.set_xticks(range(len(shapes)), [f"{_size(size)}\n{batch} at once" for size, batch in shapes])
        panel.set_title(f"{path}: throughput over the limit's", fontsize=10, loc="left")
        panel.legend(fontsize=7, ncols=len(systems), loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
