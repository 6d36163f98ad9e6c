"""Announces this node's blocks to the index: news at the pace that the index bears, all of them at a configured rate.

Both run in one thread, apart from the heartbeat. News is served first and does not count against the rate of a
rebuild. After an outage the journal is published; what it could not hold is found by comparing store and index.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from kvpool.errors import KVPoolError
from kvpool_sidecar.index.base import IndexFullError
from kvpool_sidecar.index.journal import Journal
from kvpool_sidecar.index.pace import AdaptivePace
from kvpool_sidecar.index.record import Record
from kvpool_sidecar.resilience.worker import PeriodicTask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvpool_sidecar.index.base import Index
    from kvpool_sidecar.storage.base import Store

__all__ = ["BlockAnnouncer"]

log = logging.getLogger(__name__)

_BATCH: Final = 256
_LINGER_S: Final = 0.02  # news of this time are one batch
_MAX_JOURNAL = 1 << 17
_MAX_PAYLOAD: Final = 1 << 32
_MIN_RETRY_S: Final = 0.5
_MAX_RETRY_S: Final = 5.0
_FULL_S = 5.0
_SCAN_POLL_S: Final = 0.05
_IDLE_S: Final = 5.0


class BlockAnnouncer:
    """`put` never blocks. `rebuild_pause_s(n)` returns the pause after n blocks of a rebuild. Thread-safe.

    `on_failure` is called in the announcer's thread when the index does not answer.
    """

    def __init__(
        self,
        index: Index,
        store: Store,
        *,
        scanned: Callable[[], bool],
        rebuild_pause_s: Callable[[int], float],
    ) -> None:
        self.on_failure: Callable[[KVPoolError], None] = lambda _: None
        self._index = index
        self._store = store
        self._scanned = scanned
        self._rebuild_pause_s = rebuild_pause_s
        self._pace = AdaptivePace()
        self._changed = threading.Condition()
        self._journal = Journal(_MAX_JOURNAL)
        self._number = self._generation = 0
        self._remaining: Iterator[tuple[bytes, int]] | None = None
        self._announced = 0
        self._is_complete = False
        self._is_comparing = False
        self._full_until = 0.0
        self._news_due = self._rebuild_due = self._retry_at = 0.0
        self._retry_s = _MIN_RETRY_S
        self._task = PeriodicTask("announcer", self._run, 0.0)

    def start(self) -> None:
        """Start the thread; it waits for `restart`."""
        self._task.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the thread after the batch in progress."""
        self._task.stop(0.0)
        with self._changed:
            self._changed.notify_all()
        self._task.stop(timeout_s)

    def restart(self, number: int, generation: int) -> None:
        """Announce all blocks of the store as node `number`: the index does not have them, or not under this number."""
        with self._changed:
            self._number, self._generation = number, generation
            self._restart_full_announcement()
            self._changed.notify_all()

    def resume(self) -> None:
        """Try again immediately, if the index did not answer: a heartbeat was answered."""
        if self._retry_at:
            with self._changed:
                self._retry_at = 0.0
                self._changed.notify_all()

    def put(self, states: Mapping[bytes, int | None]) -> None:
        """Queue changed blocks: the payload length, or None for a removed block."""
        known = {key: n for key, n in states.items() if n is None or n < _MAX_PAYLOAD}
        with self._changed:
            was_idle = not self._journal
            self._journal.put(known)
            if was_idle:
                self._changed.notify_all()

    @property
    def is_full(self) -> bool:
        """True while the index has no memory for new entries."""
        return self._full_until > 0

    @property
    def rate(self) -> float:
        """Blocks per second of news that the index bears from this node, as last measured."""
        return self._pace.rate

    def announced(self) -> int:
        """Return the number of blocks in the index, as far as this node knows."""
        with self._changed:
            if not self._is_complete:
                return self._announced
            pending = self._journal.announcements
        return max(0, self._store.usage().blocks - pending)

    def _restart_full_announcement(self) -> None:
        self._remaining = None
        self._announced = 0
        self._is_complete = self._is_comparing = False
        self._rebuild_due = 0.0

    def _run(self) -> float:
        """Publish one batch, or wait for one."""
        is_due = self._number and time.monotonic() >= self._retry_at
        try:
            if not is_due or not (self._publish_news() or self._publish_all()):
                self._wait()
        except IndexFullError as e:
            if not self._full_until:
                log.warning("the index is full; new blocks are not announced until memory is free: %s [KVP0703]", e)
            self._full_until = time.monotonic() + _FULL_S
        except KVPoolError as e:
            self._pace.fail()
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(_MAX_RETRY_S, self._retry_s * 2)
            self.on_failure(e)
        return 0.0

    def _publish_news(self) -> bool:
        now = time.monotonic()
        if now < self._news_due:
            return False
        is_full = now < self._full_until
        with self._changed:
            changes = self._journal.first(_BATCH, only_withdrawals=is_full)
        if not changes:
            return False
        self._publish(changes)
        took = time.monotonic() - now
        self._pace.note(took)
        with self._changed:
            self._journal.done(changes)
        self._news_due = now + took + max(_LINGER_S, self._pace.pause_s(len(changes), took))
        if not is_full:
            self._note_success()
        return True

    def _publish_all(self) -> bool:
        """Publish one batch of the blocks of the store, which may be in the index already."""
        now = time.monotonic()
        if now < self._full_until or now < self._rebuild_due or not self._scanned():
            return False
        with self._changed:
            if self._is_complete and not self._is_comparing:
                if not self._journal.is_incomplete or self._journal:
                    return False
                log.warning("some announcements were dropped: comparing all blocks with the index")
                self._journal.is_incomplete, self._is_comparing = False, True
            if self._remaining is None:
                self._remaining = self._store.keys()
                self._announced = 0
            rest = self._remaining
        batch = dict(itertools.islice(rest, _BATCH))
        try:
            self._publish(dict(batch))
        except Exception:
            with self._changed:
                if self._remaining is rest:  # not published: first in the next batch
                    self._remaining = itertools.chain(batch.items(), rest)
            raise
        self._rebuild_due = time.monotonic() + self._rebuild_pause_s(_BATCH)
        with self._changed:
            if self._remaining is rest:
                self._announced += len(batch)
                if len(batch) < _BATCH:
                    self._is_complete, self._is_comparing, self._remaining = True, False, None
        self._note_success()
        return True

    def _note_success(self) -> None:
        self._retry_at, self._retry_s = 0.0, _MIN_RETRY_S
        if self._full_until:
            log.info("the index has free memory again")
            self._full_until = 0.0

    def _publish(self, changes: Mapping[bytes, int | None]) -> None:
        number, generation = self._number, self._generation
        self._index.withdraw(number, [key for key, length in changes.items() if length is None])
        self._index.announce(
            [
                (key, Record(number, length, generation))
                for key, length in changes.items()
                if length is not None and length < _MAX_PAYLOAD and self._store.contains(key)
            ]
        )

    def _wait(self) -> None:
        with self._changed:
            pause = self._next_due() - time.monotonic()
            if pause > 0 and not self._task.is_stopping:
                self._changed.wait(pause)

    def _next_due(self) -> float:
        now = time.monotonic()
        if not self._number:
            return now + _IDLE_S
        due = [now + _IDLE_S]
        if self._journal:
            due.append(self._news_due if not self._full_until else max(self._news_due, now + _SCAN_POLL_S))
        if not self._is_complete or self._is_comparing or self._journal.is_incomplete:
            due.append(max(self._rebuild_due, self._full_until, now + _SCAN_POLL_S))
        return max(self._retry_at, min(due))
