"""Purge tombstones: reject late copies of purged blocks for ten minutes.

A copy has the header of its block, with the creation time; blocks that engines store again are younger.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.protocol.block import BlockHeader

__all__ = ["LIFE_S", "PurgeTombstones"]

LIFE_S = 600.0  # longer than any copy takes
_MAX = 64


class _Tombstone(NamedTuple):
    matches: Callable[[BlockHeader], bool]
    created_before_ms: int
    until: float


class PurgeTombstones:
    """Thread-safe and bounded: the oldest of 64 is dropped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._bars: tuple[_Tombstone, ...] = ()

    def add(self, fits: Callable[[BlockHeader], bool], made_before_ms: int) -> None:
        """Reject blocks that match and were created before this time (Unix milliseconds), for ten minutes."""
        now = self._clock()
        with self._lock:
            kept = [bar for bar in self._bars if bar.until > now][1 - _MAX :]
            self._bars = (*kept, _Tombstone(fits, made_before_ms, now + LIFE_S))

    def rejects(self, header: BlockHeader) -> bool:
        """Return whether this block was purged."""
        bars = self._bars
        if not bars:
            return False
        now = self._clock()
        return any(
            bar.until > now and header.created_ms < bar.created_before_ms and bar.matches(header) for bar in bars
        )
