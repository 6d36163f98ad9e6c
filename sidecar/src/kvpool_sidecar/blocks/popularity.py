"""Popularity of blocks by this node's lookups. Pure and thread-safe.

A block's score is the number of lookups that found it, each worth half as much after `HALF_LIFE_S` (forward decay:
Cormode et al., "Forward decay: a practical time decay model for streaming systems", 2009). Lookups list blocks in the
prompt's order, so they also show each block's predecessor: copies of the most popular blocks start with the roots.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["HALF_LIFE_S", "PopularBlock", "Popularity", "roots_first"]

HALF_LIFE_S = 3600.0
_MAX_BLOCKS = 1 << 16
_RESCALE_AT = 2.0**60


class PopularBlock(NamedTuple):
    """`parent` precedes `key` in some prompt; None: unknown."""

    key: bytes
    score: float
    parent: bytes | None


class Popularity:
    """Scores of at most `max_blocks` blocks, the most recently found. `now` is monotonic seconds."""

    def __init__(self, max_blocks: int = _MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._blocks: OrderedDict[bytes, tuple[float, bytes | None]] = OrderedDict()  # weight, parent
        self._epoch = 0.0

    def __len__(self) -> int:
        return len(self._blocks)

    def record_hits(self, keys: Sequence[bytes], now: float) -> None:
        """Record the blocks that a lookup found, in the prompt's order."""
        with self._lock:
            worth = self._decay_weight(now)
            before: bytes | None = None
            for key in keys:
                weight, parent = self._blocks.pop(key, (0.0, None))
                self._blocks[key] = (weight + worth, before or parent)
                before = key
            while len(self._blocks) > self._max_blocks:
                self._blocks.popitem(last=False)

    def hottest(self, count: int, now: float) -> list[PopularBlock]:
        """At most `count`, the hottest first, but none before what precedes it in a prompt."""
        with self._lock:
            worth = self._decay_weight(now)
            blocks = dict(self._blocks)
        order = roots_first({key: weight for key, (weight, _) in blocks.items()}, _parents(blocks), count)
        return [PopularBlock(key, blocks[key][0] / worth, blocks[key][1]) for key in order]

    def _decay_weight(self, now: float) -> float:
        """Return the weight of a lookup at `now`; rescales earlier weights when it grows too large."""
        worth = 2.0 ** ((now - self._epoch) / HALF_LIFE_S) if now - self._epoch < 60 * HALF_LIFE_S else _RESCALE_AT
        if worth < _RESCALE_AT:
            return float(worth)
        shrink = 2.0 ** max((self._epoch - now) / HALF_LIFE_S, -1000.0)
        self._blocks = OrderedDict((key, (weight * shrink, p)) for key, (weight, p) in self._blocks.items())
        self._epoch = now
        return 1.0


def _parents(blocks: Mapping[bytes, tuple[float, bytes | None]]) -> dict[bytes, bytes]:
    return {key: parent for key, (_, parent) in blocks.items() if parent is not None}


def roots_first(heat: Mapping[bytes, float], parents: Mapping[bytes, bytes], count: int) -> list[bytes]:
    """The `count` hottest of `score`, the hottest first, except that a block's known ancestors come before it.

    `parents` may be anything, also circles: each block comes once.
    """
    done: set[bytes] = set()
    order: list[bytes] = []
    for key in sorted(heat, key=heat.__getitem__, reverse=True):
        if len(order) >= count:
            break
        order += reversed(list(_ancestry(key, heat, parents, done)))
    return order[:count]


def _ancestry(
    key: bytes, heat: Mapping[bytes, float], parents: Mapping[bytes, bytes], done: set[bytes]
) -> Iterable[bytes]:
    """`key` and its ancestors, as far as they are in `score` and not `done`; now they are."""
    at: bytes | None = key
    while at is not None and at in heat and at not in done:
        done.add(at)
        yield at
        at = parents.get(at)
