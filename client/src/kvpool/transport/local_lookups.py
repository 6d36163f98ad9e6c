"""Lookups that this process answers itself from the sidecar's block table, and reports of them to the sidecar.

The sidecar hears of each such lookup within `INTERVAL_S`, by Op.USED: read-ahead, the eviction order and its counters
follow lookups.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError, ProtocolError, RefusedError
from kvpool.protocol import wire
from kvpool.transport.block_table import BlockTable
from kvpool.transport.descriptor_closer import close_later
from kvpool.transport.use_reports import UseReports

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvpool.transport.connection import Connection
    from kvpool.transport.connection_pool import ConnectionPool

__all__ = ["INTERVAL_S", "LocalLookups"]

_log = logging.getLogger("kvpool")

INTERVAL_S = 0.02
"""Time between two reports."""
_MAP_S = 1.0


class LocalLookups:
    """Thread-safe. No method raises, and none but `renew` waits."""

    def __init__(self) -> None:
        self._table: BlockTable | None = None
        self._is_offered = False
        self._closed = False
        self._reports = UseReports(wire.Op.USED, lambda server: server.block_tables, INTERVAL_S)

    def reset(self, *, is_offered: bool) -> None:
        """Forget the table, because another connection was made; `is_offered`: its sidecar has tables."""
        self._table, self._is_offered = None, is_offered

    def close(self) -> None:
        """Answer nothing more."""
        self._closed, self._table = True, None
        self._reports.close()

    @property
    def table(self) -> BlockTable | None:
        """The sidecar's block table, if there is one; it may be invalid."""
        return self._table

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
        self._reports.record(tuple(block_ids), connections)
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


def _request(connection: Connection, deadline: float) -> BlockTable | None:
    """Map the table that the sidecar of this connection gives, if any."""
    if not connection.server.block_tables:
        return None
    reply = connection.request(wire.Op.MAP, deadline=deadline, max_descriptors=1, abandonable=True)
    try:
        return BlockTable(reply.descriptors[0]) if reply.descriptors else None
    finally:
        close_later(reply.descriptors)
