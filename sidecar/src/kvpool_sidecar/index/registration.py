"""Registers this node and its blocks in the index: lease, announcements, withdrawals; all again for an emptied index.

One thread with a bounded queue: if the index is unavailable for long, the queue is dropped and all blocks are announced
again later. A lost withdrawal is harmless: the node that requests the block gets MISS, and the entry is removed then.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvpool.errors import KVPoolError
from kvpool_sidecar.index.base import IndexFullError
from kvpool_sidecar.index.record import Record
from kvpool_sidecar.resilience.worker import PeriodicTask

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


class LivePeers(Protocol):
    """The resolver, as registration uses it."""

    @property
    def live_peers(self) -> int:
        """Number of other nodes that are alive."""

    def refresh(self) -> None:
        """Read the live nodes again; called after each heartbeat."""


class IndexStatus(NamedTuple):
    connected: bool
    epoch: str
    announced: int  # blocks announced in this epoch
    full: bool = False  # no memory for new entries


class IndexRegistration:
    """`announce` and `withdraw` never block. `scanned` returns whether the store knows all its blocks.

    `keys_per_s` is the rate of all live nodes together.
    """

    def __init__(
        self,
        index: Index,
        info: NodeInfo,
        store: Store,
        *,
        scanned: Callable[[], bool],
        lease_s: float,
        keys_per_s: float = 50_000.0,
        resolver: LivePeers | None = None,
    ) -> None:
        self.number = 0
        self._index = index
        self._info = info
        self._store = store
        self._scanned = scanned
        self._heartbeat_s = lease_s / 3
        self._keys_per_s = keys_per_s  # of all nodes together
        self._resolver = resolver
        self._full_until = 0.0
        self._changed = threading.Condition()
        self._queue: dict[bytes, int | None] = {}  # payload length; None: withdraw
        self._remaining: Iterator[tuple[bytes, int]] | None = None
        self._announced = 0
        self._complete = False
        self._connected = False
        self._heartbeat_due = False
        self._published_info: NodeInfo | None = None  # as last published
        self._epoch = ""
        self._heartbeat_at = 0.0
        self._task = PeriodicTask("announcer", self._run, 0.0, on_stop=self._leave)

    def start(self) -> None:
        """Register, and announce until `stop`."""
        self._task.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the lease, so that peers send no more requests."""
        self._task.stop(0.0)
        with self._changed:
            self._changed.notify_all()
        self._task.stop(timeout_s)

    def set_draining(self, *, leaving: bool, timeout_s: float = 0.0) -> bool:
        """Publish whether this node is drained, by an immediate heartbeat. True if published within `timeout_s`."""
        with self._changed:
            self._info = self._info._replace(leaving=leaving)
            self._heartbeat_due = self._published_info != self._info
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: self._published_info == self._info or self._task.is_stopping, timeout_s
            )

    def announce(self, key: bytes, payload_len: int) -> None:
        """Queue a block that this node stored."""
        if payload_len < _MAX_PAYLOAD:
            self._put({key: payload_len})

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """Queue blocks that this node no longer has."""
        self._put(dict.fromkeys(keys))

    def status(self) -> IndexStatus:
        """For /status."""
        with self._changed:
            pending = sum(1 for length in self._queue.values() if length is not None)
            connected, epoch, complete, done = self._connected, self._epoch, self._complete, self._announced
            full = self._full_until > 0
        announced = max(0, self._store.usage().blocks - pending) if complete else done
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

    def _run(self) -> float:
        """Renew the lease if that is due, and publish one batch or wait for one; return the pause after it."""
        try:
            if time.monotonic() >= self._heartbeat_at or self._heartbeat_due:
                self._heartbeat_due = False
                self._heartbeat()
                self._heartbeat_at = time.monotonic() + self._heartbeat_s
            worked = self._process()
        except KVPoolError as e:
            if self._connected:
                log.warning("the index does not respond; blocks of peers are not found until it does: %s", e)
            self._connected = False
            self._heartbeat_at = 0.0
            return _RETRY_S
        if worked:
            nodes = 1 if self._resolver is None else self._resolver.live_peers + 1
            return _BATCH * nodes / self._keys_per_s
        self._wait_for_changes(self._heartbeat_at - time.monotonic() if self._complete else _SCAN_POLL_S)
        return 0.0

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
        if self._resolver is not None:
            self._resolver.refresh()

    def _process(self) -> bool:
        """Publish one batch of changes, or else of the full announcement. False if there was nothing to do."""
        try:
            worked = self._publish_batch(only_withdrawals=time.monotonic() < self._full_until)
        except IndexFullError as e:
            if not self._full_until:
                log.warning("the index is full; new blocks are not announced until memory is free: %s", e)
            self._full_until = time.monotonic() + _FULL_S
            return False
        if worked and 0 < self._full_until < time.monotonic():
            log.info("the index has free memory again: announcing all blocks")
            self._full_until = 0.0
            with self._changed:
                self._restart_full_announcement()
        return worked

    def _publish_batch(self, *, only_withdrawals: bool) -> bool:
        with self._changed:
            queued = self._queue.items()
            wanted = (item for item in queued if item[1] is None) if only_withdrawals else iter(queued)
            changes = dict(itertools.islice(wanted, _BATCH))
        if changes:
            self._publish(changes)
            with self._changed:
                for key, length in changes.items():
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
                if self._remaining is rest:  # not published: first in the next batch
                    self._remaining = itertools.chain(batch.items(), rest)
            raise
        with self._changed:
            if self._remaining is rest:
                self._announced += len(batch)
                self._complete = len(batch) < _BATCH
                if self._complete:
                    self._remaining = None
        return True

    def _publish(self, changes: dict[bytes, int | None]) -> None:
        generation = self._info.generation
        self._index.withdraw(self.number, [key for key, length in changes.items() if length is None])
        self._index.announce(
            [
                (key, Record(self.number, length, generation))
                for key, length in changes.items()
                if length is not None and length < _MAX_PAYLOAD and self._store.contains(key)
            ]
        )

    def _wait_for_changes(self, seconds: float) -> None:
        with self._changed:
            if self._task.is_stopping:
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
                log.info("the index lease cannot be ended: %s", e)
