"""What was purged does not come back: copies of purged blocks that are still on their way are refused for a while.

A copy keeps the header of its block, with the time at which that was made; whatever an engine stores anew is younger.
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
    """Thread-safe, and bounded: the oldest of 64 goes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._bars: tuple[_Tombstone, ...] = ()

    def add(self, fits: Callable[[BlockHeader], bool], made_before_ms: int) -> None:
        """Refuse blocks that fit and were made before (Unix milliseconds), for ten minutes."""
        now = self._clock()
        with self._lock:
            kept = [bar for bar in self._bars if bar.until > now][1 - _MAX :]
            self._bars = (*kept, _Tombstone(fits, made_before_ms, now + LIFE_S))

    def rejects(self, header: BlockHeader) -> bool:
        """Was this block purged?"""
        bars = self._bars
        if not bars:
            return False
        now = self._clock()
        return any(
            bar.until > now and header.created_ms < bar.created_before_ms and bar.matches(header) for bar in bars
        )
