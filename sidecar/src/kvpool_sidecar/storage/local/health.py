"""Whether a drive may be used. Its errors fence it, and so does a call that does not return; a canary lets it back.

While a drive is fenced its blocks are misses at once: nobody waits for it, and no engine's block is the trial. The
canary is a small file, written, brought to the drive, read back and removed; it runs in a thread of its own, because a
drive that hangs would keep whoever tries it.
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
    """Thread-safe. `with fence:` around calls of the drive; `tick` must be called about once a second.

    `canary` raises OSError if the drive does not work. `strikes` errors within `window_s` seconds fence, and so does a
    call that takes longer than `hung_s`. After a failed canary the next waits twice as long.
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
        """An error of the drive itself."""
        now = self._clock()
        with self._lock:
            self._errors.append(now)
            if len(self._errors) == self._errors.maxlen and now - self._errors[0] <= self._window_s:
                self._close(f"{len(self._errors)} errors, the last: {error.strerror or error}")

    def tick(self) -> None:
        """Look for calls that do not return, and try a fenced drive when it is time. Never waits for the drive."""
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
            log.warning("drive %s is fenced, its blocks are misses until it works again: %s", self.name, why)

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
                log.warning("drive %s stays fenced: %s", self.name, problem)
                return
            self._retry_s = self._first_retry_s
            self._errors.clear()
            self.fenced = False
        log.warning("drive %s works again", self.name)
