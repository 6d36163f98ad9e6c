"""Removes index entries of nodes that never came back: one node at a time, at a bounded rate.

Entries of a dead node are ignored once its lease has ended; expiry frees their memory.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError
from kvpool_sidecar.resilience.worker import PeriodicTask

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.index.base import Index

__all__ = ["IndexExpiry"]

log = logging.getLogger(__name__)


class IndexExpiry:
    """Runs every `interval_s`. `number` returns this node's number, 0 while it has none."""

    def __init__(self, index: Index, number: Callable[[], int], *, keys_per_s: float, interval_s: float = 60.0) -> None:
        self.removed = 0
        self._index = index
        self._number = number
        self._keys_per_s = keys_per_s
        self._task = PeriodicTask("index-expiry", self._expire, interval_s, run_at_once=False)

    def start(self) -> None:
        """Start the thread."""
        self._task.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Stop, also in the middle of a run: another node starts it again."""
        self._task.stop(timeout_s)

    def _expire(self) -> None:
        if not self._number():
            return
        try:
            removed = self._index.expire(self._number(), self._pace)
        except KVPoolError as e:
            log.info("index expiry: %s", e)
            return
        self.removed += removed
        if removed:
            log.info("index expiry: removed %d entries of dead nodes", removed)

    def _pace(self, count: int) -> bool:
        return not self._task.sleep(count / self._keys_per_s)
