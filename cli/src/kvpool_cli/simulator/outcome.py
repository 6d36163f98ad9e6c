"""What a simulation counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvpool_cli.planner.replay import TRACE_BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_cli.simulator.settings import PoolSettings

__all__ = ["Outcome", "PathBytes", "SimulationCounts"]

_DAY_S = 86_400.0


@dataclass
class PathBytes:
    """Bytes of blocks by where they came from; `computed`: what the engines computed instead."""

    local: int = 0
    peer: int = 0
    shared: int = 0
    computed: int = 0


@dataclass
class SimulationCounts:
    """Counts of the requests after the warm-up."""

    requests: int = 0
    tokens: int = 0
    found_tokens: int = 0
    computed_tokens: int = 0
    interrupted: int = 0
    """Requests that began again on another node because theirs failed."""
    refused: int = 0
    """Requests that came while no node worked."""
    late_bytes: int = 0
    """Bytes of blocks that came after the deadline of their load; their tokens were computed."""
    path: PathBytes = field(default_factory=PathBytes)
    first_tokens: list[float] = field(default_factory=list)
    """Seconds to the first token of each request."""


@dataclass(frozen=True)
class Outcome:
    """The result. `by_node`: requests, bytes served to peers and seconds of computing of each node.

    `by_node`, `written_bytes`, `evicted_blocks` and `span` include the warm-up.
    """

    settings: PoolSettings
    counts: SimulationCounts
    bound: float
    by_node: tuple[tuple[int, int, float], ...]
    written_bytes: int
    evicted_blocks: int
    span: float

    @property
    def hit_rate(self) -> float:
        """Tokens found, of the tokens of the prompts; 0 without tokens."""
        return self.counts.found_tokens / self.counts.tokens if self.counts.tokens else 0.0

    @property
    def written_per_drive_day(self) -> float:
        """Bytes that a drive writes in a day at this rate; 0 if the trace has no duration."""
        drives = self.settings.nodes * self.settings.hardware.drives
        return self.written_bytes / drives / self.span * _DAY_S if self.span > 0 else 0.0

    def data(self) -> dict[str, Any]:
        """Return the result for programs."""
        counts = self.counts
        hardware = self.settings.hardware
        requests, served, computing = ([row[n] for row in self.by_node] for n in range(3))
        return {
            "simulated": True,
            "settings": _plain(asdict(self.settings)),
            "requests": counts.requests,
            "interrupted_requests": counts.interrupted,
            "refused_requests": counts.refused,
            "tokens": counts.tokens,
            "found_tokens": counts.found_tokens,
            "hit_rate": round(self.hit_rate, 6),
            "reuse_bound": round(self.bound, 6),
            "bytes": asdict(counts.path),
            "late_bytes": counts.late_bytes,
            "busiest_over_mean": {
                "served_bytes": _busiest(served),
                "requests": _busiest(requests),
                "computing": _busiest(computing),
            },
            "first_token_s": {"p50": _quantile(counts.first_tokens, 0.5), "p95": _quantile(counts.first_tokens, 0.95)},
            "computing_s": round(counts.computed_tokens / hardware.prefill_rate, 3),
            "evicted_blocks": self.evicted_blocks,
            "written_bytes": self.written_bytes,
            "written_bytes_per_drive_day": round(self.written_per_drive_day),
            "drive_writes_per_day": round(self.written_per_drive_day / hardware.drive_bytes, 4),
            "span_s": round(self.span, 3),
            "block_tokens": TRACE_BLOCK,
        }


def _busiest(values: Sequence[float]) -> float | None:
    """The largest over the mean; None if all are 0."""
    total = sum(values)
    return round(max(values) * len(values) / total, 3) if total else None


def _quantile(values: Sequence[float], share: float) -> float | None:
    return round(sorted(values)[min(len(values) - 1, int(len(values) * share))], 4) if values else None


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """An outage without an end has no number in JSON."""
    outages = [o | {"seconds": None if o["seconds"] == float("inf") else o["seconds"]} for o in settings["outages"]]
    return settings | {"outages": outages}
