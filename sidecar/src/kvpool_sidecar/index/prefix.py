"""How far a prompt's chain of blocks reaches, found by two questions instead of one for each block. Pure.

Chains are stored from their start and most of a chain shares its fate, so a few probes say where it ends, and the
blocks between the last probe that was found and the first that was not say it exactly. What lies between two probes
that were found is presumed: where a chain has a hole, the load of that block is a miss, and from then on the block is
among the doubtful ones, which are always asked for.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["EXACT", "PROBES", "first_query", "presumed", "second_query"]

EXACT = 128
"""A prompt of so many blocks is asked for one by one: the answer costs less than a second round trip."""
PROBES = 16
_MAX_DOUBTFUL = 32


def first_query(count: int, doubtful: Sequence[int]) -> list[int]:
    """Positions to ask for in a chain of `count` blocks: PROBES with both ends, and the first of the doubtful."""
    if count <= EXACT:
        return list(range(count))
    evenly = {i * (count - 1) // (PROBES - 1) for i in range(PROBES)}
    return sorted(evenly.union(doubtful[:_MAX_DOUBTFUL]))


def second_query(found: Mapping[int, bool]) -> range:
    """Where the chain ends, given the answers to the first question in ascending order; empty if that is clear."""
    lower = -1
    for upper, is_found in found.items():
        if not is_found:
            return range(lower + 1, upper) if lower >= 0 else range(0)
        lower = upper
    return range(0)


def presumed(found: Mapping[int, bool]) -> list[range]:
    """What nobody asked for and lies between two answers, in ascending order, that were both found."""
    pairs = itertools.pairwise(found.items())
    return [range(a + 1, b) for (a, a_found), (b, b_found) in pairs if a_found and b_found and b > a + 1]
