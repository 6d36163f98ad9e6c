"""How far a prompt's chain of blocks reaches, found by two questions instead of one for each block. Pure.

Chains are stored from their start and most of a chain shares its fate, so a few probes say where it ends, and the
blocks between the last probe that was found and the first that was not say it exactly. What lies between two probes
that were found is presumed: where a chain has a hole, the load of that block is a miss, and from then on the block is
among the doubtful ones, which are always asked for.

`rest` is always the ascending positions in the prompt whose place is not known without asking.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["EXACT", "PROBES", "first_question", "presumed", "second_question"]

EXACT = 128
"""So many positions are asked for one by one: the answer costs less than a second round trip."""
PROBES = 16
_MAX_DOUBTFUL = 32


def first_question(rest: Sequence[int], doubtful: Sequence[int]) -> list[int]:
    """All of `rest` if that is little; else PROBES of it, both ends among them, and the first of the doubtful."""
    if len(rest) <= EXACT:
        return list(rest)
    last = len(rest) - 1
    evenly = {rest[i * last // (PROBES - 1)] for i in range(PROBES)}
    return sorted(evenly.union(doubtful[:_MAX_DOUBTFUL]))


def second_question(rest: Sequence[int], found: Mapping[int, bool]) -> list[int]:
    """Where the chain ends, given the answers `found` to the first question; empty if that is clear."""
    lower = -1
    for upper, is_found in found.items():
        if not is_found:
            return [n for n in rest if lower < n < upper] if lower >= 0 else []
        lower = upper
    return []


def presumed(rest: Sequence[int], found: Mapping[int, bool]) -> list[int]:
    """Positions nobody asked for whose neighbours among the answers, on either side, were both found."""
    answers = list(found.items())
    spans = [(a, b) for (a, a_found), (b, b_found) in itertools.pairwise(answers) if a_found and b_found]
    taken: list[int] = []
    at = 0
    for low, high in spans:
        while at < len(rest) and rest[at] <= low:
            at += 1
        while at < len(rest) and rest[at] < high:
            taken.append(rest[at])
            at += 1
    return taken
