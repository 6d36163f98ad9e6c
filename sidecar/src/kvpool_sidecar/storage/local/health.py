"""Health of a drive: errors or a hung call fence it; a canary ends the fencing.

The blocks of a fenced drive are misses immediately: no caller waits for it, and no engine's block is used as a probe.
The
canary is a small file that is written, synced, read back and removed. It runs in its own thread, because a hung drive
would block its caller.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DriveHealth"]

log = logging.getLogger(__name__)

_STRIKES = 3
_WINDOW_S = 10.0
_HUNG_S = 5.0
_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0


class DriveHealth:
    """Thread-safe. Use `with health:` around drive calls; `tick` must be called about once a second.

    `canary` raises OSError if the drive does not work. `strikes` errors within `window_s` seconds fence the drive, and
    so does a call that takes longer than `hung_s`. Each failed canary doubles the delay before the next.
    """

    def __init__(
        self,
        name: str,
        canary: Callable[[], None],
        *,
        strikes: int = _STRIKES,
        window_s: float = _WINDOW_S,
        hung_s: float = _HUNG_S,
        retry_s: float = _RETRY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.fenced = False
        self._canary = canary
        self._window_s = window_s
        self._hung_s = hung_s
        self._first_retry_s = self._retry_s = retry_s
        self._clock = clock
        self._lock = threading.Lock()
        self._errors: deque[float] = deque(maxlen=strikes)
        self._under_way: dict[int, float] = {}  # thread: since when
        self._try_at = 0.0
        self._trying = False

    def __enter__(self) -> None:
        self._under_way.setdefault(threading.get_ident(), self._clock())

    def __exit__(self, *_: object) -> None:
        self._under_way.pop(threading.get_ident(), None)

    def record_error(self, error: OSError) -> None:
        """Record an error of the drive itself."""
        now = self._clock()
        with self._lock:
            self._errors.append(now)
            if len(self._errors) == self._errors.maxlen and now - self._errors[0] <= self._window_s:
                self._close(f"{len(self._errors)} errors, the last: {error.strerror or error}")

    def tick(self) -> None:
        """Detect hung calls, and probe a fenced drive when due. Never waits for the drive."""
        now = self._clock()
        oldest = min(list(self._under_way.values()), default=now)
        with self._lock:
            if now - oldest > self._hung_s:
                self._close(f"a call has taken {now - oldest:.0f} s")
            if not self.fenced or self._trying or now < self._try_at:
                return
            self._trying = True
        threading.Thread(target=self._try, name=f"canary-{self.name}", daemon=True).start()

    def _close(self, why: str) -> None:
        if not self.fenced:
            self.fenced = True
            self._try_at = self._clock()
            log.warning("drive %s is fenced, its blocks are misses until it works again: %s [KVP0601]", self.name, why)

    def _try(self) -> None:
        try:
            self._canary()
            problem = ""
        except OSError as e:
            problem = e.strerror or type(e).__name__
        now = self._clock()
        with self._lock:
            self._trying = False
            if any(now - since > self._hung_s for since in list(self._under_way.values())):
                problem = problem or "a call still hangs"
            if problem:
                self._try_at = now + self._retry_s
                self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
                log.warning("drive %s stays fenced: %s [KVP0601]", self.name, problem)
                return
            self._retry_s = self._first_retry_s
            self._errors.clear()
            self.fenced = False
        log.warning("drive %s works again", self.name)
