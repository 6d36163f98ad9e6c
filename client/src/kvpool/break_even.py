"""Which tiers load slower than the engine computes; their blocks are not promised. Thread-safe, no I/O.

Both sides are measured in seconds per token: the engine's plug-in reports computed tokens, and each load reports its
blocks by tier. A tier becomes slow above 1.25 times the engine's time, and fast again below 0.8 times. While a tier is
slow, one lookup in ten seconds is promised all the same: its load is the measurement by which the tier recovers.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from kvpool.protocol.wire import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["BreakEven"]

_MIN_LOADS: Final = 4  # of a tier
_MIN_COMPUTED_TOKENS: Final = 4096
_SLOWER: Final = 1.25
_FASTER: Final = 0.8
_TRIAL_S: Final = 10.0
_KEPT: Final = 0.75  # weight of the earlier loads of a tier, at each load
_KEPT_OF_SLOW: Final = 0.4  # the same for a slow tier, which has few loads
_KEPT_COMPUTED: Final = 0.95


class _Rate:
    """Seconds per token as a ratio of sums, in which earlier samples fade."""

    __slots__ = ("is_slow", "next_trial", "samples", "seconds", "tokens", "total_tokens")

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0
        self.total_tokens = self.samples = 0
        self.is_slow = False
        self.next_trial = 0.0

    def add(self, tokens: int, seconds: float, kept: float) -> None:
        self.tokens = self.tokens * kept + tokens
        self.seconds = self.seconds * kept + seconds
        self.total_tokens += tokens
        self.samples += 1

    @property
    def per_token(self) -> float:
        return self.seconds / self.tokens if self.tokens > 0 else 0.0


class BreakEven:
    """Rates of one engine. `is_enabled`: hold back slow tiers; otherwise they are only measured."""

    def __init__(self, *, is_enabled: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_enabled = is_enabled
        self._clock = clock
        self._lock = threading.Lock()
        self._computed = _Rate()
        self._tiers = {tier: _Rate() for tier in Tier if tier}

    def computed(self, tokens: int, seconds: float) -> None:
        """Record tokens that the engine computed in `seconds`."""
        if tokens > 0 and seconds > 0:
            with self._lock:
                self._computed.add(tokens, seconds, _KEPT_COMPUTED)

    def loaded(self, tier: Tier, tokens: int, seconds: float) -> None:
        """Record a load of one tier, also one that its deadline ended."""
        if tokens <= 0 or seconds <= 0 or tier not in self._tiers:
            return
        with self._lock:
            rate = self._tiers[tier]
            rate.add(tokens, seconds, _KEPT_OF_SLOW if rate.is_slow else _KEPT)
            computing = self._computing()
            if computing and rate.samples >= _MIN_LOADS:
                rate.is_slow = rate.per_token > (_FASTER if rate.is_slow else _SLOWER) * computing

    def compute_seconds(self, tokens: int) -> float:
        """Return how long the engine would compute these tokens; 0 while its rate is unknown."""
        return tokens * self._computing()  # without the lock: a rate of a moment ago is as good

    def hold_back(self, tiers: list[Tier], *, exhaustive: bool) -> bool:
        """Make the blocks of slow tiers MISS, in place; unless `exhaustive`, all after the first one too.

        Return whether any block was held back.
        """
        if not self._is_enabled:
            return False
        if not any(rate.is_slow for rate in self._tiers.values()):
            return False
        slow = self._slow_tiers({tier for tier in tiers if tier})
        first = next((n for n, tier in enumerate(tiers) if tier in slow), None)
        if first is None:
            return False
        for n in range(first, len(tiers)):
            if not exhaustive or tiers[n] in slow:
                tiers[n] = Tier.MISS
        return True

    def status(self) -> Mapping[str, float]:
        """Return seconds per token of the engine (`computed`) and of each measured tier."""
        with self._lock:
            rates = {tier.name.lower(): rate.per_token for tier, rate in self._tiers.items() if rate.samples}
            return {"computed": self._computing(), **rates}

    def _slow_tiers(self, asked: set[Tier]) -> set[Tier]:
        """Return the slow ones of these tiers; a tier whose trial is due is left out, once."""
        now = self._clock()
        slow = set()
        with self._lock:
            for tier in asked:
                rate = self._tiers[tier]
                if not rate.is_slow:
                    continue
                if now >= rate.next_trial:
                    rate.next_trial = now + _TRIAL_S
                else:
                    slow.add(tier)
        return slow

    def _computing(self) -> float:
        return self._computed.per_token if self._computed.total_tokens >= _MIN_COMPUTED_TOKENS else 0.0
