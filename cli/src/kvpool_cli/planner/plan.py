"""A whole plan, as data for programs and for the text of `kvpool plan`. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvpool_cli.planner.verdicts import block_size, judge

if TYPE_CHECKING:
    from kvpool_cli.planner.attention import CacheLayout
    from kvpool_cli.planner.catalog import Model
    from kvpool_cli.planner.demand import Demand, Fleet, Gain, Workload
    from kvpool_cli.planner.replay import Point
    from kvpool_cli.planner.verdicts import Verdict

PETABYTE = 10**15


@dataclass(frozen=True)
class Replayed:
    """Hit rates of a trace."""

    policy: str
    requests: int
    tokens: int
    ceiling: float
    """Token hit rate without any eviction, from 0 to 1."""
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Plan:
    """Sizes of a model, and what a workload needs, if one was given."""

    model: Model
    layout: CacheLayout
    block_tokens: int
    tokens: int
    fleet: Fleet
    load: Workload | None = None
    need: Demand | None = None
    saved: Gain | None = None
    assumptions: tuple[str, ...] = ()
    replayed: Replayed | None = None

    @property
    def verdicts(self) -> list[Verdict]:
        """Return the verdicts; without a workload only that on the size of a block."""
        if self.load is None or self.need is None:
            return block_size(self.layout, self.block_tokens)
        return judge(self.layout, self.load, self.fleet, self.need, self.saved, self.block_tokens)

    def data(self) -> dict[str, Any]:
        """Return the plan for `-o json`. Bytes, tokens, seconds, bytes a second."""
        session = self.layout.session_bytes(self.tokens)
        found: dict[str, Any] = {
            "model": self.model.name,
            "source": self.model.source,
            "kv_dtype": self.layout.dtype,
            "tensor_parallel": self.fleet.tensor_parallel,
            "tokens": self.tokens,
            "block_tokens": self.block_tokens,
            "bytes_per_token": self.layout.bytes_per_token,
            "bytes_per_token_growing": self.layout.bytes_per_token_growing,
            "block_bytes": self.layout.block_bytes(self.block_tokens),
            "state_bytes": self.layout.state_bytes,
            "session_bytes": session,
            "sessions_per_petabyte": PETABYTE // session,
            "groups": [asdict(group) for group in self.layout.groups],
        }
        if self.load is not None and self.need is not None:
            found["workload"] = {**asdict(self.load), "requests_per_second": self.load.rate}
            found["fleet"] = asdict(self.fleet)
            found["demand"] = {**asdict(self.need), "index_bytes": self.need.index_bytes}
        if self.saved is not None:
            found["gain"] = asdict(self.saved)
        if self.replayed is not None:
            found["trace"] = asdict(self.replayed)
        found["assumptions"] = list(self.assumptions)
        found["verdicts"] = [asdict(verdict) for verdict in self.verdicts]
        return found
