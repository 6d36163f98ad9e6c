"""Registers this node and its blocks in the index: lease, announcements, withdrawals; all again for an emptied index.

The heartbeat has a thread of its own, so that no announcement delays it (kvpool_sidecar.index.announcer). A lost
withdrawal is harmless: the node that requests the block gets MISS, and the entry is removed then.
"""

from __future__ import annotations

import logging
import random
import threading
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from kvpool.errors import KVPoolError
from kvpool_sidecar.index.announcer import BlockAnnouncer
from kvpool_sidecar.resilience.worker import PeriodicTask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_sidecar.index.base import Index, NodeInfo
    from kvpool_sidecar.storage.base import Store

__all__ = ["IndexRegistration", "IndexStatus"]

log = logging.getLogger(__name__)

_MIN_RETRY_S: Final = 0.5


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

    `keys_per_s` is the rate at which all live nodes together announce what they have to an emptied index; news is
    paced by what the index bears.
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
        self._heartbeat_s = lease_s / 3
        self._keys_per_s = keys_per_s  # of all nodes together
        self._resolver = resolver
        self._changed = threading.Condition()
        self._connected = False
        self._retry_s = min(_MIN_RETRY_S, self._heartbeat_s)
        self._published_info: NodeInfo | None = None  # as last published
        self._epoch = ""
        self._announcer = BlockAnnouncer(index, store, scanned=scanned, rebuild_pause_s=self._rebuild_pause_s)
        self._announcer.on_failure = self._on_failure
        self._task = PeriodicTask("heartbeat", self._heartbeat, self._heartbeat_s, on_stop=self._leave)

    def start(self) -> None:
        """Register, and announce until `stop`."""
        self._task.start()
        self._announcer.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the lease, so that peers send no more requests."""
        self._task.stop(0.0)
        with self._changed:
            self._changed.notify_all()
        self._task.stop(timeout_s)
        self._announcer.stop(timeout_s)

    def set_draining(self, *, leaving: bool, timeout_s: float = 0.0) -> bool:
        """Publish whether this node is drained, by an immediate heartbeat. True if published within `timeout_s`."""
        with self._changed:
            self._info = self._info._replace(leaving=leaving)
            if self._published_info != self._info:
                self._task.trigger()
            return self._changed.wait_for(
                lambda: self._published_info == self._info or self._task.is_stopping, timeout_s
            )

    def announce(self, key: bytes, payload_len: int) -> None:
        """Queue a block that this node stored."""
        self._announcer.put({key: payload_len})

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """Queue blocks that this node no longer has."""
        self._announcer.put(dict.fromkeys(keys))

    def status(self) -> IndexStatus:
        """For /status."""
        with self._changed:
            connected, epoch = self._connected, self._epoch
        return IndexStatus(connected, epoch, self._announcer.announced(), self._announcer.is_full)

    def _rebuild_pause_s(self, blocks: int) -> float:
        nodes = 1 if self._resolver is None else self._resolver.live_peers + 1
        return blocks * nodes / self._keys_per_s

    def _on_failure(self, error: KVPoolError) -> None:
        if self._note_failure(error):
            self._task.trigger()  # heartbeats notice the index's return, and whether it was emptied meanwhile

    def _note_failure(self, error: KVPoolError) -> bool:
        """Return whether this is the first failure in a row."""
        with self._changed:
            was_connected, self._connected = self._connected, False
        if was_connected:
            log.warning("the index does not respond; blocks of peers are not found until it does: %s [KVP0702]", error)
        return was_connected

    def _heartbeat(self) -> float:
        """Renew the lease, and read the other nodes; return the pause after it."""
        try:
            self._renew()
        except KVPoolError as e:
            self._note_failure(e)
            pause, self._retry_s = self._retry_s, min(self._heartbeat_s, self._retry_s * 2)
            return pause * random.uniform(0.5, 1.0)  # noqa: S311 - spreads the nodes of a pool
        self._retry_s = min(_MIN_RETRY_S, self._heartbeat_s)
        self._announcer.resume()
        if self._resolver is not None:
            self._resolver.refresh()
        return self._heartbeat_s * random.uniform(0.9, 1.0)  # noqa: S311 - spreads the nodes of a pool

    def _renew(self) -> None:
        info, before = self._info, self.number
        epoch = self._index.renew(self.number, info) if self.number else None
        if epoch is None:
            self.number = self._index.join(info)
            epoch = self._index.renew(self.number, info) or ""
        if epoch != self._epoch or self.number != before:
            log.info("index epoch %s: announcing all blocks as node %d", epoch, self.number)
            self._announcer.restart(self.number, info.generation)
        with self._changed:
            self._epoch = epoch
            self._connected = True
            self._published_info = info
            self._changed.notify_all()

    def _leave(self) -> None:
        if self.number:
            try:
                self._index.leave(self.number, self._info)
            except Exception as e:
                log.info("the index lease cannot be ended: %s", e)
