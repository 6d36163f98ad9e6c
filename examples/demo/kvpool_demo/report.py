"""The table at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvpool_demo.results import Results, by_round, waits
from kvpool_demo.statistics import TIERS, percentile, sources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from kvpool_demo.statistics import Turn

__all__ = ["report"]

MIB = 1 << 20
NAMES = {
    "local": "pool:\nown node",
    "peer": "pool:\npeer",
    "shared": "pool:\nshared tier",
    "engine": "engine's\nown memory",
    "computed": "\ncomputed",
}
TIER_NAMES = {"local": "own node", "peer": "peers", "shared": "shared tier"}


def report(results: Results) -> RenderableType:
    """Everything to be read at the end, top to bottom; fits 80 columns."""
    shape = results.shape
    who = f"{shape.users} users, {shape.rounds} rounds, each round on another of {results.nodes} nodes"
    if results.with_engine:
        title = f"Time to first token in ms, p50 / p95: {who}, vLLM on CPU"
    else:
        title = f"NO ENGINE RAN: random blocks in place of KV. {who}"
    parts: list[RenderableType] = [_title(title), _waits(results)]
    parts += [_title("Where the prompts' tokens came from, with the pool"), _sources(results)]
    parts += [Text(line) for line in _sentences(results)]
    if results.comparisons:
        parts += [Text(), _title("Are the generated tokens equal?"), _tokens(results)]
        parts += [Text(f"{c.title}: {c.note}") for c in results.comparisons if c.note]
    return Group(*parts)


def _title(text: str) -> Text:
    return Text(text, style="bold")


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False)


def _rows(*runs: Sequence[Turn]) -> list[tuple[str, Sequence[Sequence[Turn]]]]:
    """Each round's turns of each run, then all of them."""
    rounds = zip(*map(by_round, runs), strict=True)
    return [*((str(i + 1), turns) for i, turns in enumerate(rounds)), ("all", runs)]


def _waits(results: Results) -> Table:
    table = _table()
    if not results.with_engine:
        table.add_column("round")
        table.add_column("prompt\ntokens", justify="right")
        table.add_column("lookup and load, ms\np50 / p95", justify="right")
        for label, (pool,) in _rows(results.pool):
            table.add_row(label, _mean_prompt(pool), _pair(pool), end_section=label == str(results.shape.rounds))
        return table
    table.add_column("round")
    for column in (
        "prompt\ntokens",
        "moved,\nno pool",
        "moved,\nwith the pool",
        "never moved,\nown cache",
        "speed-up",
    ):
        table.add_column(column, justify="right")
    for label, (pool, none, stayed) in _rows(results.pool, results.none, results.stayed):
        speed_up = percentile([t.wait_ms for t in none], 0.5) / percentile([t.wait_ms for t in pool], 0.5)
        cells = [label, _mean_prompt(pool), _pair(none), _pair(pool), _pair(stayed), f"{speed_up:.1f}x"]
        table.add_row(*cells, end_section=label == str(results.shape.rounds))
    return table


def _sources(results: Results) -> Table:
    table = _table()
    table.add_column("round")
    for name in sources(()):
        table.add_column(NAMES[name], justify="right")
    for label, (pool,) in _rows(results.pool):
        cells = (f"{n:,}" if n else "-" for n in sources(pool).values())
        table.add_row(label, *cells, end_section=label == str(results.shape.rounds))
    return table


def _mean_prompt(turns: Sequence[Turn]) -> str:
    return f"{sum(t.prompt for t in turns) / len(turns):,.0f}"


def _pair(turns: Sequence[Turn]) -> str:
    times = waits(turns)
    return f"{times['p50']:,.0f} / {times['p95']:,.0f}"


def _sentences(results: Results) -> list[str]:
    found = sources(results.pool)
    asked = sum(t.prompt for t in results.pool)
    later = [t for t in results.pool if t.visit.round > 0]
    from_pool = sum(found[tier] for tier in TIERS)
    later_found, later_asked = sources(later), sum(t.prompt for t in later)
    lines = [
        f"Tokens from the pool: {from_pool:,} of {asked:,} in all prompts ({_percent(from_pool, asked)}); "
        f"after the first round {_percent(sum(later_found[tier] for tier in TIERS), later_asked)}.",
        "Bytes read: "
        + ", ".join(f"{TIER_NAMES[tier]} {results.bytes_read.get(tier, 0) / MIB:,.0f} MiB" for tier in TIERS)
        + f". Stored {results.bytes_stored / MIB:,.0f} MiB, of which {results.bytes_shared / MIB:,.0f} MiB"
        + " were copied to the shared tier.",
    ]
    if results.lost:
        lines.append(f"{results.lost} was stopped before the last round; the shared tier had its blocks.")
    if results.blocks_equal is not None:
        lines.append(f"Every byte read was the byte written: {'yes' if results.blocks_equal else 'NO'}.")
    return lines


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _tokens(results: Results) -> Table:
    table = _table()
    table.add_column("compared")
    table.add_column("equal rounds", justify="right")
    table.add_column("equal tokens", justify="right")
    table.add_column("")
    for c in results.comparisons:
        verdict = ("yes" if c.agreement.identical else "NO: this must not be") if c.promised else "for comparison"
        table.add_row(
            c.title,
            f"{c.agreement.same_rounds} of {c.agreement.rounds}",
            f"{c.agreement.same_tokens:,} of {c.agreement.tokens:,}",
            verdict,
        )
    return table
