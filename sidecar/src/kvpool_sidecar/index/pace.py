"""How fast a node announces: additive and multiplicative steps by the time that the index takes. No I/O, no clock."""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["AdaptivePace"]

_MIN_RATE: Final = 16.0
_START_RATE: Final = 8192.0
_MAX_RATE: Final = 262_144.0
_STEP: Final = 4.0
_GROWTH: Final = 1.125
_BACK_OFF: Final = 0.5
_WINDOW: Final = 4
_QUEUEING_S: Final = 0.03
_DRIFT: Final = 1.001
_FARTHEST_S: Final = 0.05


class AdaptivePace:
    """Blocks per second that one node may announce. Not thread-safe.

    The rate is halved when each of the last 4 batches took 30 ms longer than the fastest one known (at most 50 ms: a
    node may start while the server is busy): the server's queue is what lookups wait in, too. It grows by an eighth
    with each other batch. One slow batch means nothing: it may have waited for this machine.
    """

    def __init__(self) -> None:
        self.rate = _START_RATE
        self._fastest_s = _FARTHEST_S
        self._recent: deque[float] = deque(maxlen=_WINDOW)

    def note(self, seconds: float) -> None:
        """Record how long the index took for a batch."""
        self._fastest_s = min(self._fastest_s * _DRIFT, seconds, _FARTHEST_S)
        self._recent.append(seconds)
        if min(self._recent) <= self._fastest_s + _QUEUEING_S:
            self.rate = min(_MAX_RATE, max(self.rate + _STEP, self.rate * _GROWTH))
        elif len(self._recent) == _WINDOW:
            self.rate = max(_MIN_RATE, self.rate * _BACK_OFF)
            self._recent.clear()

    def fail(self) -> None:
        """Record that the index did not answer."""
        self.rate = max(_MIN_RATE, self.rate * _BACK_OFF)
        self._recent.clear()

    def pause_s(self, blocks: int, seconds: float) -> float:
        """Return the pause after a batch of `blocks` that took `seconds`."""
        return max(0.0, blocks / self.rate - seconds)
