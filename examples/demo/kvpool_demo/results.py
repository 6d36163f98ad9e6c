"""What a demonstration found out, as one value; `summary` is out/demo.json. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvpool_demo.statistics import TIERS, Agreement, Turn, percentile, sources

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpool_demo.conversation import Shape

__all__ = ["Comparison", "Results", "by_round", "summary", "waits"]


@dataclass(frozen=True)
class Comparison:
    """Two runs whose tokens were compared. `promised`: they must be equal; else it is shown for the reader to judge."""

    title: str
    promised: bool
    agreement: Agreement
    note: str = ""


@dataclass(frozen=True)
class Results:
    """Everything that the table, the picture and the JSON are made from.

    `pool`: each round on another node, with the pool. `none`: the same visits without it. `stayed`: the same
    conversation on one engine with its own prefix cache. In a replay only `pool` is there, no engine ran, and the time
    waited is that of lookup and load.
    """

    engine: str
    nodes: int
    shape: Shape
    pool: Sequence[Turn]
    none: Sequence[Turn] = ()
    stayed: Sequence[Turn] = ()
    comparisons: Sequence[Comparison] = ()
    bytes_read: Mapping[str, int] = field(default_factory=dict)  # by tier
    bytes_stored: int = 0
    bytes_shared: int = 0  # copied to the shared tier
    lost: str = ""  # the node that was stopped before the last round
    blocks_equal: bool | None = None  # replay only: every byte read was the byte written
    seconds: float = 0.0

    @property
    def with_engine(self) -> bool:
        return bool(self.none)

    @property
    def identical(self) -> bool | None:
        """Whether all tokens are equal that must be; None where no engine made tokens."""
        promised = [c.agreement.identical for c in self.comparisons if c.promised]
        return all(promised) if promised else None


def by_round(turns: Sequence[Turn]) -> list[list[Turn]]:
    """The turns of each round, in order."""
    rounds: dict[int, list[Turn]] = {}
    for turn in turns:
        rounds.setdefault(turn.visit.round, []).append(turn)
    return [rounds[r] for r in sorted(rounds)]


def waits(turns: Sequence[Turn]) -> dict[str, float | None]:
    """p50 and p95 of the time waited in milliseconds, None if there were no turns."""
    times = [t.wait_ms for t in turns]
    return {name: round(percentile(times, p), 1) if times else None for name, p in (("p50", 0.5), ("p95", 0.95))}


def summary(results: Results) -> dict[str, Any]:
    """out/demo.json. In a replay `tokens_identical` and the times to first token are null: no engine made a token."""
    nothing: Sequence[Turn] = ()
    found = sources(results.pool)
    asked = sum(t.prompt for t in results.pool)
    from_pool = sum(found[tier] for tier in TIERS)
    runs = {"pool": results.pool, "none": results.none, "stayed": results.stayed}
    made: dict[str, Any] = {
        "engine": results.engine,
        "nodes": results.nodes,
        "users": results.shape.users,
        "rounds": results.shape.rounds,
        "tokens_identical": results.identical,
        "hit_rate": round(from_pool / asked, 4) if asked else 0.0,
        "ttft_ms": {name: waits(turns if results.with_engine else nothing) for name, turns in runs.items()},
        "tokens_from": found,
        "by_round": [
            {
                "round": number + 1,
                "ttft_ms": {
                    name: waits(by_round(turns)[number] if results.with_engine else nothing)
                    for name, turns in runs.items()
                },
                "tokens_from": sources(turns_of_round),
            }
            for number, turns_of_round in enumerate(by_round(results.pool))
        ],
        "comparisons": [
            {
                "title": c.title,
                "promised": c.promised,
                "rounds": c.agreement.rounds,
                "same_rounds": c.agreement.same_rounds,
                "tokens": c.agreement.tokens,
                "same_tokens": c.agreement.same_tokens,
            }
            for c in results.comparisons
        ],
        "bytes": {
            "read": dict(results.bytes_read),
            "stored": results.bytes_stored,
            "copied_to_shared": results.bytes_shared,
        },
        "lost_node": results.lost,
        "seconds": round(results.seconds, 1),
    }
    if not results.with_engine:
        made["load_ms"] = waits(results.pool)
        made["blocks_equal"] = results.blocks_equal
    return made
