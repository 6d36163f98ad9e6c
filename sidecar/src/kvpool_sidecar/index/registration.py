"""Keeps the index true to this node: the lease, what comes and goes, and everything again when the index was emptied.

One thread. What is queued is bounded: while the index is away for long, the queue is dropped and everything is
announced again later. Withdrawals that got lost do no harm: whoever asks is told MISS, and the entry goes then.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import KVPoolError
from kvpool_sidecar.index.base import IndexFullError
from kvpool_sidecar.index.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvpool_sidecar.index.base import Index, NodeInfo
    from kvpool_sidecar.storage.base import Store

__all__ = ["IndexRegistration", "IndexStatus"]

log = logging.getLogger(__name__)

_BATCH = 256
_MAX_QUEUED = 1 << 16
_MAX_PAYLOAD = 1 << 32
_RETRY_S = 0.5
_FULL_S = 5.0
_SCAN_POLL_S = 0.05


class IndexStatus(NamedTuple):
    connected: bool
    epoch: str
    announced: int  # blocks that the index of this epoch has been told
    full: bool = False  # it has no memory for more


class IndexRegistration:
    """`announce` and `withdraw` never block; `scanned` says when the store's table is complete."""

    def __init__(
        self,
        index: Index,
        info: NodeInfo,
        store: Store,
        *,
        scanned: Callable[[], bool],
        lease_s: float,
        keys_per_s: float = 50_000.0,
        nodes: Callable[[], int] = lambda: 1,
        on_renewed: Callable[[], None] = lambda: None,
    ) -> None:
        self.number = 0
        self._index = index
        self._info = info
        self._store = store
        self._scanned = scanned
        self._heartbeat_s = lease_s / 3
        self._keys_per_s = keys_per_s  # of all nodes together
        self._nodes = nodes
        self._full_until = 0.0
        self._on_renewed = on_renewed
        self._changed = threading.Condition()
        self._queue: dict[bytes, int | None] = {}  # payload length; None: withdraw
        self._remaining: Iterator[tuple[bytes, int]] | None = None
        self._announced = 0
        self._complete = False
        self._connected = False
        self._heartbeat_due = False
        self._published_info: NodeInfo | None = None  # what the index was told last
        self._epoch = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)

    def start(self) -> None:
        """Register and go on announcing until `stop`."""
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Give the lease back, so that peers stop asking at once."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def set_draining(self, *, leaving: bool, timeout_s: float = 0.0) -> bool:
        """Tell the others that this node is drained, or is not any more, by a heartbeat that is due now.

        True if the index has been told within `timeout_s`.
        """
        with self._changed:
            self._info = self._info._replace(leaving=leaving)
            self._heartbeat_due = self._published_info != self._info
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._published_info == self._info or self._stop.is_set(), timeout_s)

    def announce(self, key: bytes, payload_len: int) -> None:
        """This node has the block now."""
        if payload_len < _MAX_PAYLOAD:
            self._put({key: payload_len})

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """This node has them no more."""
        self._put(dict.fromkeys(keys))

    def status(self) -> IndexStatus:
        """For /status."""
        with self._changed:
            coming = sum(1 for length in self._queue.values() if length is not None)
            connected, epoch, complete, done = self._connected, self._epoch, self._complete, self._announced
            full = self._full_until > 0
        announced = max(0, self._store.usage().blocks - coming) if complete else done
        return IndexStatus(connected, epoch, announced, full)

    def _put(self, items: dict[bytes, int | None]) -> None:
        with self._changed:
            for key, length in items.items():
                self._queue.pop(key, None)
                self._queue[key] = length
            if len(self._queue) > _MAX_QUEUED:
                self._queue.clear()
                self._restart_full_announcement()
            self._changed.notify_all()

    def _restart_full_announcement(self) -> None:
        self._remaining = None
        self._announced = 0
        self._complete = False

    def _run(self) -> None:
        beat_at = 0.0
        while not self._stop.is_set():
            try:
                if time.monotonic() >= beat_at or self._heartbeat_due:
                    self._heartbeat_due = False
                    self._heartbeat()
                    beat_at = time.monotonic() + self._heartbeat_s
                worked = self._process()
            except KVPoolError as e:
                if self._connected:
                    log.warning("the index does not answer; peers' blocks are not found until it does: %s", e)
                self._connected = False
                beat_at = 0.0
                self._stop.wait(_RETRY_S)
                continue
            except Exception:
                log.exception("announcing failed")
                self._stop.wait(_RETRY_S)
                continue
            if worked:
                self._stop.wait(_BATCH * max(1, self._nodes()) / self._keys_per_s)
            else:
                self._wait_for_changes(beat_at - time.monotonic() if self._complete else _SCAN_POLL_S)
        self._leave()

    def _heartbeat(self) -> None:
        info = self._info
        epoch = self._index.renew(self.number, info) if self.number else None
        if epoch is None:
            self.number = self._index.join(info)
            epoch = self._index.renew(self.number, info)
            with self._changed:
                self._restart_full_announcement()
        with self._changed:
            if epoch is None:
                epoch = ""
            if epoch != self._epoch:
                log.info("index epoch %s: announcing all blocks as node %d", epoch, self.number)
                self._epoch = epoch
                self._restart_full_announcement()
            self._connected = True
            self._published_info = info
            self._changed.notify_all()
        self._on_renewed()

    def _process(self) -> bool:
        """One batch of news, else one of everything. False if there was nothing to do."""
        try:
            worked = self._publish_batch(only_withdrawals=time.monotonic() < self._full_until)
        except IndexFullError as e:
            if not self._full_until:
                log.warning("new blocks are not announced until there is room: %s", e)
            self._full_until = time.monotonic() + _FULL_S
            return False
        if worked and 0 < self._full_until < time.monotonic():
            log.info("the index has room again: announcing all blocks")
            self._full_until = 0.0
            with self._changed:
                self._restart_full_announcement()
        return worked

    def _publish_batch(self, *, only_withdrawals: bool) -> bool:
        with self._changed:
            queued = self._queue.items()
            wanted = (item for item in queued if item[1] is None) if only_withdrawals else iter(queued)
            news = dict(itertools.islice(wanted, _BATCH))
        if news:
            self._publish(news)
            with self._changed:
                for key, length in news.items():
                    if self._queue.get(key, -1) == length:
                        del self._queue[key]
            return True
        if only_withdrawals:
            return False
        if self._complete or not self._scanned():
            return False
        with self._changed:
            if self._remaining is None:
                self._remaining = self._store.keys()
                self._announced = 0
            rest = self._remaining
        batch = dict(itertools.islice(rest, _BATCH))
        try:
            self._publish(dict(batch))
        except Exception:
            with self._changed:
                if self._remaining is rest:  # it was not told: first of all next time
                    self._remaining = itertools.chain(batch.items(), rest)
            raise
        with self._changed:
            if self._remaining is rest:
                self._announced += len(batch)
                self._complete = len(batch) < _BATCH
                if self._complete:
                    self._remaining = None
        return True

    def _publish(self, news: dict[bytes, int | None]) -> None:
        generation = self._info.generation
        self._index.withdraw(self.number, [key for key, length in news.items() if length is None])
        self._index.announce(
            [
                (key, Record(self.number, length, generation))
                for key, length in news.items()
                if length is not None and length < _MAX_PAYLOAD and self._store.contains(key)
            ]
        )

    def _wait_for_changes(self, seconds: float) -> None:
        with self._changed:
            if self._stop.is_set():
                return
            if self._full_until:
                seconds = min(seconds, max(_SCAN_POLL_S, self._full_until - time.monotonic()))
            if (not self._queue or self._full_until) and not self._heartbeat_due:
                self._changed.wait(max(0.0, seconds))

    def _leave(self) -> None:
        if self.number:
            try:
                self._index.leave(self.number, self._info)
            except Exception as e:
                log.info("could not give the lease back: %s", e)
