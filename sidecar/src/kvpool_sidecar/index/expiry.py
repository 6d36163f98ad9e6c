"""Removes what nodes that never came back left in the index: one node at a time, at a bounded rate.

Entries of a dead node are no answers once its lease has ended; this gives their memory back.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.index.base import Index

__all__ = ["IndexExpiry"]

log = logging.getLogger(__name__)


class IndexExpiry:
    """Looks every `look_s` whether there is something to do. `number` is this node's, 0 while it has none."""

    def __init__(self, index: Index, number: Callable[[], int], *, keys_per_s: float, look_s: float = 60.0) -> None:
        self.removed = 0
        self._index = index
        self._number = number
        self._keys_per_s = keys_per_s
        self._interval_s = look_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweeper", daemon=True)

    def start(self) -> None:
        """Go on until `stop`."""
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """End, in the middle of a sweep if need be: another node begins it anew."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            if self._number():
                self._expire()

    def _expire(self) -> None:
        try:
            removed = self._index.expire(self._number(), self._pace)
        except KVPoolError as e:
            log.info("sweeping the index: %s", e)
            return
        except Exception:
            log.exception("sweeping the index")
            return
        self.removed += removed
        if removed:
            log.info("removed %d entries of nodes that are gone from the index", removed)

    def _pace(self, count: int) -> bool:
        return not self._stop.wait(count / self._keys_per_s)
