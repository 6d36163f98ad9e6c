"""Lookups that this process answers itself from the sidecar's block table, and reports of them to the sidecar.

The sidecar hears of each such lookup within `INTERVAL_S`, by Op.USED: read-ahead, the eviction order and its counters
follow lookups. The reports come from one thread, which sleeps while no lookups are answered here.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError, ProtocolError, RefusedError
from kvpool.protocol import wire
from kvpool.transport.block_table import BlockTable
from kvpool.transport.descriptor_closer import close_later

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvpool.transport.connection import Connection
    from kvpool.transport.connection_pool import ConnectionPool

__all__ = ["INTERVAL_S", "LocalLookups"]

_log = logging.getLogger("kvpool")

INTERVAL_S = 0.02
"""Time between two reports."""
_SEND_S = 0.5
_LINGER_S = 2.0  # after the last lookup; then the thread sleeps
_MAP_S = 1.0
_MAX_LISTED = 2 * wire.MAX_LOOKUP  # ids in the reports of one interval; the blocks of further lookups are only counted
_MAX_WAITING = 64  # lookups


class LocalLookups:
    """Thread-safe. No method raises, and none but `renew` waits."""

    def __init__(self) -> None:
        self._table: BlockTable | None = None
        self._is_offered = False
        self._closed = False
        self._waiting: collections.deque[tuple[bytes, ...]] = collections.deque()
        self._unlisted = 0  # blocks of lookups that no report lists
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def reset(self, *, is_offered: bool) -> None:
        """Forget the table, because another connection was made; `is_offered`: its sidecar has tables."""
        self._table, self._is_offered = None, is_offered

    def close(self) -> None:
        """Answer nothing more."""
        self._closed, self._table = True, None
        self._wake.set()

    @property
    def is_due(self) -> bool:
        """True if `renew` would request a table."""
        return self._is_offered and not self._closed and (self._table is None or not self._table.is_valid)

    def has_all(self, block_ids: Sequence[bytes], connections: ConnectionPool) -> bool:
        """Return whether this node has each of these blocks. If so, the lookup is reported to the sidecar."""
        table = self._table
        if table is None:
            return False
        try:
            if not table.has_all(block_ids):
                if not table.is_valid:
                    self._table = None
                    connections.wake()  # to `renew`
                return False
        except Exception:
            _log.exception("kvpool: a block table cannot be read; the sidecar is asked")
            self._table = None
            return False
        self._record(tuple(block_ids), connections)
        return True

    def forget(self, block_ids: Iterable[bytes]) -> None:
        """Search the table again for blocks that could not be loaded."""
        if (table := self._table) is not None:
            table.forget(block_ids)

    def renew(self, connections: ConnectionPool) -> None:
        """Request the table of this tenant and fingerprint, if there is none that is valid."""
        if not self.is_due:
            return
        try:
            deadline = time.monotonic() + _MAP_S
            with connections.acquire("store", deadline) as connection:
                self._table = _request(connection, deadline)
        except (ProtocolError, RefusedError, OSError) as e:
            self._is_offered = False  # until the next connection
            _log.warning("kvpool: the sidecar's block table is not used: %s", e)
        except KVPoolError as e:  # retried at the next call
            _log.debug("kvpool: no block table: %s", e)

    def _record(self, block_ids: tuple[bytes, ...], connections: ConnectionPool) -> None:
        if len(self._waiting) >= _MAX_WAITING:
            with self._lock:
                self._unlisted += len(block_ids)
        else:
            self._waiting.append(block_ids)
        if not self._wake.is_set():
            self._start(connections)

    def _start(self, connections: ConnectionPool) -> None:
        with self._lock:
            self._wake.set()
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._report, args=(connections,), name="kvpool-used", daemon=True
                )
                self._thread.start()

    def _report(self, connections: ConnectionPool) -> None:
        idle_at = time.monotonic() + _LINGER_S
        while not self._closed:
            if self._waiting or self._unlisted:
                idle_at = time.monotonic() + _LINGER_S
                self._send(connections)
            elif time.monotonic() >= idle_at:
                self._wake.clear()
                if not self._waiting:  # a lookup after this sets it again
                    self._wake.wait()
                continue
            time.sleep(INTERVAL_S)

    def _send(self, connections: ConnectionPool) -> None:
        listed = 0
        try:
            with connections.acquire("store", time.monotonic() + _SEND_S) as connection:
                while self._waiting:
                    block_ids = self._waiting.popleft()
                    listed += len(block_ids)
                    if listed > _MAX_LISTED or not self._notify(connection, block_ids):
                        with self._lock:
                            self._unlisted += len(block_ids)
                if self._unlisted:
                    self._notify(connection, ())
        except Exception as e:
            _log.debug("kvpool: lookups not reported: %s", e)

    def _notify(self, connection: Connection, block_ids: Sequence[bytes]) -> bool:
        """Report one lookup, and how many blocks were not listed before it. A longer one is listed in part."""
        if not connection.server.block_tables:
            return False
        part = block_ids[: wire.MAX_LOOKUP]
        with self._lock:
            unlisted, self._unlisted = self._unlisted + len(block_ids) - len(part), 0
        is_sent = connection.notify(
            wire.Op.USED, wire.USED_HEAD.pack(min(unlisted, 0xFFFFFFFF)) + b"".join(part), count=len(part)
        )
        if not is_sent:
            with self._lock:
                self._unlisted += unlisted - (len(block_ids) - len(part))
        return is_sent


def _request(connection: Connection, deadline: float) -> BlockTable | None:
    """Map the table that the sidecar of this connection gives, if any."""
    if not connection.server.block_tables:
        return None
    reply = connection.request(wire.Op.MAP, deadline=deadline, max_descriptors=1, abandonable=True)
    try:
        return BlockTable(reply.descriptors[0]) if reply.descriptors else None
    finally:
        close_later(reply.descriptors)
