"""Numbers of runs: percentiles, throughput, tokens that differ. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.sessions.plan import Turn

__all__ = ["Asked", "by_round", "differing", "percentile", "ratio", "summary"]


@dataclass(frozen=True)
class Asked:
    """A turn as it went. Seconds; `ttft` from sending the request to the first token. `error` is empty if it went well.

    `late`: seconds that the question waited because the user's question before was still being answered.
    """

    turn: Turn
    launched: float  # since the epoch
    finished: float
    late: float
    ttft: float
    prompt_tokens: int
    cached_tokens: int | None  # None: the server does not tell
    answer_tokens: int
    answer: tuple[int, ...] | str
    error: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Of the answer after its first token; 0 if there is no second one."""
        seconds = self.finished - self.launched - self.ttft
        return (self.answer_tokens - 1) / seconds if self.answer_tokens > 1 and seconds > 0 else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that at least `share` of all are not above. ValueError if there is none."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """The median of ones[i] / others[i]. ValueError if there is none, or if they are not pairs."""
    pairs = sorted(one / other for one, other in zip(ones, others, strict=True))
    if not pairs:
        raise ValueError("no values")
    middle = len(pairs) // 2
    return pairs[middle] if len(pairs) % 2 else (pairs[middle - 1] + pairs[middle]) / 2


def summary(turns: Sequence[Asked]) -> dict[str, Any]:
    """Of one run. TTFT in ms, of all turns and of those after the first round (`moved` where sessions migrate)."""
    well = [t for t in turns if not t.error]
    later = [t for t in well if t.turn.round > 0]
    wall = max((t.finished for t in well), default=0.0) - min((t.launched for t in turns), default=0.0)
    counted = [t for t in well if t.cached_tokens is not None]
    prompt = sum(t.prompt_tokens for t in counted)
    return {
        "turns": len(turns),
        "errors": len(turns) - len(well),
        "ttft_ms": _three([t.ttft for t in well]),
        "ttft_later_ms": _three([t.ttft for t in later]),
        "output_tokens_per_s": round(sum(t.answer_tokens for t in well) / wall, 2) if well and wall > 0 else None,
        "late_ms": {"p50": _ms([t.late for t in well], 0.5), "p95": _ms([t.late for t in well], 0.95)},
        "hit_rate": round(sum(t.cached_tokens or 0 for t in counted) / prompt, 4) if prompt else None,
    }


def by_round(turns: Sequence[Asked]) -> dict[int, float]:
    """Median TTFT in ms of each round, from 1 on."""
    rounds = sorted({t.turn.round for t in turns if not t.error})
    return {r + 1: _ms([t.ttft for t in turns if not t.error and t.turn.round == r], 0.5) or 0.0 for r in rounds}


def differing(turns: Sequence[Asked], reference: Mapping[tuple[int, int], tuple[int, ...] | str]) -> tuple[int, int]:
    """Tokens that differ from the reference's answer to the same question, and how many were compared.

    From the first difference on every token counts as differing: what follows it is another text. In texts,
    characters are compared.
    """
    wrong = total = 0
    for turn in turns:
        want = reference.get((turn.turn.user, turn.turn.round))
        if turn.error or want is None:
            continue
        total += len(want)
        same = next((i for i, (a, b) in enumerate(zip(turn.answer, want, strict=False)) if a != b), None)
        wrong += max(len(turn.answer), len(want)) - (min(len(turn.answer), len(want)) if same is None else same)
    return wrong, total


def _ms(seconds: Sequence[float], share: float) -> float | None:
    return round(percentile(seconds, share) * 1000, 1) if seconds else None


def _three(seconds: Sequence[float]) -> dict[str, float | None]:
    return {name: _ms(seconds, share) for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}
