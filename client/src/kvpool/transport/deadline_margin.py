"""How much earlier a call must end inside, so that it returns to its caller by the deadline. No I/O.

On a machine without a free processor a thread wakes late, and waits for the interpreter's lock behind threads that wake
late, too. What is late there cannot be made up for: the next calls aim for an earlier time, or are refused immediately.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DeadlineMargin"]

_TOLERATED_S: Final = 0.1  # a pause of the interpreter, such as a garbage collection, says nothing of the next call
_MAX_S: Final = 1.0  # an engine that was stopped for minutes continues within seconds
_HALF_LIFE_S: Final = 0.5
_SHARE: Final = 0.5  # of the time that a call is given


class DeadlineMargin:
    """The lateness of recent calls, which halves twice a second. Thread-safe; takes no lock, so that it delays none."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = (0.0, 0.0)  # seconds, and when they were noted: replaced as a whole

    @property
    def seconds(self) -> float:
        """The margin now."""
        margin, noted = self._last
        return margin * 0.5 ** ((self._clock() - noted) / _HALF_LIFE_S) if margin else 0.0

    def usable(self, deadline: float) -> float | None:
        """Return the time by which a call must end inside to return by `deadline` (time.monotonic()).

        At most half of its time is given up. If the margin is more than that and than 0.1 s, the result is None: the
        call is to be refused.
        """
        margin, half = self.seconds, max(0.0, _SHARE * (deadline - self._clock()))
        if margin > max(half, _TOLERATED_S):
            return None
        return deadline - min(margin, half)

    def note(self, until: float) -> None:
        """Record that a call, which was to end inside by `until`, ends now."""
        late = min(self._clock() - until - _TOLERATED_S, _MAX_S)
        if late > self.seconds:
            self._last = (late, self._clock())
