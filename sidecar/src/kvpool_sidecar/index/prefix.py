"""Finds the length of a prompt's prefix in the index by two queries instead of one per block. Pure.

Prefixes are stored from their start and are mostly evicted together, so a few probes bound the end of a prefix, and the
blocks between the last probe that hit and the first that missed determine it exactly. Blocks between two probes that
hit are presumed present: if one is missing, its load is a miss, and is a recent miss then, and always queried.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["EXACT", "PROBES", "first_query", "presumed", "second_query"]

EXACT = 128
"""Prompts up to this many blocks are queried completely: the reply costs less than a second round trip."""
PROBES = 16
_MAX_DOUBTFUL = 32


def first_query(count: int, doubtful: Sequence[int]) -> list[int]:
    """Positions to query in a prefix of `count` blocks: PROBES including both ends, and the first recent misses."""
    if count <= EXACT:
        return list(range(count))
    evenly = {i * (count - 1) // (PROBES - 1) for i in range(PROBES)}
    return sorted(evenly.union(doubtful[:_MAX_DOUBTFUL]))


def second_query(found: Mapping[int, bool]) -> range:
    """Range in which the prefix ends, given the replies in ascending order; empty if the end is already known."""
    lower = -1
    for upper, is_found in found.items():
        if not is_found:
            return range(lower + 1, upper) if lower >= 0 else range(0)
        lower = upper
    return range(0)


def presumed(found: Mapping[int, bool]) -> list[range]:
    """Ranges that were not queried and lie between two hits; `found` is in ascending order."""
    pairs = itertools.pairwise(found.items())
    return [range(a + 1, b) for (a, a_found), (b, b_found) in pairs if a_found and b_found and b > a + 1]
