"""Which lookups of LMCache inside an engine are repeats. Imports nothing of LMCache.

LMCache asks for a prompt's chunks when the request arrives, and again for the found ones when it loads them.
The interface has no request number, so a repeat is recognized by its last chunk, for a minute.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool.client import Client
    from kvpool.stats import Reason

__all__ = ["Rechecks"]

_VALID_S = 60.0
_MAX_PENDING = 4096


class Rechecks:
    """Last chunks found by counted lookups, bounded in number and time. Thread-safe.

    Every rank of an engine asks for the same chunks, so rank 0 alone counts.
    """

    def __init__(self, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rank = rank
        self._clock = clock
        self._lock = threading.Lock()
        self._pending: OrderedDict[bytes, list[float]] = OrderedDict()  # ends of validity, oldest first

    def count(self, client: Client, names: Sequence[bytes], found: int, reason: Reason) -> None:
        """Count a lookup that found the first `found` names, unless it is a repeat."""
        if self._rank == 0 and not self.is_repeat(names):
            client.count_lookup(len(names), found, reason)
            self.counted(names, found)

    def is_repeat(self, names: Sequence[bytes]) -> bool:
        """Return whether this lookup repeats one that was counted; each counted one has one repeat."""
        now = self._clock()
        with self._lock:
            ends = [end for end in self._pending.pop(names[-1], ()) if end > now]
            if len(ends) > 1:
                self._pending[names[-1]] = ends[1:]
            return bool(ends)

    def counted(self, names: Sequence[bytes], found: int) -> None:
        """Record a counted lookup whose first `found` names were found."""
        if found <= 0:
            return
        with self._lock:
            ends = self._pending.setdefault(names[found - 1], [])
            ends.append(self._clock() + _VALID_S)
            del ends[:-_MAX_PENDING]
            while len(self._pending) > _MAX_PENDING:
                self._pending.popitem(last=False)
