"""Numbers of a run. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvpool_demo.routing import Visit

__all__ = ["TIERS", "Agreement", "Turn", "agreement", "percentile", "sources"]

TIERS = ("local", "peer", "shared")


@dataclass(frozen=True)
class Turn:
    """One round of one user as it went."""

    visit: Visit
    prompt: int  # tokens
    cached: int  # tokens of the prompt that were not computed
    tiers: dict[str, int]  # of those, tokens that came from the pool, by tier
    wait_ms: float  # to the first token; in a replay, until the blocks are there
    tokens: tuple[int, ...] = field(repr=False)


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank (the smallest value that at least `share` of all are not above). ValueError if there is none."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def sources(turns: Iterable[Turn]) -> dict[str, int]:
    """Where the tokens of all prompts came from: each tier of the pool, the engine's own memory, or computed."""
    found = dict.fromkeys((*TIERS, "engine", "computed"), 0)
    for turn in turns:
        loaded = sum(turn.tiers.get(tier, 0) for tier in TIERS)
        for tier in TIERS:
            found[tier] += turn.tiers.get(tier, 0)
        # a loaded block may turn out not to be needed, so this can be below 0 by at most one block
        found["engine"] += max(0, turn.cached - loaded)
        found["computed"] += turn.prompt - turn.cached
    return found


@dataclass(frozen=True)
class Agreement:
    """How far two runs of the same conversation gave the same tokens."""

    rounds: int
    same_rounds: int
    tokens: int
    same_tokens: int  # up to each round's first difference: what follows it is another text

    @property
    def identical(self) -> bool:
        return self.rounds > 0 and self.same_rounds == self.rounds


def agreement(one: Sequence[Turn], other: Sequence[Turn]) -> Agreement:
    """Compares rounds of the same user and number; ValueError if one run lacks a round that the other has."""
    by_round = {(t.visit.user, t.visit.round): t for t in other}
    if {(t.visit.user, t.visit.round) for t in one} != set(by_round):
        raise ValueError("the two runs did not play the same rounds")
    same_rounds = same_tokens = total = 0
    for turn in one:
        theirs = by_round[turn.visit.user, turn.visit.round].tokens
        total += max(len(turn.tokens), len(theirs))
        same_rounds += turn.tokens == theirs
        same = (a == b for a, b in zip(turn.tokens, theirs, strict=False))
        same_tokens += next((i for i, equal in enumerate(same) if not equal), min(len(turn.tokens), len(theirs)))
    return Agreement(len(one), same_rounds, total, same_tokens)
