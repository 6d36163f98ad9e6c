"""Reports of uses that this process did not ask the sidecar for: lookups (Op.USED) and loads (Op.LOADED).

They come from one thread, at most an interval after the use, and it sleeps while there are none.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from typing import TYPE_CHECKING

from kvpool.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool.transport.connection import Connection
    from kvpool.transport.connection_pool import ConnectionPool

__all__ = ["UseReports"]

_log = logging.getLogger("kvpool")

_SEND_S = 0.5
_LINGER_S = 2.0  # after the last use; then the thread sleeps
_MAX_LISTED = 2 * wire.MAX_LOOKUP  # ids in the reports of one interval; the blocks of further uses are only counted
_MAX_WAITING = 64  # uses


class UseReports:
    """Thread-safe. No method raises or waits.

    `is_accepted`: whether a sidecar takes `op`. `tend`: called at each interval; the thread continues while it is true.
    """

    def __init__(
        self,
        op: wire.Op,
        is_accepted: Callable[[wire.ServerHello], bool],
        interval_s: float,
        tend: Callable[[], bool] = lambda: False,
    ) -> None:
        self._op = op
        self._is_accepted = is_accepted
        self._interval_s = interval_s
        self._tend = tend
        self._closed = False
        self._waiting: collections.deque[tuple[bytes, ...]] = collections.deque()
        self._unlisted = 0  # blocks of uses that no report lists
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        """Report nothing more."""
        self._closed = True
        self._wake.set()

    def record(self, block_ids: tuple[bytes, ...], connections: ConnectionPool) -> None:
        """Report one use of these blocks soon."""
        if len(self._waiting) >= _MAX_WAITING:
            with self._lock:
                self._unlisted += len(block_ids)
        else:
            self._waiting.append(block_ids)
        self.wake(connections)

    def wake(self, connections: ConnectionPool) -> None:
        """Start the thread if it sleeps."""
        if self._wake.is_set():
            return
        with self._lock:
            self._wake.set()
            if self._thread is None and not self._closed:
                name = f"kvpool-{self._op.name.lower()}"
                self._thread = threading.Thread(target=self._report, args=(connections,), name=name, daemon=True)
                self._thread.start()

    def _report(self, connections: ConnectionPool) -> None:
        idle_at = time.monotonic() + _LINGER_S
        while not self._closed:
            is_needed = self._tend()
            if self._waiting or self._unlisted:
                idle_at = time.monotonic() + _LINGER_S
                self._send(connections)
            elif not is_needed and time.monotonic() >= idle_at:
                self._wake.clear()
                if not self._waiting and not self._tend():  # a use after this sets it again
                    self._wake.wait()
                continue
            time.sleep(self._interval_s)

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
            _log.debug("kvpool: uses not reported: %s", e)

    def _notify(self, connection: Connection, block_ids: Sequence[bytes]) -> bool:
        """Report one use, and how many blocks were not listed before it. A longer one is listed in part."""
        if not self._is_accepted(connection.server):
            return False
        part = block_ids[: wire.MAX_LOOKUP]
        with self._lock:
            unlisted, self._unlisted = self._unlisted + len(block_ids) - len(part), 0
        is_sent = connection.notify(
            self._op, wire.USED_HEAD.pack(min(unlisted, 0xFFFFFFFF)) + b"".join(part), count=len(part)
        )
        if not is_sent:
            with self._lock:
                self._unlisted += unlisted - (len(block_ids) - len(part))
        return is_sent
